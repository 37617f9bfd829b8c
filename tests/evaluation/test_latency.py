from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_evaluation import tiny_pipeline
from tiny_networks import captions, tiny_target

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Round
from tempera.decoding.timing import Clock
from tempera.evaluation import latency
from tempera.evaluation.latency import (
    PLAIN,
    WARM,
    batch_speedups,
    breakdown,
    efficiency,
    measure,
    speed,
    whole_batches,
)
from tempera.evaluation.pipeline import Method, Pipeline
from tempera.exactness.tables import TableTarget
from tempera.metrics.bootstrap import Interval
from tempera.runtime.row_store import Store
from tempera.shapes.scenes import world_prompts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(method, prompt id) of every decode, in order; those that warm up are `warm ar` and `warm
    method`.
    """
    seen: list[tuple[str, str]] = []
    tokens = Pipeline.tokens
    rounds = Method.rounds

    def spy(self: Pipeline, prompts: Any, method: Any = None, **options: Any) -> Any:
        kind = "ar" if (method or self.method).is_plain else "method"
        kind = "clocked" if isinstance(options.get("run"), Clock) else kind
        seen.append((kind, prompts[0].id))
        return tokens(self, prompts, method, **options)

    def warm(
        self: Method, target: Any, streams: Any, prompts: Any, *of_decode: Any
    ) -> Iterator[Round]:
        kind = "warm ar" if self.is_plain else "warm method"
        for round in rounds(self, target, streams, prompts, *of_decode):
            if not of_decode:
                seen.append((kind, prompts[0]))
            yield round

    monkeypatch.setattr(Pipeline, "tokens", spy)
    monkeypatch.setattr(Method, "rounds", warm)
    return seen


def test_plain_and_method_in_turn_with_alternating_order_after_rounds_that_warm_up(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    prompts = world_prompts(3)
    one, two, three = (prompt.id for prompt in prompts)
    rows = measure(tiny_pipeline(), prompts, Store(tmp_path, "run"))
    text = prompts[0].text
    warm = [("warm ar", text)] * WARM
    assert calls[:WARM] == warm and {*calls[WARM:-6]} == {("warm method", text)}
    assert len(calls) <= 2 * WARM + 6  # a method may complete its image sooner
    assert calls[-6:-4] == [("ar", one), ("clocked", one)]
    assert calls[-4:-2] == [("method", two), ("ar", two)]  # the parts are those of one prompt
    assert calls[-2:] == [("ar", three), ("method", three)]
    assert [row["id"] for row in rows] == [one, two, three]
    calls.clear()
    assert measure(tiny_pipeline(), prompts, Store(tmp_path, "run")) == rows
    assert calls == []


def test_compiled_rounds_are_warmed_up_by_a_whole_image(
    tmp_path: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableTarget, "compiled", True)
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    (prompt,) = prompts = world_prompts(1)
    measure(tiny_pipeline(), prompts, Store(tmp_path, "run"))
    kinds = [kind for kind, name in calls if name == prompt.id]
    assert kinds == ["ar", "method", "ar", "clocked"]


def test_a_clock_that_waits_for_the_device_gets_a_decode_of_its_own(
    tmp_path: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "is_awaited", lambda device: True)
    (row,) = measure(tiny_pipeline(), world_prompts(1), Store(tmp_path, "run"))
    assert [kind for kind, _ in calls if "warm" not in kind] == ["ar", "method", "clocked"]
    assert row["clocked"] == row["rounds"] and row["part_target"] > 0


def seconds_of(monkeypatch: pytest.MonkeyPatch, pairs: Sequence[tuple[float, float]]) -> None:
    """Let decodes of the prompts in turn take these seconds by AR, and by the method a round."""
    clock = iter(pairs)

    def fake(pipeline: Pipeline, group: list[Prompt], *_: Any) -> dict[str, Any]:
        ar, round = next(clock)
        rounds = 3.0
        others = {"rounds": rounds, "load": 0.0, "text_encoder": 0.0, "image_decoder": 0.0}
        return {"id": group[0].id, "ar": ar, "method": rounds * round, **others}

    monkeypatch.setattr(latency, "_time_one", fake)


STEADY = [(6.0, 2.0), (6.0, 2.1), (6.0, 1.9), (6.0, 2.0), (6.0, 2.0), (6.0, 2.0), (6.0, 2.0)]
UNSURE = [(6.0, 1.0), (6.0, 2.0), (6.0, 3.0), (6.0, 2.0), (6.0, 1.5), (6.0, 2.0), (6.0, 2.0)]
SLOW = [(ar, 10 * round) for ar, round in STEADY]


@pytest.mark.parametrize(
    ("pairs", "width", "count"),
    [
        (STEADY, 0.2, 5),
        (SLOW, 0.2, 5),  # not by the value
        (STEADY, 1e9, 5),  # never fewer
        (STEADY, 0.01, 7),
        (STEADY, None, 7),
        (UNSURE, 0.2, 7),
    ],
)
def test_timing_stops_when_a_rounds_cost_is_known_well_enough(
    pairs: Any, width: float | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_of(monkeypatch, pairs)
    prompts = world_prompts(len(pairs))
    store = Store(tmp_path, "run")
    rows = measure(tiny_pipeline(), prompts, store, width)
    assert len(rows) == len(store.rows()) == count
    assert efficiency(rows, 6).n == count
    assert measure(tiny_pipeline(), prompts, store, width) == rows  # nothing is timed again


def test_methods_of_a_sweep_share_the_timings_of_plain_autoregression(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    prompts = world_prompts(3)
    one, two, three = (prompt.id for prompt in prompts)
    plain = Store(tmp_path / "plain", "model", PLAIN)

    def ran() -> list[tuple[str, str]]:
        made = [call for call in calls if "warm" not in call[0]]
        calls.clear()
        return made

    first = measure(tiny_pipeline(), prompts[:2], Store(tmp_path / "a", "a"), plain=plain)
    assert ran() == [
        ("ar", one), ("clocked", one), ("method", two), ("ar", two)
    ]  # fmt: skip
    second = measure(tiny_pipeline(), prompts, Store(tmp_path / "b", "b"), plain=plain)
    assert ran() == [
        ("clocked", one), ("method", two), ("ar", three), ("method", three)
    ]  # fmt: skip
    assert [row["ar"] for row in second[:2]] == [row["ar"] for row in first]
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
    rows = measure(tiny_pipeline(), prompts, Store(tmp_path, "run"), batch_size=4)
    first, second = prompts[0].id, prompts[4].id
    calls = [call for call in calls if "warm" not in call[0]]
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


def test_speed_is_the_median_of_paired_rounds_times_the_length_accepted_in_all_images() -> None:
    parts = {"part_draft": 0.2, "part_target": 0.6, "part_verify": 0.1, "part_commit": 0.1}
    pairs = [(8.0, 4.0), (12.0, 2.0), (3.0, 3.0)]
    others = {"text_encoder": 0.5, "image_decoder": 0.25, "rounds": 100, "clocked": 100, **parts}
    rows = [{"ar": ar, "method": method, **others} for ar, method in pairs]
    result = speed(rows, 400, Interval(3.0, 3.0, 3.0, 64))
    # the median of 2, 6 and 1, by 4 tokens a round; not their mean, nor the ratio of medians
    assert result["efficiency"] == Interval(0.5, 0.25, 1.5, 3)
    assert [*result["speedup"].as_dict().values()] == pytest.approx([1.5, 0.75, 4.5, 3])
    assert result["latency_ar"].value == 8
    parts_of = ("part_", "clocked")
    unclocked = {key: value for key, value in rows[0].items() if not key.startswith(parts_of)}
    time = breakdown([*rows, unclocked])
    target = time["parts"]["target"]
    assert [target["share"], target["ms_per_round"]] == pytest.approx([0.6, 6])
    assert (time["text_encoder"], time["image_decoder"]) == (0.5, 0.25)
