"""The table of metrics: adding one is an entry and the function that computes it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_evaluation import ToyEvaluator, tiny_evaluate, tiny_pipeline

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import bootstrap, table
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Networks
from tempera.metrics.quality import quality
from tempera.metrics.table import METRICS, Metric
from tempera.reporting import paper_tables, pareto
from tempera.reporting.baseline import compare
from tempera.reporting.collect import _paired, collect, results
from tempera.reporting.report import sections_of
from tempera.runtime.tracking import Tracker

SHOWN = {"in_report": True, "higher_is_better": True}
NEW = (
    Metric("brightness", "brightness", "of 255", ".1f", in_pareto="quality", paired=True, **SHOWN),
    Metric("shift", "mean shift", "", ".2f", in_pareto="more", **SHOWN),
)


def brightness(pictures: torch.Tensor, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """A score of each picture."""
    return {"brightness": pictures.float().mean((1, 2, 3))}


def shift(generated: Array, real: Array, resamples: int) -> Interval:
    """A distance of two sets."""
    return bootstrap.mean(np.abs(generated - real.mean(0)).mean(1), resamples)


class Extended(ToyEvaluator):
    def load(self, device: torch.device) -> Iterator[Networks]:
        (networks,) = super().load(device)
        yield replace(
            networks,
            scores=[*networks.scores, brightness],
            distances={**networks.distances, "shift": shift},
        )


class Spy(Tracker):
    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, values: Any, step: int | None = None) -> None:
        self.logged |= values


@pytest.mark.slow
def test_a_new_metric_is_one_entry_and_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It appears in metrics.json, on the console, in W&B, in reports, on the Pareto plots, and in
    papers' tables.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "METRICS", (*METRICS, *NEW))
    spy, options = Spy(), {"timed": 1, "model": "tiny", "seed": 0}
    plain = tiny_pipeline(plain=True)
    tiny_evaluate(tmp_path / "ar", plain, evaluator=Extended(), method="ar", delta=None, **options)
    tiny_evaluate(tmp_path / "cool", evaluator=Extended(), tracker=spy, **options)
    assert "brightness ↑" in capsys.readouterr().out
    known = json.loads((tmp_path / "cool" / "metrics.json").read_text())["metrics"]
    assert spy.logged["brightness"] == known["brightness"]["value"] > 0
    assert spy.logged["shift"] == known["shift"]["value"] > 0

    runs, damaged = collect([tmp_path / "ar", tmp_path / "cool"])
    assert damaged == []
    compare(runs)
    first, differences, *_ = sections_of(runs)
    assert {"brightness ↑", "mean shift ↑"} <= {*first.table}
    assert first.table["brightness ↑"][1].startswith(f"{known['brightness']['value']:.1f} (")
    assert "brightness" in differences.table
    frame = results(runs)
    assert frame["shift_high"][1] == known["shift"]["high"]
    gain, quality = table.find("accepted_length"), table.find("brightness")
    assert len(pareto.points(frame, gain, quality)) == 2
    assert quality in pareto.axes("quality") and table.find("shift") in pareto.axes("more")
    found = paper_tables.quantity("brightness").of(runs[1:])
    assert found.tolist() == [known["brightness"]["value"]]


def test_keys_and_titles_are_unique() -> None:
    for names in ([metric.key for metric in METRICS], [metric.title for metric in METRICS]):
        assert len(set(names)) == len(names)


def test_a_distance_without_an_entry_is_refused() -> None:
    networks = Networks(lambda pictures: pictures, distances={"cmmd": shift})
    rows = [{"features": [0.0, 1.0]}] * 16
    with pytest.raises(TemperaError, match="there is no metric `cmmd`: add an entry to"):
        quality(rows, networks, np.zeros((16, 2)), 10)


def test_a_score_that_a_prompt_leaves_open_does_not_count() -> None:
    rows = [
        {"shape1": 1.0, "shape2": 0.0, "clip_score": 0.5},
        {"shape1": None, "clip_score": 0.25},
    ]
    metrics = quality(rows, Networks(), None, 10)
    assert (metrics["shape_accuracy"].value, metrics["shape_accuracy"].n) == (0.5, 1)
    assert (metrics["clip_score"].value, metrics["clip_score"].n) == (0.375, 2)
    assert "colour_accuracy" not in metrics
    assert "fid" not in metrics


def test_a_prompts_own_value() -> None:
    row = {"rounds": 2.0, "accepted_length": 2.0, "logprob": -6.0, "shape1": 1.0}
    values, weights = _paired(pd.DataFrame([{**row, "shape2": one} for one in (None, 0.0)]), 4)
    found = {key: (values[key].tolist(), weights[key].tolist()) for key in values}
    assert found["accepted_length"] == ([2.0, 2.0], [2.0, 2.0])
    assert found["logprob_per_token"] == ([-1.5, -1.5], [1.0, 1.0])
    assert found["shape_accuracy"] == ([1.0, 0.5], [1.0, 1.0])
    assert "clip_score" not in found
