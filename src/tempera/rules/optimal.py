"""The relaxation that costs the least KL divergence for the drafts that it keeps.

A rule that keeps drafts of mass A emits tokens from a distribution π with Σ min(π, q) ≥ A, whatever
else it does. The π nearest to p in KL(π ‖ p) under this constraint is median(c·p, q, ω·p) with c ≤
1 ≤ ω: keep x with probability min(1, ω·p/q), and draw the rest from Norm[c·p - q]+. The price is
dKL/dA = log(ω/c). Derivation: docs/optimal.md.

At one token these are the laws of mentored decoding (V. Tran-Thien, 2023), which gives every token
a budget of KL(p ‖ π) instead (`tempera.rules.mentored`); V. Tran-Thien and R. Nock (arXiv
2609.30474) give it one of any f-divergence. Ours are one price for all tokens as the parameter,
prices by depth and the recursion over a round, their use on trees, and `kl_residual` for any
acceptance. Which rule has the least KL on trees is not known.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.probabilities import excess, normalise, ratio
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError
from tempera.rules.schedules import Prices, by_depth

HALVINGS = 20
"""Bisection steps for log c: they find it to a millionth of its interval."""

HIGHEST = 20.0
"""The highest price, in nats: it keeps a draft unless the target finds it e²⁰ times less likely."""


class Median(TokenRule):
    """f = min(1, ω·p/q) with residual Norm[c·p - q]+, where the emitted distribution, median(c·p,
    q, ω·p), sums to 1. No rule that keeps as many drafts has less KL at a position.
    """

    @abstractmethod
    def solve(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """c and ω at these distributions, [..., V] each -> [..., 1] each."""

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, ω·p/q) everywhere."""
        _, omega = self.solve(p, q, depth)
        return ratio(omega * p, q)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[c·p - q]+."""
        c, _ = self.solve(p, q, depth)
        return normalise((c * p - q).clamp(min=0), otherwise=p)

    @override
    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenRule.expected`; c and ω are searched for once."""
        c, omega = self.solve(p, q, depth)
        return ratio(omega * p, q), normalise((c * p - q).clamp(min=0), otherwise=p)


@dataclass(frozen=True)
class Priced(Median):
    """`Median` with the same price at every token, or at every token of a depth. `Relaxed` uses the
    same ω everywhere; here ω follows from each pair of p and q. Price 0 is exact decoding.

    Args:
        schedule: nats per kept draft, either one price for all depths or prices by depth; deeper
            nodes use the last one. See `tempera.rules.optimal_prices`.

    Raises:
        TemperaError: a price is negative or above 20, or the schedule holds values of ω.
    """

    schedule: Prices | float

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Prices | float | int):
            raise TemperaError(
                f"{type(self).__name__} takes a schedule of prices, not of relaxations ω: give "
                "method=optimal_rsd with schedule=optimal or constant_price, or method=coolsd "
                "with another schedule",
                option="schedule",
            )
        wrong = [f"{price:g}" for price in self.prices if not 0 <= price <= HIGHEST]
        if wrong:
            raise TemperaError(
                f"an accepted draft cannot cost {', '.join(dict.fromkeys(wrong))} nats; give "
                f"prices from 0 (exact decoding) to {HIGHEST:g}"
            )

    @property
    def prices(self) -> tuple[float, ...]:
        """The prices by depth."""
        schedule = self.schedule
        return schedule.prices if isinstance(schedule, Prices) else (float(schedule),)

    @property
    @override
    def exact(self) -> bool:
        """Where no depth may cost anything."""
        return type(self) is Priced and max(self.prices) == 0

    @override
    def solve(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        price = by_depth(self.prices, depth).unsqueeze(-1).to(p.dtype)
        c = scale(p, q, price)
        return c, c * price.exp()


def scale(p: Tensor, q: Tensor, price: Tensor) -> Tensor:
    """The c in [exp(-price), 1] at which median(c·p, q, c·exp(price)·p) has mass 1, [..., 1].

    Args:
        p, q: [..., V].
        price: the price of a kept draft, [..., 1], or a price for each token, [..., V].
    """
    most = price.exp()
    low = (-price.amax(-1, keepdim=True)).exp().expand_as(p[..., :1])
    return _largest(low, lambda c: q.clamp(c * p, c * p * most).sum(-1, keepdim=True))


def kl_residual(p: Tensor, accepted: Tensor) -> Tensor:
    """The residual G that minimises KL(kept + (1 - Σ kept)·G ‖ p) for any rule: Norm[c·p - kept]+,
    with c ≤ 1 such that the emitted distribution sums to 1. It is p if nothing is rejected.

    Args:
        p: the target's distribution, [..., V].
        accepted: q·f, [..., V], with Σ kept ≤ 1.
    """
    rejected = (1 - accepted.sum(-1, keepdim=True)).clamp(min=torch.finfo(p.dtype).eps)
    c = _largest(rejected, lambda c: torch.maximum(accepted, c * p).sum(-1, keepdim=True))
    return normalise((c * p - accepted).clamp(min=0), otherwise=p)


RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"optimal": excess, "kl": kl_residual}
"""The residuals of least total variation and of least KL divergence, of p and the kept q·f."""


def _largest(low: Tensor, mass: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest c in [low, 1] at which `mass`, which increases with c, is at most 1: [..., 1].

    Bisects log c for all rows at once, then interpolates linearly between the ends. This is exact
    unless a token changes branch of the median between them. Nothing is read from
    the device.
    """
    c, step = low, low.reciprocal()
    for _ in range(HALVINGS):
        step = step.sqrt()
        tried = c * step
        c = torch.where(mass(tried) <= 1, tried, c)
    high = (c * step).clamp(max=1)
    below, above = mass(c), mass(high)
    share = ((1 - below) / (above - below)).clamp(0, 1)
    return torch.where(above > 1, torch.lerp(c, high, share), high)
