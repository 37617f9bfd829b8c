"""Verification against a mixture of draft and target."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tempera.decoding.probabilities import excess, ratio
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Mixture(TokenRule):
    """The static mixture of DIVERSED (Wang et al. 2026, arXiv 2604.07622): what is emitted follows
    m = λ·q + (1 - λ)·p. So f = min(1, m/q) = min(1, λ + (1 - λ)·p/q), and the residual is Norm[m -
    q]+, which is Norm[p - q]+.

    No rule that keeps as much is nearer to p in total variation, as of every law between p and q.
    Here a token with p(x) = 0, which sampling or the image's format forbids, is never kept; the law
    is then between p and m. The paper's main method learns λ for each token; that is not here. In
    greedy decoding the rule is exact.

    Args:
        weight: λ, from 0 (exact decoding) to 1 (the draft decides).

    Raises:
        TemperaError: the weight is not between 0 and 1.
    """

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise TemperaError(
                f"weight={self.weight} is not a share of the draft in a mixture; give 0 (exact "
                "decoding) to 1 (keep every draft)",
                option="weight",
            )

    @property
    @override
    def exact(self) -> bool:
        return type(self) is Mixture and self.weight == 0

    @property
    @override
    def local(self) -> bool:
        return type(self) is Mixture

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, λ + (1 - λ)·p/q), 0 where p(x) = 0."""
        mixed = self.weight * q + (1 - self.weight) * p
        return ratio(mixed, q).masked_fill(p <= 0, 0.0)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+."""
        return excess(p, q)
