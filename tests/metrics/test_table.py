"""The table of metrics, and what its entries mean for records."""

import numpy as np
import pandas as pd
import pytest

from tempera.errors import TemperaError
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Networks
from tempera.metrics.quality import quality
from tempera.metrics.table import METRICS
from tempera.reporting.collect import _paired


def shift(generated: Array, real: Array, resamples: int) -> Interval:
    """A distance of two sets."""
    return bootstrap.mean(np.abs(generated - real.mean(0)).mean(1), resamples)


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
