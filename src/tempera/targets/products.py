"""What a decoder layer does with one of its matrices: norm, product, SiLU(gate) ∘ up, sum. Its
norm, and all of it by PyTorch.
"""

from torch import Tensor, nn
from typing_extensions import override


class RMSNorm(nn.RMSNorm):
    """An RMS norm in the dtype of its input, also where autocast leaves its weight in another."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        weight = self.weight.to(x.dtype)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`finished` of x·Wᵀ + b, where x is normed with weights `norm` and epsilon `eps`, if there are
    any.
    """
    if norm is not None:
        x = nn.functional.rms_norm(x, x.shape[-1:], norm, eps)
    return finished(nn.functional.linear(x, weight, bias), residual, gated)


def finished(y: Tensor, residual: Tensor | None, gated: bool) -> Tensor:
    """SiLU(gate) ∘ up of the two halves of y if `gated`, else y; plus `residual`."""
    if gated:
        gate, up = y.chunk(2, -1)
        y = nn.functional.silu(gate) * up
    return y if residual is None else residual + y
