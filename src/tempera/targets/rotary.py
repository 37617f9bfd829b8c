"""The one-dimensional rotary embedding of language models (Su et al. 2021), as Hugging Face applies
it: half-split pairs.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns pair i of a head by position · θ^(−2i/D).

    Its frequencies stay float32 whatever type the network around it is converted to: in bfloat16
    position 9,000 would be wrong by radians.

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
        """The rotary embedding of a Hugging Face configuration whose heads share its width."""
        head_dim = config.hidden_size // config.num_attention_heads
        return cls(head_dim, config.rope_parameters["rope_theta"])

    def reset_tables(self, device: torch.device) -> None:
        """Compute the frequencies."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        self.inv_freq = 1.0 / self.theta**exponents

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [R, S] → cos, sin [R, S, D] in x's type."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_tables(self.inv_freq.device)
        return self
