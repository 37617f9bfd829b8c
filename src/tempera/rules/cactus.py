"""Constrained acceptance: the drafted token's probability rises within a divergence budget."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.probabilities import at, normalise, one_hot, ratio
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError

AT_ONCE = 1 << 24
"""Most entries of residuals that are summed at a time."""


@dataclass(frozen=True)
class Cactus(TokenRule):
    """Cactus (Hao and Mou, ICLR 2026, arXiv 2604.04987): a drafted x is tested against h_x, which
    gives x the probability

        γ = min(1, p(x) + √(2δ·p(x)·(1 - p(x))))

    and the other tokens (1 - γ)/(1 - p(x)) times theirs in p. So f = min(1, γ/q), and the residual
    is Norm[h_x - q]+. The root bounds KL(h_x ‖ p) by about δ. The emitted distribution is none of
    the h_x: it is their mixture over what is drafted. In greedy decoding the rule is exact.

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
        rejected = q * (1 - f)
        most = int((rejected > 0).sum(-1).amax().clamp(min=1))
        tokens = rejected.topk(most, sorted=False).indices
        mean = torch.zeros_like(p)
        for part in tokens.split(max(1, AT_ONCE // p.numel()), -1):
            here_p, here_q = (one.unsqueeze(-2).expand(*part.shape, -1) for one in (p, q))
            each = self.residual(here_p, here_q, part, depth.unsqueeze(-1))
            mean += (rejected.gather(-1, part).unsqueeze(-1) * each).sum(-2)
        return f, normalise(mean, otherwise=p)

    def _raised(self, p: Tensor) -> Tensor:
        """γ of tokens of probability p."""
        return (p + (2 * self.delta * p * (1 - p)).clamp(min=0).sqrt()).clamp(max=1)

    def _others(self, p: Tensor) -> Tensor:
        """By what all other tokens are multiplied: (1 - γ)/(1 - p), 0 where p is 1."""
        return torch.where(p < 1, (1 - self._raised(p)) / (1 - p), 0.0)
