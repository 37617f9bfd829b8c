"""Attention to the first keys of each row by PyTorch's FlexAttention, in compiled rounds.

FlexAttention's operator is called as it is, and the compiler does not look into the function that
calls it: PyTorch 2.14 loses attributes that a compiled function writes before and after
`torch.nn.attention.flex_attention` (findings/flex_attention_loses_attributes.sh), and traces it ten
times as long. Whoever imports this module imports PyTorch's compiler.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Keys of a block: a row loads whole blocks."""

OUTPUTS = "OUTPUT_LOGSUMEXP", "OUTPUT_MAX"
PROMISES = "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"
OPTIONS = dict.fromkeys((*OUTPUTS, *PROMISES), False)
"""Of the operator, which has no defaults."""


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def attend_reached(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, reached: Tensor, scale: float
) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v over the blocks of keys that a row has reached. The queries of a
    group share a block of the GPU; where there are few of these, several share a row's keys.

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D].
        mask: additive, [R, 1, S, K].
        reached: number of keys that a row has reached, int64 [R]; the mask hides later ones.
        scale: factor of the products.

    Returns:
        [R, heads, S, D].
    """
    rows, heads, tokens, _ = query.shape
    slots = keys.shape[2]
    # one block of queries, with those of the heads that share its keys
    size = max(BLOCK, 1 << (tokens * heads // keys.shape[1] - 1).bit_length())
    count = (reached.clamp(max=slots) + BLOCK - 1) // BLOCK
    every = torch.arange(-(-slots // BLOCK), dtype=torch.int32, device=keys.device)
    blocks = BlockMask.from_kv_blocks(
        count.int()[:, None, None],
        every.expand(rows, 1, 1, -1),
        BLOCK_SIZE=(size, BLOCK),
        seq_lengths=(tokens, slots),
        compute_q_blocks=False,
    ).as_tuple()
    flex = torch.ops.higher_order.flex_attention
    mixed: Tensor = flex(query, keys, values, _masked, blocks, scale, OPTIONS, (mask[:, 0],))[0]
    return mixed


def _masked(
    score: Tensor, row: Tensor, head: Tensor, token: Tensor, key: Tensor, mask: Tensor
) -> Tensor:
    return score + mask[row, token, key]
