"""Entropy-aware acceptance: the test's sharpness depends on the target's entropy."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tempera.decoding.probabilities import excess, ratio
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError


@dataclass(frozen=True)
class EntropyAware(TokenRule):
    """Entropy-aware acceptance (arXiv 2510.09012, NeurIPS 2025): x is kept if ρ = min(1, p/q)
    exceeds (H/e)·(½ + (1 - H/λ)(r - ½)), with H the entropy of p in nats and r a uniform draw. So

        f = ½ + (ρ·e/H - ½) / |1 - H/λ|, cut to [0, 1]

    Where the target is certain, nearly everything of p(x) > 0 passes. At H = e a token with ρ < ¼
    (if λ = 2e) never does, and one with ρ > ¾ always. Lossy: f is above and below min(1, p/q).

    We read the paper's "1 - λε" as 1 - H/λ: with λ = 16 it would be negative.

    Args:
        scale: e, nats, above 0; a larger one accepts more.
        decay: λ, nats, above 0.
        residual_kind: "published", Norm[p - q]+, or "optimal", Norm[p - q·f]+.

    Raises:
        TemperaError: scale or decay is not above 0.
    """

    scale: float = 8.0
    decay: float = 16.0
    residual_kind: Literal["published", "optimal"] = "published"

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("decay", self.decay)):
            if not 0 < value < math.inf:
                raise TemperaError(
                    f"{name}={value} is not an entropy to compare with; give nats, above 0",
                    option=name,
                )

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """f everywhere; 0 where p(x) = 0."""
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        nats: Tensor = entropy.clamp(min=torch.finfo(p.dtype).tiny)
        slope = (1 - nats / self.decay).abs().clamp(min=torch.finfo(p.dtype).tiny)
        margin = (ratio(p, q) * self.scale / nats - 0.5) / slope
        return (0.5 + margin).clamp(0, 1).masked_fill(p <= 0, 0.0)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+, or Norm[p - q·f]+."""
        accepted = q if self.residual_kind == "published" else q * self.accept(p, q, depth)
        return excess(p, accepted)
