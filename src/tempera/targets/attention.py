"""Attention over the KV cache, for the attention layers of transformers.

Shapes: R rows, S tokens of a pass, K visible keys, D head size.
"""

from typing import Any

from torch import Tensor, nn

from tempera.runtime import huggingface


def attend(
    module: nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling·q·kᵀ + mask)·v by PyTorch's fused attention, as an `AttentionInterface`.

    On CUDA its fast kernels with a mask support neither grouped keys nor head sizes that are no
    multiple of 8. So the queries of a group follow each other as if they were further tokens, and
    queries are padded to the head size of the cache (`cache.head_size`).

    Args:
        module: the attention layer.
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D or more].
        attention_mask: additive, [R, 1, S, K].
        scaling: factor of the products.

    Returns:
        [R, S, heads, D], and no weights.
    """
    groups, padding = query.shape[1] // keys.shape[1], keys.shape[-1] - query.shape[-1]
    tokens = query
    if groups > 1:
        tokens = query.unflatten(1, (-1, groups)).flatten(2, 3)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if padding:
        tokens = nn.functional.pad(tokens, (0, padding))
    mixed = nn.functional.scaled_dot_product_attention(
        tokens, keys, values, attn_mask=attention_mask, scale=scaling
    )
    return mixed[..., : query.shape[-1]].reshape(query.shape).transpose(1, 2), None


def use(attention: Any) -> None:
    """Let an attention layer of transformers, and all that share its configuration, `attend`."""
    huggingface.AttentionInterface.register(__name__, attend)
    attention.config._attn_implementation = __name__
