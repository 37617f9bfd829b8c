"""Attention over the KV cache.

Shapes: R rows, S tokens of a pass, K visible keys, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

HIDDEN = -30000.0
"""Score of a key that `SharedMask.padding` hides: its weight is 0 in float32 and bfloat16."""


class SharedMask(NamedTuple):
    """A mask of many rows, in the memory of one.

    Attributes:
        visible: the keys that queries attend to in every row, bool [S, K]; each attends to some.
        padding: keys that are hidden in a row, bool [R, K]. A query that sees no other keys attends
            to hidden ones.
    """

    visible: Tensor
    padding: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | SharedMask,
    scale: float,
    spread: bool | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v by PyTorch's fused attention.

    On CUDA its fast kernels with a mask support neither grouped keys nor head sizes that are no
    multiple of 8. So groups are made into rows, and queries are padded to the head size of the
    cache (`cache.head_size`).

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D or more].
        mask: additive, [R, 1, S, K]; or shared by all rows.
        scale: factor of the products.
        spread: whether the queries of a group stay heads of their own that share their keys, so
            that a GPU has a block for each (64 for two rows of Emu3), or follow each other as if
            they were further tokens, with which a CPU reads the keys once (1.5 times as fast for
            one token). By default as suits the device.

    Returns:
        [R, heads, S, D].
    """
    if isinstance(mask, SharedMask):
        return _attend_shared(query, keys, values, mask, scale)
    groups = query.shape[1] // keys.shape[1]
    padding = keys.shape[-1] - query.shape[-1]
    heads = query
    if groups > 1 and (keys.is_cuda if spread is None else spread):
        heads = query.unflatten(1, (-1, groups)).flatten(0, 1)
        mask = mask.repeat_interleave(keys.shape[1], 0)
        keys = _shared(keys, groups)
        values = _shared(values, groups)
    elif groups > 1:
        heads = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mask = mask.repeat(1, 1, groups, 1)
    if padding:
        heads = nn.functional.pad(heads, (0, padding))
    mixed = nn.functional.scaled_dot_product_attention(
        heads, keys, values, attn_mask=mask, scale=scale
    )
    if padding:
        mixed = mixed[..., : query.shape[-1]]
    return mixed.reshape(query.shape) if groups > 1 else mixed


def _attend_shared(
    query: Tensor, keys: Tensor, values: Tensor, mask: SharedMask, scale: float
) -> Tensor:
    """`attend` with a mask for all rows. Eight more numbers of each query and key hide a row's
    padding: their product is `HIDDEN` for hidden keys, and 0 for others.
    """
    groups = query.shape[1] // keys.shape[1]
    size = query.shape[-1]
    hidden = (HIDDEN / scale) * mask.padding.to(keys.dtype)
    hidden = nn.functional.pad(hidden[:, None, :, None], (0, 7)).expand(-1, keys.shape[1], -1, -1)
    query = nn.functional.pad(nn.functional.pad(query, (0, 1), value=1.0), (0, 7))
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([keys, hidden], -1).repeat_interleave(groups, 1),
        nn.functional.pad(values, (0, 8)).repeat_interleave(groups, 1),
        attn_mask=mask.visible,
        scale=scale,
    )
    return mixed[..., :size]


def _shared(keys: Tensor, groups: int) -> Tensor:
    """Keys of one head a row, which the heads of a group share without a copy: [R, key-value heads,
    K, D] -> [R·key-value heads, groups, K, D].
    """
    return keys.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
