"""One Triton kernel for a product of at most 16 rows with a large matrix, with what is before and
behind it. Triton must be there: `few_rows` imports this file where it is used.

How the work is split. A product of few rows reads its weights once and computes little, so the
memory's pace is the limit. An H200 has 132 multiprocessors and reads 4.8 TB/s; at a latency of 0.7
µs or so, 3.4 MB must be under way, 25 KB for each multiprocessor. LlamaGen-XL's matrices have 3 to
18 MB, so a kernel lasts 1 to 4 µs, in which blocks cannot wait for each other: no sum is split over
blocks, as cuBLAS does with a second kernel. Instead the four warps of a block each sum a quarter of
every `DEPTH` inputs (a batch of products, which Triton gives to warps one by one), and few outputs
a block, 8, 16 or 32, make as many blocks as the card needs: 1,280 outputs are 160 blocks of 8. Five
stages keep four tiles of 256 inputs under way, 4 KB for 8 outputs: 2.6 MB for these 160 blocks, and
7.8 MB for the 240 blocks of 16 of queries, keys and values. For an H100 Triton 3.8 compiles it to
40 to 168 registers without spills, and 49 to 174 KB of shared memory (`GATED`: from 76 on), so one
to four blocks fit a multiprocessor. What a block costs is reading x, from the L2 cache: as many
bytes as weights at 16 rows and 16 outputs. Which number of outputs is fastest is timed
(`few_rows`); sums have the same order in all of them.

Shapes: M rows, I inputs, O outputs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from tempera.targets.products import by_torch

WARPS, DEPTH, STAGES = 4, 256, 5


@triton.jit  # type: ignore[untyped-decorator]
def few_rows_product(  # type: ignore[no-untyped-def] # its arguments are Triton's
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    rows,
    inputs,
    outputs,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`BLOCK` outputs of all rows, each the sum of `GROUPS` sums over every so many-th inputs.
    Pointers but those of x, weights and out may be None. The norm scales rows, so it is applied
    behind the product, but for its weight.
    """
    row = tl.arange(0, 16)[None, :, None]
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    begin = tl.arange(0, GROUPS)[:, None, None] * (DEPTH // GROUPS)
    across = begin + tl.arange(0, DEPTH // GROUPS)[None, None, :]
    down = begin + tl.arange(0, DEPTH // GROUPS)[None, :, None]
    sums = tl.zeros([GROUPS, 16, BLOCK], tl.float32)
    ups = tl.zeros([GROUPS, 16, BLOCK], tl.float32)
    squares = tl.zeros([GROUPS, 16, DEPTH // GROUPS], tl.float32)
    for start in range(0, inputs, DEPTH):
        is_input = start + across < inputs
        x = tl.load(x_ptr + row * inputs + start + across, (row < rows) & is_input, 0.0)
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + start + across, is_input, 0.0)).to(x.dtype)
        is_weight = (output < outputs) & (start + down < inputs)
        place = weight_ptr + output * inputs + start + down
        sums = tl.dot(x, tl.load(place, is_weight, 0.0), sums)
        if GATED:
            ups = tl.dot(x, tl.load(place + outputs * inputs, is_weight, 0.0), ups)
    row = tl.arange(0, 16)[:, None]
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_output = output < outputs
    out = tl.sum(sums, 0)
    up = tl.sum(ups, 0)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / inputs + EPS)[:, None]
        out *= scale
        up *= scale
    if bias_ptr is not None:
        out += tl.load(bias_ptr + output, is_output, 0.0)
        if GATED:
            up += tl.load(bias_ptr + outputs + output, is_output, 0.0)
    if GATED:
        out *= tl.sigmoid(out) * up
    is_output &= row < rows
    place = row * outputs + output
    if residual_ptr is not None:
        out += tl.load(residual_ptr + place, is_output, 0.0)
    tl.store(out_ptr + place, out, is_output)


@triton_op("tempera::few_rows", mutates_args=())
def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    block: int,
) -> Tensor:
    """`products.by_torch` in one kernel of `block` outputs a block; on a CPU by PyTorch."""
    if x.device.type == "cpu":
        return by_torch(x, weight, bias, norm, eps, residual, gated)
    return launch(wrap_triton(few_rows_product), x, weight, bias, norm, eps, residual, gated, block)


def launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    block: int,
) -> Tensor:
    """Launch `few_rows_product`, wrapped or not."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    inputs = weight.shape[1]
    out = x.new_empty(*x.shape[:-1], outputs)
    assert residual is None or residual.shape == out.shape
    kernel[(triton.cdiv(outputs, block),)](
        x.contiguous(),
        weight,
        bias,
        norm,
        None if residual is None else residual.contiguous(),
        out,
        out.numel() // outputs,
        inputs,
        outputs,
        EPS=eps,
        GATED=gated,
        BLOCK=block,
        GROUPS=WARPS,
        DEPTH=DEPTH,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
