from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_evaluation import tiny_pipeline
from tiny_networks import captions, tiny_target

from tempera.data.prompts import Prompt
from tempera.evaluation.latency import (
    PLAIN,
    batch_speedups,
    breakdown,
    measure,
    speed,
    whole_batches,
)
from tempera.evaluation.pipeline import Pipeline
from tempera.metrics.bootstrap import Interval
from tempera.runtime.row_store import Store
from tempera.shapes.scenes import world_prompts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(method, prompt id) of every decode, in order."""
    seen: list[tuple[str, str]] = []
    real = Pipeline.tokens

    def spy(self: Pipeline, prompts: Any, method: Any = None, **options: Any) -> Any:
        kind = "ar" if (method or self.method).is_plain else "method"
        kind = "clocked" if "run" in options else kind
        seen.append((kind, prompts[0].id))
        return real(self, prompts, method, **options)

    monkeypatch.setattr(Pipeline, "tokens", spy)
    return seen


def test_plain_and_method_in_turn_with_alternating_order_after_warm_up(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    prompts = world_prompts(3)
    one, two, three = (prompt.id for prompt in prompts)
    rows = measure(tiny_pipeline(), prompts, Store(tmp_path, "run"))
    assert calls[:2] == [("ar", one), ("method", one)]  # warm-up
    assert calls[2:5] == [("ar", one), ("method", one), ("clocked", one)]
    assert calls[5:8] == [("method", two), ("ar", two), ("clocked", two)]
    assert calls[8:] == [("ar", three), ("method", three)]  # the parts are those of two prompts
    assert [row["id"] for row in rows] == [one, two, three]
    calls.clear()
    assert measure(tiny_pipeline(), prompts, Store(tmp_path, "run")) == rows
    assert calls == []


def test_methods_of_a_sweep_share_the_timings_of_plain_autoregression(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    prompts = world_prompts(3)
    one, two, three = (prompt.id for prompt in prompts)
    plain = Store(tmp_path / "plain", "model", PLAIN)
    first = measure(tiny_pipeline(), prompts[:2], Store(tmp_path / "a", "a"), plain=plain)
    assert calls[:4] == [("ar", one), ("ar", one), ("ar", two), ("method", one)]  # warm-ups too
    assert calls[4:] == [("method", one), ("clocked", one), ("method", two), ("clocked", two)]
    calls.clear()
    second = measure(tiny_pipeline(), prompts, Store(tmp_path / "b", "b"), plain=plain)
    assert [call for call in calls if call[0] == "ar"] == [("ar", three), ("ar", three)]
    assert [row["ar"] for row in second[:2]] == [row["ar"] for row in first]
    calls.clear()
    last = measure(tiny_pipeline(plain=True), prompts, Store(tmp_path / "ar", "ar"), plain=plain)
    assert [row["ar"] for row in last] == [row["method"] for row in last]
    other = [Prompt(prompt.id, "another text") for prompt in prompts]
    assert len(plain.rows()) == 3
    measure(tiny_pipeline(), other, Store(tmp_path / "c", "c"), plain=plain)
    assert len(plain.rows()) == 6


def test_a_larger_batch_is_timed_as_a_whole_and_shared_out(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    prompts = whole_batches(world_prompts(3), 5, 4)
    assert [prompt.text for prompt in prompts[:6]] == [
        prompt.text for prompt in [*world_prompts(3)] * 2
    ]
    assert len({prompt.id for prompt in prompts}) == 8  # other ids, so that no image comes twice
    rows = measure(tiny_pipeline(), prompts, Store(tmp_path, "run"), 0, batch_size=4)
    first, second = prompts[0].id, prompts[4].id
    assert calls == [("ar", first), ("method", first), ("method", second), ("ar", second)]
    assert [row["id"] for row in rows] == [first, second]
    assert whole_batches(world_prompts(3), 0, 8) == []
    speedups = batch_speedups({8: [{"ar": 6.0, "method": 2.0}, {"ar": 2.0, "method": 2.0}], 32: []})
    assert list(speedups) == ["speedup_8"] and speedups["speedup_8"].value == 2


def test_the_text_encoder_is_left_out_and_runs_once(tmp_path: Path) -> None:
    texts: list[list[str]] = []

    def encode(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        texts.append(prompts)
        return captions(prompts)

    target = tiny_target(conditioner=encode)
    pipeline = replace(tiny_pipeline(plain=True), target=target)
    prompts = [Prompt("a", "ring")]
    with pipeline.text_encoded(prompts) as seconds:
        first, second = pipeline.tokens(prompts), pipeline.tokens(prompts)
        assert texts == [["ring"]]
    assert seconds > 0 and torch.equal(first.tokens, second.tokens)
    assert torch.equal(pipeline.tokens(prompts).tokens, first.tokens)
    assert texts == [["ring"], ["ring"]]


def test_speed_is_a_median_of_paired_ratios() -> None:
    parts = {"part_draft": 0.2, "part_target": 0.6, "part_verify": 0.1, "part_commit": 0.1}
    pairs = [(8.0, 4.0), (12.0, 2.0), (3.0, 3.0)]
    others = {"text_encoder": 0.5, "image_decoder": 0.25, "rounds": 100, "clocked": 100, **parts}
    rows = [{"ar": ar, "method": method, **others} for ar, method in pairs]
    result = speed(rows, length=400)
    # the median of 2, 6, 1; not their mean, nor the ratio of medians
    assert result["speedup"] == Interval(2, 1, 6, 3)
    assert result["efficiency"].value == 0.5 and result["latency_ar"].value == 8
    assert np.isnan(breakdown(rows)["test_ms"])
    rows[1] |= {"part_test": 0.05}
    parts_of = ("part_", "clocked")
    unclocked = {key: value for key, value in rows[0].items() if not key.startswith(parts_of)}
    time = breakdown([*rows, unclocked])
    target = time["parts"]["target"]
    assert [target["share"], target["ms_per_round"]] == pytest.approx([0.6, 6])
    assert (time["text_encoder"], time["image_decoder"], time["test_ms"]) == (0.5, 0.25, 0.5)
