"""The one-dimensional rotary embedding of language models (Su et al. 2021), with half-split pairs
as in Hugging Face.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates pair i of a head by position · θ^(−2i/D).

    The frequencies stay float32 when the network is converted to another dtype: in bfloat16 the
    angle at position 9,000 would be off by radians.

    Args:
        head_dim: D.
        theta: θ.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", torch.empty(head_dim // 2), persistent=False)
        self.reset_tables(self.inv_freq.device)

    @classmethod
    def of(cls, config: Any) -> Self:
        """The rotary embedding of a Hugging Face configuration, with D = hidden size / heads."""
        head_dim = config.hidden_size // config.num_attention_heads
        return cls(head_dim, config.rope_parameters["rope_theta"])

    def reset_tables(self, device: torch.device) -> None:
        """Compute the frequencies on a device."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        self.inv_freq = 1.0 / self.theta**exponents

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [R, S] → cos, sin [R, S, D] in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_tables(self.inv_freq.device)
        return self
