"""Training losses of a draft. A loss compares the draft's hidden states with the target's, through
the target's frozen head.

A loss is a frozen dataclass whose fields are its options. `conf/loss/` lists tempera's losses; a
custom loss needs a class, in any module, and a YAML that points to it.

Shapes: R rows, S positions, H hidden size, V vocabulary, B images.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tempera.decoding.probabilities import Sampling

TOTAL = "loss"
"""Name of the part that is minimised; the other parts are only logged."""

Parts = dict[str, Tensor]
"""Name -> float32 scalar."""


@dataclass(frozen=True)
class Head:
    """The target's frozen head.

    Attributes:
        logits: hidden states [..., H] → logits [..., V]; its parameters receive no gradient.
        sampling: how the target turns logits into the distribution that tokens are drawn from.
        chunk: number of positions whose logits are in memory at a time. With several chunks, the
            backward pass recomputes the logits.
    """

    logits: Callable[[Tensor], Tensor]
    sampling: Sampling
    chunk: int = 4096

    def total(
        self, compare: Callable[[Tensor, Tensor], Tensor], predicted: Tensor, hidden: Tensor
    ) -> Tensor:
        """Sum `compare` over positions, chunk by chunk.

        Args:
            compare: the draft's and the target's hidden states [R, M, H] → sums over the M
                positions, of any shape.
            predicted, hidden: [R, S, H].
        """
        size = max(1, self.chunk // len(predicted))
        pieces = list(zip(predicted.split(size, 1), hidden.split(size, 1), strict=True))
        if len(pieces) == 1:
            return compare(predicted, hidden)
        sums = [checkpoint(compare, mine, true, use_reentrant=False) for mine, true in pieces]
        return torch.stack(sums).sum(0)


class Loss(Protocol):
    """A loss of the draft, and the rows that it needs in a training batch."""

    @property
    def guided(self) -> bool:
        """Whether the loss compares distributions after guidance. If so, and if decoding uses
        guidance, every image has two rows: conditional rows come first, then their null rows.
        """

    def __call__(self, predicted: Tensor, hidden: Tensor, head: Head) -> Parts:
        """Named parts, each a mean over positions; the part called `loss` is minimised.

        Args:
            predicted: the draft's hidden states, [R, S, H].
            hidden: the target's hidden states at the same positions, [R, S, H], without gradient.
            head: the target's head.
        """


def described(loss: Any) -> dict[str, Any]:
    """A loss as the name of its class and its options, for the record of a run."""
    return {"class": type(loss).__name__, **asdict(loss)}


@dataclass(frozen=True)
class EagleLoss(Loss):
    """EAGLE-1's loss (Li et al. 2024, arXiv 2401.15077, §3.2): smooth-L1 regression of the hidden
    states, plus cross-entropy from the target's distribution to the draft's, before guidance.

    Parts: `loss` = `regression` + weight × `cross_entropy`.

    Attributes:
        cross_entropy: weight of the cross-entropy.
    """

    cross_entropy: NonNegativeFloat = 0.1
    guided = False

    @override
    def __call__(self, predicted: Tensor, hidden: Tensor, head: Head) -> Parts:
        def cross_entropy(mine: Tensor, true: Tensor) -> Tensor:
            with torch.no_grad():
                p = head.logits(true).float().softmax(-1)
            return -(p * head.logits(mine).float().log_softmax(-1)).sum()

        predicted, hidden = (states.flatten(0, 1)[None] for states in (predicted, hidden))
        regression = F.smooth_l1_loss(predicted.float(), hidden.float())
        classified = head.total(cross_entropy, predicted, hidden) / predicted.shape[1]
        total = regression + self.cross_entropy * classified
        return {TOTAL: total, "regression": regression, "cross_entropy": classified}


@dataclass(frozen=True)
class AcceptanceLoss(Loss):
    """LK (arXiv 2602.23881): λ·KL(p‖q) + (1 − λ)·TV(p, q) with λ = exp(−η·α), α = Σ min(p, q)
    without gradient, at every position.

    p and q are the distributions that decoding draws from, after guidance and temperature, so α is
    the probability that a drafted token is accepted. KL dominates while the draft is poor; TV =
    1 − α takes over as it improves. The gradient reaches both rows of a guided pair.

    In two cases decoding's p and q have no useful gradient, so others are used. KL compares p with
    q before top-k and top-p, because these take all mass from some of p's tokens. And a greedy
    target (temperature 0) is imitated at temperature 1.

    Parts: `loss`, `kl` in nats, `tv`, and `acceptance` = α; with `regression`, that too.

    Attributes:
        eta: η, how fast TV takes over.
        regression: weight of EAGLE-1's smooth-L1 regression of the hidden states, added: it leads a
            draft that starts from nothing, and EAGLE-3 does without.
    """

    eta: NonNegativeFloat = 3.0
    regression: NonNegativeFloat = 0.0
    guided = True

    @override
    def __call__(self, predicted: Tensor, hidden: Tensor, head: Head) -> Parts:
        guide = head.sampling.guide
        temperature = head.sampling.drafting.temperature
        drawn = replace(head.sampling, guidance=1.0, temperature=temperature)

        def compare(mine: Tensor, true: Tensor) -> Tensor:
            # the head is linear, and so is guidance: before the head it is half the work
            with torch.no_grad():
                p = drawn.distribution(head.logits(guide(true)))
                entropy = torch.special.entr(p).sum(-1)
            logits = head.logits(guide(mine)).float()
            q = drawn.distribution(logits)
            kl = -(p * (logits / temperature).log_softmax(-1)).sum(-1) - entropy
            acceptance = torch.minimum(p, q).sum(-1)
            share = (-self.eta * acceptance.detach()).exp()
            total = share * kl + (1 - share) * (1 - acceptance)
            return torch.stack([part.sum() for part in (total, kl, 1 - acceptance, acceptance)])

        positions = len(predicted) // head.sampling.rows * predicted.shape[1]
        means = head.total(compare, predicted, hidden) / positions
        parts = dict(zip((TOTAL, "kl", "tv", "acceptance"), means, strict=True))
        if self.regression:
            parts["regression"] = F.smooth_l1_loss(predicted.float(), hidden.float())
            parts[TOTAL] = parts[TOTAL] + self.regression * parts["regression"]
        return parts
