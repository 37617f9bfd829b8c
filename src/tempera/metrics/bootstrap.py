"""Bootstrap confidence intervals (Efron and Tibshirani, 1993), by resampling prompts.

A resample is a row of counts: how often each of n prompts was drawn. The same seed draws the same
resamples, so intervals are reproducible.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% interval, which holds it, from `n` units (prompts or images).

    `pseudovalues`, if known, are one number a unit whose mean is the estimate: under other weights
    of the units their weighted mean is the estimate too, to first order (the infinitesimal
    jackknife; Jaeckel 1972). So statistics of a whole set are compared like means.
    """

    value: float
    low: float
    high: float
    n: int
    pseudovalues: Array | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", min(self.low, self.value))  # NaN stays NaN
        object.__setattr__(self, "high", max(self.high, self.value))

    def as_dict(self) -> dict[str, float]:
        """The interval as JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


NONE = Interval(np.nan, np.nan, np.nan, 0)
"""The interval of nothing."""


def counts(n: int, resamples: int, seed: int = 0) -> Array:
    """How often each of n units appears in each resample, [resamples, n]; rows sum to n."""
    return (
        np.random.default_rng([seed, n])
        .multinomial(n, np.full(n, 1 / n), size=resamples)
        .astype(np.float64)
    )


def resampled(statistic: Callable[[Array], Array], n: int, resamples: int = 1000) -> Interval:
    """A statistic of n units with its percentile interval.

    Args:
        statistic: its values under counts of the units, [resamples, n] → [resamples].
        n: number of units.
        resamples: number of bootstrap resamples.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite units give NaN, as intended
        return percentile(statistic(np.ones((1, n))).item(), statistic(counts(n, resamples)), n)


def mean(values: Array, resamples: int = 1000) -> Interval:
    """Mean with a percentile interval."""
    return ratio(values, np.ones(len(values)), resamples)


def ratio(numerators: Array, denominators: Array, resamples: int = 1000) -> Interval:
    """Σ numerators ÷ Σ denominators with a percentile interval. Units whose denominator is 0 are
    left out.
    """
    valid = np.asarray(denominators) > 0
    above = np.asarray(numerators, np.float64)[valid]
    below = np.asarray(denominators, np.float64)[valid]
    if not len(above):
        return NONE
    return resampled(lambda drawn: (drawn @ above) / (drawn @ below), len(above), resamples)


def median(values: Array, resamples: int = 1000) -> Interval:
    """Median of some values with a percentile interval."""
    n = len(values)
    index = np.random.default_rng([0, n]).integers(0, n, (resamples, n))
    return percentile(float(np.median(values)), np.median(values[index], axis=1), n)


def product(first: Interval, second: Interval) -> Interval:
    """The product of two independent positive estimates, from as many units as the one with fewer.
    The distances of its ends from the estimate are the roots of the sums of the factors' squared
    ones, all on the scale of logarithms (MOVER; Zou and Donner 2008).
    """
    factors = np.array([[one.low, one.value, one.high] for one in (first, second)])
    with np.errstate(invalid="ignore", divide="ignore"):
        low, value, high = np.log(factors).T
        below = np.sqrt(np.square(value - low).sum())
        above = np.sqrt(np.square(high - value).sum())
    middle = first.value * second.value
    ends = float(middle * np.exp(-below)), float(middle * np.exp(above))
    return Interval(middle, *ends, min(first.n, second.n))


def percentile(value: float, replicates: Array, n: int) -> Interval:
    """The percentile interval: the middle 95% of the replicates."""
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), n)


def centred(
    value: float, replicates: Array, n: int, bounds: tuple[float, float] = (-np.inf, np.inf)
) -> Interval:
    """A percentile interval of the replicates, shifted so that its centre is the estimate. Estimate
    and ends are within the bounds, which rounding may pass.

    It is meant for estimates that resampling biases, such as FID and recall (repeated images raise
    the one and lower the other): their replicates have the right spread around the wrong centre.
    """
    interval = percentile(value, replicates - replicates.mean() + value, n)
    value, low, high = np.clip([value, interval.low, interval.high], *bounds).tolist()
    return Interval(value, low, high, n)
