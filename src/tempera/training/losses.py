"""The EAGLE-1 loss (Li et al. 2024): regression of the target's hidden states and soft-label
classification through its frozen head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DraftLoss:
    """Scalars, float32; `total` = `regression` + weight × `cross_entropy`."""

    total: Tensor
    regression: Tensor
    cross_entropy: Tensor


def draft_loss(
    predicted: Tensor,
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    cross_entropy_weight: float = 0.1,
    chunk: int = 4096,
) -> DraftLoss:
    """Smooth-L1(predicted, hidden) + weight × cross-entropy from the target's distribution to the
    draft's, both means over positions.

    Args:
        predicted: the draft's hidden states, [..., H].
        hidden: the target's hidden states at the same positions, [..., H], without gradient.
        head: hidden states → logits [..., V]; its parameters receive no gradient.
        cross_entropy_weight: of the second term.
        chunk: positions whose logits are in memory at a time. Beyond one chunk, logits are computed
            again in the backward pass.
    """
    predicted, hidden = predicted.flatten(0, -2), hidden.flatten(0, -2)
    regression = F.smooth_l1_loss(predicted.float(), hidden.float())
    pieces = list(zip(torch.split(predicted, chunk), torch.split(hidden, chunk), strict=True))
    if len(pieces) == 1:
        summed = _cross_entropy(predicted, hidden, head)
    else:
        summed = torch.stack(
            [
                checkpoint(_cross_entropy, mine, true, head, use_reentrant=False)
                for mine, true in pieces
            ]
        ).sum()
    cross_entropy = summed / len(predicted)
    return DraftLoss(regression + cross_entropy_weight * cross_entropy, regression, cross_entropy)


def _cross_entropy(predicted: Tensor, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """−Σ p log q summed over positions; [M, H], [M, H] → scalar."""
    with torch.no_grad():
        p = head(hidden).float().softmax(-1)
    return -(p * head(predicted).float().log_softmax(-1)).sum()
