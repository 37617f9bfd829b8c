"""Corrections for many comparisons, and rank correlations, against independent computations."""

import numpy as np
import pytest
from scipy import stats

from tempera.metrics import bootstrap
from tempera.metrics.comparisons import (
    Weighted,
    compare_all,
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


def test_infinite_units_are_ranked_and_not_subtracted() -> None:
    values = [weighted(np.full(8, mean)) for mean in (1.0, 2.0, 3.0)]
    values[0].numerators[3] = np.inf
    assert values[0].mean == np.inf
    assert values[1].mean == 2
    found = rank_correlation(values, [values[2], values[1], Weighted(np.ones(8), np.ones(8))])
    assert found.value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="infinite values have no differences"):
        compare_all([(values[0], values[1])])
    down = [weighted(np.array([1.0, -np.inf])), weighted(np.array([np.inf, -np.inf]))]
    assert [one.mean for one in down] == [-np.inf, 0]


@pytest.mark.parametrize(("pairs", "resamples"), [(1, 2000), (5, 2000), (10, 4000)])
def test_resamples_grow_with_the_pairs(pairs: int, resamples: int) -> None:
    """Where all of them agree, the observed sample is the only one beyond 0: p = 2 / (R + 1)."""
    ones, zeros = weighted(np.ones(3)), weighted(np.zeros(3))
    found = compare_all([(ones, zeros)] * pairs)
    assert {one.p for one in found} == {2 / (resamples + 1)}
    assert {one.p for one in compare_all([(zeros, ones)])} == {2 / 2001}


def test_a_resampled_difference_of_0_lies_on_both_sides() -> None:
    """One unit of ten differs: resamples without it, (9/10)^10 of them, show no difference."""
    one, none = weighted(np.eye(10)[0]), weighted(np.zeros(10))
    (found,), (other,) = compare_all([(one, none)]), compare_all([(none, one)])
    assert found.p == other.p == pytest.approx(2 * 0.9**10, abs=0.05)


def test_an_interval_of_a_rank_correlation_resamples_the_units() -> None:
    left, right = (
        [weighted(mean + RNG.normal(0, 2, 40)) for mean in (0.0, 1.0, 2.0)] for _ in range(2)
    )
    drawn = bootstrap.counts(40, 1000)
    means = [[drawn @ run.numerators / 40 for run in side] for side in (left, right)]
    each = spearman(*(np.stack(side, 1) for side in means))
    found = rank_correlation(left, right)
    assert [found.low, found.high] == pytest.approx(np.quantile(each, [0.025, 0.975]))
    assert found.n == 40 and found == rank_correlation(left, right, 1000)
    none = rank_correlation(left, [left[0]] * 3)
    assert np.isnan([none.value, none.low, none.high]).all()
