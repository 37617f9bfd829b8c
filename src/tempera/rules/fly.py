"""A rejection is taken back where the target is unsure and the following drafts pass."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.probabilities import at, excess, ratio
from tempera.decoding.sequences import Sequences
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError


@dataclass(frozen=True)
class FLy(TokenRule):
    """Loosely speculative decoding, FLy (arXiv 2511.22972; in vLLM): chains are tested as in exact
    decoding. A rejected token is kept all the same if the entropy of p is at least θ·ln V, if p(x)
    is above 0, and if the next W drafted tokens pass their tests; so a token with fewer than W
    drafts behind it is not. Greedy decoding compares with the most probable token; the entropy and
    p(x) > 0 are then those at temperature 1.

    Tests look ahead, so they are not independent: there are no bounds on TV and KL.

    vLLM adds up the entropy of the three most probable tokens and does not divide it by ln V; θ =
    0.3 and W = 6 are the defaults of both.

    Args:
        least_entropy: θ, from 0 to 1. With top-k sampling the entropy is at most ln k.
        ahead: W, at least 1.

    Raises:
        TemperaError: an option is impossible.
    """

    chains_only = True

    least_entropy: float = 0.3
    ahead: int = 6

    def __post_init__(self) -> None:
        if not 0 <= self.least_entropy <= 1:
            raise TemperaError(
                f"least_entropy={self.least_entropy} is not a share of the largest entropy, ln V; "
                "give 0 to 1",
                option="least_entropy",
            )
        if self.ahead < 1:
            raise TemperaError(
                f"ahead={self.ahead} drafts cannot confirm a token; give 1 or more",
                option="ahead",
            )

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p/q) everywhere, before tokens are forgiven."""
        return ratio(p, q)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+."""
        return excess(p, q)

    @override
    def passed(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> Tensor:
        passing = super().passed(draft, scores, sequences, uniforms)
        p = (scores.p if scores.untempered is None else scores.untempered)[:, :-1]
        entropy = torch.special.entr(p).sum(-1)
        unsure = entropy >= self.least_entropy * math.log(p.shape[-1])
        behind = torch.nn.functional.pad(passing, (0, self.ahead + 1)).unfold(1, self.ahead, 1)
        agreed: Tensor = behind.all(-1)[:, 1 : 1 + draft.tree.nodes]
        forgiven: Tensor = unsure & agreed & (at(p, draft.tokens) > 0)
        return passing | forgiven
