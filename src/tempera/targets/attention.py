"""Attention over the KV cache.

Shapes: R rows, S tokens of a pass, K visible keys, D head size.
"""

from torch import Tensor, nn


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v by PyTorch's fused attention.

    On CUDA its fast kernels with a mask support neither grouped keys nor head sizes that are no
    multiple of 8. So the queries of a group follow each other as if they were further tokens, and
    queries are padded to the head size of the cache (`cache.head_size`).

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D or more].
        mask: additive, [R, 1, S, K].
        scale: factor of the products.

    Returns:
        [R, heads, S, D].
    """
    groups = query.shape[1] // keys.shape[1]
    padding = keys.shape[-1] - query.shape[-1]
    tokens = query
    if groups > 1:
        tokens = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mask = mask.repeat(1, 1, groups, 1)
    if padding:
        tokens = nn.functional.pad(tokens, (0, padding))
    mixed = nn.functional.scaled_dot_product_attention(
        tokens, keys, values, attn_mask=mask, scale=scale
    )
    if padding:
        mixed = mixed[..., : query.shape[-1]]
    return mixed.reshape(query.shape) if groups > 1 else mixed
