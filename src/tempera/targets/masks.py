"""Additive attention masks."""

import torch
from torch import Tensor


def causal_mask(mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """A causal mask that hides padding.

    Args:
        mask: False on padded condition tokens, bool [R, T].
        length: tokens of the sequence, at least T.
        dtype: of the mask.

    Returns:
        additive mask [R, 1, length, length]. Every token attends to itself, even padding.
    """
    seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    real = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], 1)
    allowed = (seen & real[:, None, :]) | torch.eye(length, dtype=torch.bool, device=mask.device)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)[
        :, None
    ]
