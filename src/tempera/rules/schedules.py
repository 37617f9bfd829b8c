"""Schedules of the relaxation ω_1..ω_L over the depths of a draft (Cool-SD, Section 3.2 and
Appendix C.3).

All but `skip` and `floored` share a budget δ, the mean of the ω's; δ = 1 in `uniform` is exact
decoding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tempera.decoding.compiled import constant
from tempera.errors import TemperaError

Omegas = tuple[float, ...]

LARGEST = torch.finfo(torch.float32).max
"""The largest ω: an infinite one times p(x) = 0 would be no number."""


@dataclass(frozen=True)
class Prices:
    """What keeping one more draft may cost at depths 1..L, in nats of KL divergence: the schedule
    of `tempera.rules.optimal.Priced`.
    """

    prices: tuple[float, ...]


def constant_price(price: float, length: int) -> Prices:
    """The same price at every depth."""
    return Prices((price,) * length)


def uniform(delta: float, length: int) -> Omegas:
    """UniformRSD, Eq. 13: ω_i = δ at every depth."""
    return _spend(delta, [1.0] * length)


def exponential(delta: float, length: int, nu: float = 0.7) -> Omegas:
    """Cool-SD, Eq. 16: ω_i = δ·exp(-ν·i - μ), with μ such that Σ_i exp(-ν·i - μ) = L.

    Raises:
        TemperaError: nu is not above 0, or so large that ω underflows.
    """
    most = min(100, 700 / max(1, length))  # a double holds exp(-700)
    if not 0 < nu <= most:
        raise TemperaError(
            f"nu={nu} is not a usable decay for {length} drafted tokens; give a number above 0, "
            f"at most {most:g} (Cool-SD uses 0.7), or choose the uniform schedule",
            option="nu",
        )
    return _spend(delta, [math.exp(-nu * i) for i in range(1, length + 1)])


def linear(delta: float, length: int, ell: int = 8) -> Omegas:
    """Cool-SD, Eq. 17: ω_i = δ·L·w_i / Σw, with w_i = (ℓ - i) / (ℓ(ℓ + 1)).

    Raises:
        TemperaError: ell is not above the draft length.
    """
    if ell <= length:
        raise TemperaError(
            f"ell={ell} lets the relaxation reach 0 within {length} drafted tokens; give an ell "
            "above the draft length"
        )
    return _spend(delta, [(ell - i) / (ell * (ell + 1)) for i in range(1, length + 1)])


def skip(delta: float, length: int, free: int = 1) -> Omegas:
    """VVS (arXiv 2511.13587) as a relaxation: the first `free` drafts are kept untested, unless
    p(x) = 0, and the others tested with ω = δ; 1 is exact.

    Raises:
        TemperaError: free is negative or above the draft length.
    """
    if not 0 <= free <= length:
        raise TemperaError(
            f"free={free} drafts cannot go untested in a draft of {length} tokens; give 0 to "
            f"{length}",
            option="free",
        )
    return (LARGEST,) * free + uniform(delta, length)[free:]


def floored(schedule: Sequence[float] | Prices, floor: float) -> Omegas:
    """Raise every ω_i below `floor` to it.

    With floor = 1 no depth is stricter than exact decoding, which costs nothing in the TV bound
    (Eq. 8) under the optimal residual: a depth with ω_i ≤ 1 is unbiased either way. The paper has
    no floor (0).
    """
    if isinstance(schedule, Prices):
        raise TemperaError(
            "Relaxed takes a schedule of relaxations ω, not of prices: give method=optimal_rsd "
            "with schedule=optimal or constant_price, or method=coolsd with another schedule",
            option="schedule",
        )
    if not 0 <= floor < math.inf:
        raise TemperaError(f"floor={floor} is not valid; give 0 (the published schedule) or more")
    return tuple(max(omega, floor) for omega in schedule)


def check_reachable(expected_length: float, reach: tuple[float, float], drafted: int) -> None:
    """Raise TemperaError unless an expected length lies within those that `drafted` tokens can
    reach.
    """
    low, high = reach
    if not low - 1e-9 <= expected_length <= high + 1e-9:
        raise TemperaError(
            f"an expected length of {expected_length:g} is out of reach with {drafted} drafted "
            f"tokens: give {math.ceil(1000 * low) / 1000:g} (exact decoding) to "
            f"{math.floor(1000 * high) / 1000:g}",
            option="expected_length",
        )


def by_depth(schedule: tuple[float, ...], depth: Tensor) -> Tensor:
    """The values of a schedule at 1-based depths, int64 [...] -> float32 [...]; deeper ones have
    the last value.
    """
    index = (depth - 1).clamp(max=len(schedule) - 1)
    table: Tensor = _table(schedule, depth.device)
    return table[index]


@constant
def _table(schedule: tuple[float, ...], device: torch.device) -> Tensor:
    # traced, the table would be made anew in every round
    return on_device(schedule, device)


@lru_cache(maxsize=8)
def on_device(schedule: tuple[float, ...], device: torch.device) -> Tensor:
    """A schedule as float32 [L]; copied to the device once."""
    return torch.tensor(schedule, dtype=torch.float32, device=device)


def _spend(delta: float, weights: list[float]) -> Omegas:
    """δ·L·w_i / Σw."""
    if not 0 < delta < math.inf:
        raise TemperaError(
            f"delta={delta} is not a relaxation budget; give a number above 0 (papers use 1.1 to "
            "4), or rule=exact"
        )
    if not weights:
        raise TemperaError("a schedule needs a draft of at least 1 token; draft more")
    scale = delta * len(weights) / math.fsum(weights)
    return tuple(scale * weight for weight in weights)
