"""Corrections for many comparisons, and rank correlations, against independent computations."""

import numpy as np
import pytest
from scipy import stats

from tempera.metrics.comparisons import (
    Comparison,
    Weighted,
    compare_all,
    difference,
    holm,
    rank_correlation,
    spearman,
)

RNG = np.random.default_rng(0)


def weighted(values: np.ndarray) -> Weighted:
    return Weighted(values, np.ones(len(values)))


def test_holm() -> None:
    """The smallest of four is multiplied by 4, the next by 3, and none is below one before it."""
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.5, 0.5, 0.5])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("levels", [3, 1000])
def test_spearman_agrees_with_scipy(levels: int) -> None:
    left, right = RNG.integers(0, levels, (2, 5, 12)).astype(float)
    right += 0.5 * left
    expected = [stats.spearmanr(*pair).statistic for pair in zip(left, right, strict=True)]
    assert spearman(left, right) == pytest.approx(expected)


def test_paired_differences_agree_with_a_t_test() -> None:
    base = RNG.normal(0, 5, 400)
    shifts = np.array([0.0, 0.15, 0.4])
    others = [base + shift + RNG.normal(0, 1, 400) for shift in shifts]
    found = compare_all([(weighted(other), weighted(base)) for other in others])
    for one, other in zip(found, others, strict=True):
        test = stats.ttest_rel(other, base)
        assert one.difference.value == pytest.approx((other - base).mean())
        assert one.p == pytest.approx(test.pvalue, abs=0.02)
        low, high = test.confidence_interval(1 - 0.05 / 3)
        assert [one.difference.low, one.difference.high] == pytest.approx([low, high], abs=0.012)
    assert [one.corrected for one in found] == pytest.approx(holm(np.array([x.p for x in found])))
    assert found[2].significant
    assert not found[0].significant
    assert not Comparison(found[0].difference, p=0.02, corrected=0.06).significant


def test_equal_runs_do_not_differ_and_missing_units_do_not_count() -> None:
    values, gaps = np.arange(20.0), (np.arange(20) % 4 > 0).astype(float)
    (same,) = compare_all([(weighted(values), weighted(values))])
    assert (same.difference.value, same.p, same.corrected) == (0, 1, 1)
    assert same.difference.n == 20  # one of the values is 0
    (partly,) = compare_all([(Weighted(gaps * (values + 1), gaps), weighted(values))])
    assert partly.difference.value == pytest.approx(1)
    (other,) = compare_all([(weighted(values), Weighted(gaps * (values + 1), gaps))])
    assert other.difference.value == pytest.approx(-1)
    assert partly.difference.n == other.difference.n == gaps.sum()
    assert compare_all([]) == []
    (other,) = compare_all([(weighted(np.ones(20)), weighted(np.zeros(20)))])
    assert other.p == 2 / 2001  # the observed sample is one of the resamples


def test_infinite_units_are_ranked_and_not_subtracted() -> None:
    values = [weighted(np.full(8, mean)) for mean in (1.0, 2.0, 3.0)]
    values[0].numerators[3] = np.inf
    found = rank_correlation(values, [values[2], values[1], Weighted(np.ones(8), np.ones(8))])
    assert found.value == pytest.approx(0.5)
    assert not values[0].finite and values[1].finite
    assert difference(values[0], values[1]).value == np.inf
    assert np.isnan(rank_correlation(values, [values[1]] * 3).value)
    noisy = [weighted(RNG.normal(0, 1, 30)) for _ in range(4)]
    assert rank_correlation(noisy, noisy).low == pytest.approx(1)  # the same units on both sides


@pytest.mark.parametrize("units", [1, 4])
def test_few_units_prove_nothing(units: int) -> None:
    """Even if all of them differ: a test of signs cannot do with fewer than six."""
    (found,) = compare_all([(weighted(np.full(units, 9.0)), weighted(np.zeros(units)))])
    assert not found.significant and found.p == 2.0 ** (1 - units)
    (many,) = compare_all([(weighted(np.full(20, 9.0)), weighted(np.zeros(20)))])
    assert many.significant
