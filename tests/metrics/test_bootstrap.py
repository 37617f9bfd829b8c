"""Intervals by resampling images."""

import numpy as np
import pytest

from tempera.metrics import bootstrap


def test_the_interval_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap.mean(values)
    assert interval.value == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert bootstrap.counts(7, 5).sum(1).tolist() == [7.0] * 5


def test_a_ratio_is_that_of_each_resamples_sums() -> None:
    above, below = np.array([1.0, 5.0, 2.0, 9.0]), np.array([2.0, 3.0, 0.0, 4.0])
    keep = [0, 1, 3]
    drawn = bootstrap.counts(3, 200)
    expected = np.quantile((drawn @ above[keep]) / (drawn @ below[keep]), [0.025, 0.975])
    found = bootstrap.ratio(above, below, 200)
    assert [found.value, found.low, found.high, found.n] == pytest.approx([15 / 9, *expected, 3])
    assert bootstrap.ratio(above[2:3], below[2:3]).n == 0


def test_a_median_resamples_every_value() -> None:
    found = bootstrap.median(np.array([1.0, 2.0, 4.0]))
    assert (found.value, found.low, found.high, found.n) == (2.0, 1.0, 4.0, 3)


def test_a_centred_interval_holds_its_estimate_and_keeps_its_bounds() -> None:
    replicates = np.arange(1001.0)
    free = bootstrap.centred(10.0, replicates, 9)
    assert [free.value, free.low, free.high, free.n] == pytest.approx([10.0, -465.0, 485.0, 9])
    held = bootstrap.centred(0.0, replicates, 9, (-100.0, 200.0))
    assert (held.low, held.high) == (-100.0, 200.0)
    skewed = np.array([0.0] * 999 + [1e6])
    assert bootstrap.centred(5.0, skewed, 9).high == bootstrap.centred(5.0, -skewed, 9).low == 5.0


def test_an_interval_holds_its_estimate_by_construction() -> None:
    assert bootstrap.Interval(1, 2, 0.5, 3) == bootstrap.Interval(1, 1, 1, 3)
    nothing = bootstrap.Interval(1, np.nan, np.nan, 3)
    assert np.isnan([nothing.low, nothing.high]).all()
    tenths = bootstrap.mean(np.full(7, 0.1))
    assert tenths.low <= tenths.value <= tenths.high


def test_a_product_has_the_interval_of_independent_factors() -> None:
    noise = np.random.default_rng(0).normal(0, [[0.1], [0.2]], (2, 100_000))
    first = bootstrap.percentile(1.0, np.exp(noise[0]), 5)
    second = bootstrap.percentile(1.0, np.exp(noise[1]), 64)
    both = bootstrap.product(first, second)
    found = bootstrap.percentile(1.0, np.exp(noise.sum(0)), 5)
    assert [*both.as_dict().values()] == pytest.approx([*found.as_dict().values()], rel=0.05)
    sure = bootstrap.product(first, bootstrap.Interval(2.0, 2.0, 2.0, 64))
    expected = [2 * first.value, 2 * first.low, 2 * first.high, 5]
    assert [*sure.as_dict().values()] == pytest.approx(expected)
    assert np.isnan(bootstrap.product(first, bootstrap.NONE).low)
