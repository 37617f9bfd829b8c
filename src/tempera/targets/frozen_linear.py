"""Linear layers for decoding: frozen, their weights stored for products with few rows.

A round multiplies few rows (a token or a small tree, twice under guidance) by large matrices, so
that reading the weights is what takes time. oneDNN reads them fastest from blocks in the order that
its kernel needs (`PackedLinear`); without it, from columns (`ColumnLinear`).

Shapes: M rows, I inputs, O outputs.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import override

ROWS = 16
"""Rows that weights are packed for. Blocks chosen for 2 to 64 rows are equally fast at 1 to 240;
those chosen for one row are not.
"""

SMALL = 2**18
"""Entries of a float32 weight below which it is stored by columns. A call of oneDNN takes about ten
microseconds more than PyTorch's own product, which is then as much as it saves (2 and 12 rows, AMD
EPYC; half precision gains at every size). The choice depends on nothing else, so that results can
be reproduced.
"""


class FrozenLinear(nn.Module):
    """x·Wᵀ + b without gradients."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""

    @abstractmethod
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        """`base` + x·Wᵀ + b, [M, O] and [M, I] -> [M, O]."""


class PackedLinear(FrozenLinear):
    """Weights in oneDNN's blocks; see `packs`.

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

    def as_columns(self) -> "ColumnLinear":
        """The same layer in PyTorch's own tensors."""
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
    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(base, x, self.weight)
        return out if self.bias is None else out + self.bias


def packs(weight: Tensor) -> bool:
    """Whether such weights are best packed: oneDNN multiplies their type, and they are large."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= SMALL


def freeze(weight: Tensor, bias: Tensor | None = None) -> FrozenLinear:
    """The fastest layer for a weight W [O, I] and a bias b [O]; it copies them."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    return PackedLinear(weight, bias) if packs(weight) else ColumnLinear(weight, bias)


def unpack(module: nn.Module) -> None:
    """Store all packed weights inside a module as columns: the compiler cannot read packed ones."""
    for name, child in module.named_children():
        if isinstance(child, PackedLinear):
            setattr(module, name, child.as_columns())
        else:
            unpack(child)
