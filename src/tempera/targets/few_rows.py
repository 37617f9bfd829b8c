"""Products of few rows in compiled rounds on a GPU: norm, product, SiLU and sum in one kernel of
ours (`few_rows_kernel`), where that is faster on this card.

PyTorch generates a kernel for the norm and one for SiLU, and calls cuBLAS for the product, which
for few outputs runs a second kernel that adds parts of sums. Which way is faster depends on card
and sizes, so both are timed for each shape when rounds are compiled, once for a kind of card: the
cache keeps the decision, because the two differ by rounding (as with `packed_linear`).
"""

from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tempera.decoding.compiled import constant
from tempera.runtime.card_times import TIMED_ENTRIES, card_times, nanoseconds
from tempera.runtime.quantised import is_quantised
from tempera.targets.packed_linear import PackedLinear
from tempera.targets.products import RMSNorm, by_torch, finished

Shape: TypeAlias = tuple[int, int, int, bool, bool, torch.dtype]
"""Rows, outputs, inputs, whether there is a norm, whether it is gated, and the dtype."""

ROWS = 16
"""Most rows: those of a tile of the tensor cores."""

BLOCKS = 8, 16, 32
"""Numbers of outputs of a thread block that are timed."""


def product(
    linear: nn.Module,
    x: Tensor,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """residual + f(linear(norm(x))), in one kernel where that is faster, else by PyTorch.

    Args:
        linear: a linear layer, or what has replaced one.
        x: [..., I].
        norm: a norm of x, or what has replaced one; None: none.
        residual: [..., O], or None.
        gated: whether f(y) is SiLU(gate) ∘ up, of the two halves of y; else f(y) = y.

    Returns:
        [..., O].
    """
    if norm is not None and not _is_plain_norm(norm, x):
        x, norm = norm(x), None
    block = _block(linear, x, norm is not None, gated) if _is_few(x) else 0
    if block:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        few_rows = torch.ops.tempera.few_rows
        out: Tensor = few_rows(x, linear.weight, linear.bias, weight, eps, residual, gated, block)
        return out
    return finished(linear(x if norm is None else norm(x)), residual, gated)


def merges(part: nn.Module, x: Tensor) -> bool:
    """Whether norm and sum around a part of a layer are handed to it, for its products: where they
    may be parts of one kernel, and nobody looks at what the part itself gets and returns.
    """
    return _is_few(x) and not _is_hooked(part)


def _is_few(x: Tensor) -> bool:
    """Whether x has few rows of few bits, in a compiled round without gradients on such a GPU."""
    return (
        torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and _fits(x.numel() // x.shape[-1], x.dtype, x.device)
    )


@constant
def _fits(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    return rows <= ROWS and dtype in (torch.bfloat16, torch.float16) and is_supported(device)


def is_supported(device: torch.device) -> bool:
    """Whether Triton is there and compiles our kernel for a device: NVIDIA's from Ampere on."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


def _block(linear: nn.Module, x: Tensor, normed: bool, gated: bool) -> int:
    """Outputs of a thread block of our kernel for a product; 0 where it is PyTorch's."""
    if type(linear) not in (nn.Linear, PackedLinear) or _is_hooked(linear):
        return 0
    weight: Tensor = linear.weight  # type: ignore[assignment]
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    like = x.dtype, x.device
    if is_quantised(weight) or weight.layout != torch.strided or not weight.is_contiguous():
        return 0
    if (weight.dtype, weight.device) != like:
        return 0
    if (bias is not None and bias.dtype != x.dtype) or weight.numel() >= 2**31:
        return 0
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:  # which PyTorch refuses
        return 0
    return fastest_block(x.numel() // inputs, outputs, inputs, normed, gated, *like)


def _is_plain_norm(norm: nn.Module, x: Tensor) -> bool:
    """Whether a norm is an RMS norm over the last dimension, without anything else. In float16 its
    weights could make numbers infinite before they are scaled.
    """
    return (
        type(norm) in (nn.RMSNorm, RMSNorm)
        and not _is_hooked(norm)
        and norm.normalized_shape == x.shape[-1:]
        and norm.eps is not None
        and norm.weight is not None
        and norm.weight.dtype == x.dtype == torch.bfloat16
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class says."""
    own = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(own) or _are_all_hooked()


@constant
def _are_all_hooked() -> bool:
    """Whether there is a hook on the calls of all modules, which PyTorch checks in every round."""
    return bool(torch.nn.modules.module._has_any_global_hook())


@constant
def fastest_block(
    rows: int,
    outputs: int,
    inputs: int,
    normed: bool,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Outputs of a thread block with which our kernel is fastest, of `BLOCKS`; 0 where PyTorch is.
    Timed once for a number of rows up to the next power of two.
    """
    import tempera.targets.few_rows_kernel  # noqa: F401 # makes the operator; imports Triton

    rows = 1 << (rows - 1).bit_length()
    options = f"{'normed ' * normed}{'gated ' * gated}{str(dtype).removeprefix('torch.')}"
    name = f"{rows} rows {outputs}x{inputs} {options}"
    shape = rows, outputs, inputs, normed, gated, dtype
    times = card_times("few_rows", name, device, lambda: _times(shape, device))
    return min(map(int, times), key=lambda block: times[str(block)])


def _times(shape: Shape, device: torch.device) -> dict[str, int]:
    """Nanoseconds of a product by PyTorch, named 0, and by our kernel, named by its block."""
    from triton.runtime.errors import OutOfResources

    rows, outputs, inputs, normed, gated, dtype = shape
    count = max(1, TIMED_ENTRIES // (outputs * inputs))
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    weights = [torch.ones(outputs, inputs, **like) for _ in range(count)]
    x = torch.ones(rows, inputs, **like)
    norm = torch.ones(inputs, **like) if normed else None
    given = None, norm, 1e-6, None, gated
    times = {"0": nanoseconds(lambda weight: by_torch(x, weight, *given), weights)}
    for block in BLOCKS:
        ours = partial(_ours, x, given=given, block=block)
        with suppress(OutOfResources):  # of shared memory, on smaller cards
            times[str(block)] = nanoseconds(ours, weights)
    return times


def _ours(x: Tensor, weight: Tensor, given: tuple[Any, ...], block: int) -> Tensor:
    out: Tensor = torch.ops.tempera.few_rows(x, weight, *given, block)
    return out
