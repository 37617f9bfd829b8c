"""A frozen linear layer for products with few rows.

A round multiplies few rows (a token or a small tree, twice as many with guidance) by large
matrices, so reading the weights dominates the time. On a CPU oneDNN reads them fastest in blocks of
its kernel's order: LlamaGen-B's rounds take half as long as with `F.linear`. The public interface
(`torch.utils.mkldnn`) does not pack and is slower than `F.linear`, so this uses the operators that
TorchInductor uses, and `F.linear` where there are none.

Shapes: I inputs, O outputs.
"""

import torch
from torch import Tensor, nn

from tempera.runtime.processor import computes_bfloat16

ROWS = 16
"""Rows that weights are packed for. Blocks chosen for 2 to 64 rows are equally fast at 1 to 240
rows; blocks chosen for one row are not.
"""

SMALL = 2**18
"""Float32 weights with fewer entries are not packed: a call of oneDNN takes about ten microseconds
longer than PyTorch's own product. The choice involves no timing, so results are reproducible.
"""


def packs(weight: Tensor) -> bool:
    """Whether packing suits a weight: it is large enough, and oneDNN multiplies its dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bfloat16(weight.device)
    return weight.dtype == torch.float32 and weight.numel() >= SMALL


class PackedLinear(nn.Module):
    """x·Wᵀ + b without gradients, with W packed where that is faster.

    Args:
        weight: W, [O, I].
        bias: b, [O], or None.
        pack: False leaves W as it is, for a product that gradients flow through.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.packed = pack and packs(weight)
        weight = weight.detach()
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if not self.packed:
            return nn.functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def to_dtype(self, dtype: torch.dtype) -> "PackedLinear":
        """A copy whose weights have another dtype."""
        weight = self.weight.to_dense() if self.packed else self.weight
        return PackedLinear(weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


def pack(module: nn.Module) -> None:
    """Replace the linear layers inside a module."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack(child)
