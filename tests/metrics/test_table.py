"""The table of metrics, and what its entries mean for records."""

import pandas as pd
import pytest

from tempera.errors import TemperaError
from tempera.metrics.evaluators import Networks
from tempera.metrics.quality import quality
from tempera.metrics.table import METRICS, find
from tempera.reporting.collect import _paired


def test_keys_and_titles_are_unique() -> None:
    for names in ([metric.key for metric in METRICS], [metric.title for metric in METRICS]):
        assert len(set(names)) == len(names)


def test_a_score_that_a_prompt_leaves_open_does_not_count() -> None:
    rows = [
        {"shape1": 1.0, "shape2": 0.0, "clip_score": 0.5},
        {"shape1": None, "clip_score": 0.25},
    ]
    metrics = quality(rows, Networks(), None, 10)
    assert (metrics["shape_accuracy"].value, metrics["shape_accuracy"].n) == (0.5, 1)
    assert (metrics["clip_score"].value, metrics["clip_score"].n) == (0.375, 2)
    assert "colour_accuracy" not in metrics
    with pytest.raises(TemperaError, match="there is no metric `cmmd`"):
        find("cmmd")


def test_a_prompts_own_value() -> None:
    row = {"rounds": 2.0, "accepted_length": 2.0, "logprob": -6.0, "shape1": 1.0}
    frame = pd.DataFrame([{**row, "shape2": one} for one in (None, 0.0)])
    values, weights = _paired(frame, 4, METRICS)
    found = {key: (values[key].tolist(), weights[key].tolist()) for key in values}
    assert found["accepted_length"] == ([2.0, 2.0], [2.0, 2.0])
    assert found["logprob_per_token"] == ([-1.5, -1.5], [1.0, 1.0])
    assert found["shape_accuracy"] == ([1.0, 0.5], [1.0, 1.0])
    assert "clip_score" not in found
