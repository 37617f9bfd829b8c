"""Many paired comparisons at once: bootstrap intervals and p-values corrected for their number, and
rank correlations.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy  # its submodules are imported when they are used
from numpy.typing import NDArray

from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import LEVEL, Array, Interval

CHUNK = 500
"""Resamples computed at a time."""
TAIL = 10
"""Resamples beyond each end of a corrected interval."""
FALSE_ALARMS = 0.01
"""How often, at most, any of the comparisons of equal distributions is called a difference."""


@dataclass(frozen=True)
class Weighted:
    """A metric of one run by unit: Σ numerators ÷ Σ denominators, both [n]; a denominator of 0
    leaves the unit out. Numerators may be infinite.
    """

    numerators: Array
    denominators: Array

    @property
    def finite(self) -> bool:
        """Whether no unit is infinite."""
        return bool(np.isfinite(self.numerators).all())


@dataclass(frozen=True)
class Comparison:
    """A paired difference among m.

    Attributes:
        difference: the estimate, with an interval at level 1 - 0.05/m (Bonferroni): all m intervals
            hold together with a probability of at least 95%.
        p: of the hypothesis that the difference is 0, by the paired bootstrap, uncorrected.
        corrected: p after Holm's correction for m comparisons.
    """

    difference: Interval
    p: float
    corrected: float

    @property
    def significant(self) -> bool:
        """Whether Holm's procedure rejects at 5%."""
        return self.corrected < 1 - LEVEL


def difference(left: Weighted, right: Weighted) -> Interval:
    """Left minus right over the same units, which are resampled together."""

    def statistic(drawn: Array) -> Array:
        return np.asarray(_means(drawn, [left]) - _means(drawn, [right]))[:, 0]

    return bootstrap.resampled(statistic, len(left.numerators))


def compare_all(pairs: list[tuple[Weighted, Weighted]]) -> list[Comparison]:
    """Left minus right of every pair, all over the same n units, which are resampled together.

    p is twice the smaller share of resampled differences on one side of 0, where the observed
    sample counts as a resample; of k units it is at least 2^(1−k), as small as a test of signs can
    get. So that corrected intervals and p-values can be resolved, the
    number of resamples grows with the number of pairs.

    Args:
        pairs: finite metrics of two runs over the same units. Units that one of the two lacks are
            left out of the pair.
    """
    if not pairs:
        return []
    shared = [(left.denominators > 0) & (right.denominators > 0) for left, right in pairs]
    lefts = [_selected(left, units) for (left, _), units in zip(pairs, shared, strict=True)]
    rights = [_selected(right, units) for (_, right), units in zip(pairs, shared, strict=True)]

    def differences(drawn: Array) -> Array:
        return _means(drawn, lefts) - _means(drawn, rights)

    n = len(shared[0])
    resamples = max(2000, math.ceil(2 * TAIL * len(pairs) / (1 - LEVEL)))
    chunks = []
    for first in range(0, resamples, CHUNK):
        drawn = bootstrap.counts(n, min(CHUNK, resamples - first), first)
        chunks.append(differences(drawn).astype(np.float32))
    resampled = np.concatenate(chunks)
    values = differences(np.ones(n))
    outside = (1 - LEVEL) / len(pairs) / 2
    lows, highs = np.quantile(resampled, [outside, 1 - outside], axis=0)
    tails = np.minimum((resampled <= 0).sum(0), (resampled >= 0).sum(0))
    least = 2.0 ** (1 - np.array([units.sum() for units in shared]))
    p = np.minimum(np.maximum(2 * (tails + 1) / (resamples + 1), least), 1.0)
    corrected = holm(p)
    compared = []
    for index, units in enumerate(shared):
        interval = Interval(
            float(values[index]), float(lows[index]), float(highs[index]), int(units.sum())
        )
        compared.append(Comparison(interval, float(p[index]), float(corrected[index])))
    return compared


def above_zero(gaps: Array) -> Array:
    """p-values of the hypotheses that differences are symmetric about 0, against means above it, by
    random signs (Fisher, 1935): under it every sign was as likely. That holds for differences of
    two draws from one distribution, whatever it is and however few there are.

    Args:
        gaps: a paired difference a row, a comparison a column, [n, m]; 0 where a pair has none.

    Returns:
        [m]. The observed signs count among the drawn ones, of which there are twice as many as m
        corrected comparisons need.
    """
    draws = max(5000, math.ceil(2 * gaps.shape[1] / FALSE_ALARMS))
    observed = gaps.sum(0) - 1e-9 * np.abs(gaps).sum(0)  # equal sums differ by rounding
    rng = np.random.default_rng(0)
    above = np.zeros(gaps.shape[1])
    for first in range(0, draws, CHUNK):
        bits = rng.integers(0, 2, (min(CHUNK, draws - first), len(gaps)), np.int8)
        above += ((2.0 * bits - 1) @ gaps >= observed).sum(0)
    return np.asarray((1 + above) / (1 + draws))


def _selected(metric: Weighted, units: NDArray[np.bool_]) -> Weighted:
    """A metric of these units alone, bool [n]."""
    return Weighted(metric.numerators * units, metric.denominators * units)


def holm(p: Array) -> Array:
    """Holm's corrected p-values (Holm, 1979): the k-th smallest of m is multiplied by m - k + 1,
    and is not smaller than those before it; at most 1.
    """
    order = np.argsort(p, kind="stable")
    steps = np.asarray(p, np.float64)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected


def spearman(left: Array, right: Array) -> Array:
    """Spearman's rank correlation along the last axis; NaN where all values of a side are equal."""
    middle = (1 + left.shape[-1]) / 2
    x = scipy.stats.rankdata(left, axis=-1) - middle
    y = scipy.stats.rankdata(right, axis=-1) - middle
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))


def rank_correlation(left: list[Weighted], right: list[Weighted]) -> Interval:
    """Spearman's correlation of two metrics over runs, with a 95% percentile interval of resampled
    units; the runs are fixed.

    Args:
        left, right: a metric of each run, over the same units.
    """
    n = len(left[0].numerators)
    drawn = bootstrap.counts(n, 1000)
    everything = np.ones(n)
    value = spearman(_means(everything, left), _means(everything, right))
    replicates = spearman(_means(drawn, left), _means(drawn, right))
    replicates = replicates[np.isfinite(replicates)]
    if not np.isfinite(value) or not len(replicates):
        return bootstrap.NONE
    return bootstrap.percentile(float(value), replicates, n)


def _means(drawn: Array, runs: list[Weighted]) -> Array:
    """Each run's metric under counts [..., n], [..., runs]: infinite if an infinite unit counts."""
    above = np.stack([run.numerators for run in runs], 1)
    below = np.stack([run.denominators for run in runs], 1)
    infinite = np.where(np.isinf(above), np.sign(above), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (drawn @ np.where(infinite == 0, above, 0.0)) / (drawn @ below)
    signs = drawn @ infinite
    return np.asarray(np.where(signs == 0, means, np.copysign(np.inf, signs)))
