"""Linear layers with weights of four bits, by PyTorch's "tinygemm" operators, as gpt-fast has them.

torchao has formats for these operators, but none for both CPUs and GPUs: that of GPUs quantises on
a GPU alone and fills inputs up to multiples of 1024, that of CPUs is a prototype.

Shapes: I inputs, O outputs, G inputs of a group, R rows.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError

GROUPS = 128, 64, 32
"""Weights that share a scale and a zero: as many as divide a row. tinygemm takes 256, too."""
OUTPUTS = 16
"""Their number is a multiple of this on CPUs, of 8 on NVIDIA GPUs and of 16 on AMD's."""
LEVELS = 15
MIDDLE = 8
LEAST = 1e-6
"""Smallest scale, of a group whose weights are all the same."""


def rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Each group's weights on 16 even levels from its least to its largest, as tinygemm has them.

    Args:
        weight: [O, I].
        group: G, which divides I.

    Returns:
        codes c, int32 [O, I], 0 to 15; and each group's scale s and zero z, bfloat16 [I/G, O, 2].
        The weights are (c - 8)·s + z.
    """
    groups = weight.detach().float().unflatten(1, (-1, group))
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((largest - least) / LEVELS).clamp(min=LEAST).bfloat16()
    zero = (least + MIDDLE * scale).bfloat16()
    codes = ((groups - zero) / scale + MIDDLE).round().clamp(0, LEVELS).int()
    return codes.flatten(1), torch.cat([scale, zero], -1).transpose(0, 1).contiguous()


class Int4Linear(nn.Module):
    """x·Wᵀ + b without gradients, with W rounded to four bits.

    Products take x rounded to bfloat16 and add up in float32; their results are bfloat16. A GPU's
    also round the weights (c - 8)·s + z to bfloat16. The bias is added in the dtype of x.

    Attributes:
        packed: codes in the order of the device's operator: on GPUs int32 [O/8, I/G, 32, G/32],
            else uint8 [O, I/2].
        scales: scale and zero of each group, [I/G, O, 2]; bfloat16, also where others are cast.
        group: G.
    """

    def __init__(self, packed: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> None:
        super().__init__()
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.group = group

    @classmethod
    def of(cls, layer: nn.Linear, device: torch.device, name: str) -> Self:
        """A layer's weights, rounded where they are and packed for `device`.

        Raises:
            TemperaError: the operators do not take its sizes; `name` says which layer it is.
        """
        outputs, inputs = layer.weight.shape
        group = next((size for size in GROUPS if inputs % size == 0), None)
        if group is None or outputs % OUTPUTS:
            raise TemperaError(
                f"int4 needs layers with a multiple of {GROUPS[-1]} inputs and of {OUTPUTS} "
                f"outputs, but {name} has {inputs} and {outputs}: choose int8"
            )
        codes, scales = rounded(layer.weight, group)
        return cls(_pack(codes, group, device), scales.to(device), layer.bias, group)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        multiply: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu
        if self.packed.dim() == 4:
            multiply = torch.ops.aten._weight_int4pack_mm
        out = multiply(rows, self.packed, self.group, self.scales).to(x.dtype)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if self.bias is None else out + self.bias

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = self.scales.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = nn.Parameter(scales.to(self.packed.device), requires_grad=False)
        return self


def in_pairs(codes: Tensor) -> Tensor:
    """Two codes in a byte, the first in its upper half: [O, I] -> uint8 [O, I/2]."""
    return (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)


def _pack(codes: Tensor, group: int, device: torch.device) -> Tensor:
    """Codes in the order of the operator of a device; on GPUs in blocks of G inputs, which its
    kernel may have of 32, 64 and 128.
    """
    operators = torch.ops.aten
    if device.type == "cuda":
        pairs = in_pairs(codes).to(device)
        packed: Tensor = operators._convert_weight_to_int4pack(pairs, group // 16)
    else:
        packed = operators._convert_weight_to_int4pack_for_cpu(codes.to(device), 1)
    return packed
