"""Constrained acceptance: the drafted token's probability rises within a divergence budget."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.probabilities import at, normalise, one_hot, ratio, running_sum
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Cactus(TokenRule):
    """Cactus (Hao and Mou, ICLR 2026, arXiv 2604.04987): a drafted x is tested against h_x, which
    gives x the probability

        γ = min(1, p(x) + √(2δ·p(x)·(1 - p(x))))

    and the other tokens (1 - γ)/(1 - p(x)) times theirs in p. So f = min(1, γ/q), and the residual
    is Norm[h_x - q]+. The root bounds KL(h_x ‖ p) by about δ. Since h_x depends on what is drafted,
    the emitted distribution is none of the h_x, and its KL divergence may exceed δ. In greedy
    decoding the rule is exact.

    Args:
        delta: δ, at least 0; 0 is exact decoding.

    Raises:
        TemperaError: δ is negative or not finite.
    """

    delta: float

    def __post_init__(self) -> None:
        if not 0 <= self.delta < math.inf:
            raise TemperaError(
                f"delta={self.delta} is not a divergence budget; give 0 (exact decoding) or more"
            )

    @property
    @override
    def exact(self) -> bool:
        return type(self) is Cactus and self.delta == 0

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, γ/q) everywhere."""
        return ratio(self._raised(p), q)

    @override
    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return ratio(self._raised(at(p, token)), at(q, token))

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[h_x - q]+ for a rejected x, which itself has nothing left."""
        lacking = (self._others(at(p, token)).unsqueeze(-1) * p - q).clamp(min=0)
        lacking = torch.where(one_hot(token, p.shape[-1]) > 0, 0.0, lacking)
        return normalise(lacking, otherwise=p)

    @override
    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        f = self.accept(p, q, depth)
        return f, normalise(self._mean_residual(p, q, q * (1 - f)), otherwise=p)

    def _mean_residual(self, p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
        """Σ_x rejected(x)·residual(x), all [..., V].

        With o the factor of the other tokens in h_x, a rejected x leaves o·p(y) - q(y) to every y
        with q(y)/p(y) < o, and nothing to itself. So sums over y in the order of q/p give what x
        leaves in all, and sums over x in the order of o what y gets, without a table of V².
        """
        others = self._others(p).double()
        ratios = torch.where(p > 0, q.double() / p, torch.inf)
        in_order, by_ratio = ratios.sort(-1)
        factors, by_factor = others.sort(-1)
        takers = torch.searchsorted(in_order, others)
        total = others * _summed(p, by_ratio, takers) - _summed(q, by_ratio, takers)
        weights = torch.where(total > 0, rejected / total, 0.0)
        first = torch.searchsorted(factors, ratios, right=True)
        factor = _summed_from(weights * others, by_factor, first)
        nothing_left = torch.where(total > 0, 0.0, rejected).sum(-1, keepdim=True)
        mean = factor * p - _summed_from(weights, by_factor, first) * q
        return (mean.clamp(min=0) + nothing_left * p).to(p.dtype)

    def _raised(self, p: Tensor) -> Tensor:
        """γ of tokens of probability p."""
        return (p + (2 * self.delta * p * (1 - p)).clamp(min=0).sqrt()).clamp(max=1)

    def _others(self, p: Tensor) -> Tensor:
        """By what all other tokens are multiplied: (1 - γ)/(1 - p), 0 where p is 1."""
        return torch.where(p < 1, (1 - self._raised(p)) / (1 - p), 0.0)


def _summed(values: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The sums of the first `counts` values in an order, float64: all [..., V]."""
    sums = running_sum(values.gather(-1, order), torch.float64)
    return torch.nn.functional.pad(sums, (1, 0)).gather(-1, counts)


def _summed_from(values: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """The sums of the values from number `first` in an order on, float64: all [..., V]."""
    return _summed(values, order.flip(-1), order.shape[-1] - first)
