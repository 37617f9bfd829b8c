"""Intervals by resampling images."""

import numpy as np
import pytest

from tempera.metrics import bootstrap


def test_intervals_of_means_ratios_and_medians() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(5, 2, 400)
    interval = bootstrap.mean(values)
    assert interval.value == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert bootstrap.ratio(np.array([1.0, 0.0, 3.0]), np.array([2.0, 0.0, 2.0])).n == 2
    assert bootstrap.ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0])).value == 1.0
    middle = bootstrap.median(values)
    assert middle.low < np.median(values) == middle.value < middle.high
    assert bootstrap.mean(values) == bootstrap.mean(values)
    assert np.isnan(bootstrap.mean(np.array([])).value)
    assert bootstrap.counts(7, 5).sum(1).tolist() == [7.0] * 5


def test_a_mean_of_ratios_weights_columns_alike() -> None:
    above = np.array([[1.0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
    below = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]])
    interval = bootstrap.mean_of_ratios(above, below, 200)
    assert (interval.value, interval.n) == (pytest.approx((0.5 + 1) / 2), 3)
    assert interval.low < interval.value <= interval.high
    assert bootstrap.mean_of_ratios(above[:0], below[:0]).n == 0
