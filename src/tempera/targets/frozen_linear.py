"""Linear layers for decoding: frozen, with weights stored for products with few rows.

A round multiplies few rows (a token or a small tree, twice as many with guidance) by large
matrices, so reading the weights dominates the time. Float32 weights that lose nothing in float16,
because they were saved in it, are read from memory in it (`HalfLinear`), small ones too: the other
work of a round leaves little of them in the processor's caches. Of other weights, oneDNN reads
those fastest that are packed in blocks in its kernel's order (`PackedLinear`); without it, storage
by columns is fastest (`ColumnLinear`).

Shapes: M rows, I inputs, O outputs.
"""

import warnings
from abc import abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.runtime.processor import computes_bfloat16

ROWS = 16
"""Number of rows that weights are packed for. Blocks chosen for 2 to 64 rows are equally fast at 1
to 240 rows; blocks chosen for one row are not.
"""

SMALL = 2**18
"""float32 weights with fewer entries are not packed but stored by columns: a call of oneDNN takes
about ten microseconds longer than PyTorch's own product, which cancels its gain here (2 and 12
rows, AMD EPYC; bfloat16 arithmetic gains at every size). The choice involves no timing, so results
are reproducible.
"""


HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
    torch, "fbgemm_linear_fp16_weight_fp32_activation"
)
"""Whether PyTorch can multiply by weights in float16 on this processor."""


class FrozenLinear(nn.Module):
    """x·Wᵀ + b without gradients."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> "FrozenLinear":
        """A copy whose weights have another dtype."""

    @abstractmethod
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        """`base` [M, O] + x·Wᵀ + b with x [M, I] -> [M, O]."""

    @abstractmethod
    def as_columns(self) -> "ColumnLinear":
        """The same layer in PyTorch's own tensors, which the compiler can read."""


class HalfLinear(FrozenLinear):
    """Float32 products with weights in float16; see `is_half`. FBGEMM's kernels widen the weights
    as they read them, so the products are those of float32 weights at half the memory traffic.

    PyTorch 2.13 and 2.14 have these functions and announce that a later version will not. The
    alternative, `torch.ops.quantized.linear_dynamic_fp16`, runs the same kernels, but ten
    microseconds pass before it does.

    Args:
        weight: W, [O, I], float32 numbers that float16 has too.
        bias: b, [O], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._inputs, self._bias = weight.shape[1], bias
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the announcement comes with the first calls
            self._packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.contiguous())
            self.forward(weight[:1])

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, self._bias)

    @override
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        return base + self.forward(x)

    @override
    def in_dtype(self, dtype: torch.dtype) -> FrozenLinear:
        return freeze(self._unpacked().to(dtype), _converted(self._bias, dtype))

    @override
    def as_columns(self) -> "ColumnLinear":
        return ColumnLinear(self._unpacked(), self._bias)

    def _unpacked(self) -> Tensor:
        """W, from its products with unit vectors."""
        units = torch.eye(self._inputs)
        return torch.fbgemm_linear_fp16_weight_fp32_activation(units, self._packed, None).t()


class PackedLinear(FrozenLinear):
    """Weights packed in oneDNN's blocks; see `packs`.

    Args:
        weight: W, [O, I].
        bias: b, [O], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self._bias = bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out

    @override
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, base, self._weight, self._bias, "add"
        )
        return out

    @override
    def in_dtype(self, dtype: torch.dtype) -> FrozenLinear:
        return freeze(self._weight.to_dense().to(dtype), _converted(self._bias, dtype))

    @override
    def as_columns(self) -> "ColumnLinear":
        return ColumnLinear(self._weight.to_dense(), self._bias)


class ColumnLinear(FrozenLinear):
    """Weights stored column by column, in PyTorch's own tensors.

    Args:
        weight: W, [O, I].
        bias: b, [O], or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.t().contiguous(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = (
            torch.mm(rows, self.weight)
            if self.bias is None
            else torch.addmm(self.bias, rows, self.weight)
        )
        return out.view(*x.shape[:-1], -1)

    @override
    def in_dtype(self, dtype: torch.dtype) -> FrozenLinear:
        return freeze(self.weight.t().to(dtype), _converted(self.bias, dtype))

    @override
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(base, x, self.weight)
        return out if self.bias is None else out + self.bias

    @override
    def as_columns(self) -> "ColumnLinear":
        return self


def _converted(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def bytes_read(weight: Tensor) -> int:
    """Bytes that a product with `freeze(weight)` reads of the weight."""
    return weight.nbytes // 2 if is_half(weight) else weight.nbytes


def is_half(weight: Tensor) -> bool:
    """Whether a float32 matrix is on a CPU with FBGEMM, and has only float16 numbers, as those of a
    model that was saved in float16.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.dim() != 2:
        return False
    if not HAS_FBGEMM:
        return False
    # a few rows first, since few other weights have any that fit
    return all(torch.equal(part.half().float(), part) for part in (weight[:8], weight))


def packs(weight: Tensor) -> bool:
    """Whether packing suits the weight: oneDNN supports its dtype, and it is large enough."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bfloat16(weight.device)
    return weight.dtype == torch.float32 and weight.numel() >= SMALL


def freeze(weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
    """The fastest layer for weight W [O, I] and bias b [O], which are copied."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if is_half(weight):
        return HalfLinear(weight, bias)
    return PackedLinear(weight, bias) if packs(weight) else ColumnLinear(weight, bias)


def unpack(module: nn.Module) -> None:
    """Store a module's packed weights by columns instead: the compiler cannot read packed ones."""
    for name, child in module.named_children():
        if isinstance(child, FrozenLinear):
            setattr(module, name, child.as_columns())
        else:
            unpack(child)
