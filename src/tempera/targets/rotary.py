"""The one-dimensional rotary embedding of language models (Su et al. 2021), with half-split pairs
as in Hugging Face.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates pair i of a head by position · θ^(−2i/D).

    Unlike Hugging Face's it has no buffer of frequencies that a conversion of the network would
    round: in bfloat16 the angle at position 9,000 would be off by radians.

    Args:
        config: a Hugging Face configuration, with D = hidden size / heads.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.theta = config.rope_parameters["rope_theta"]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [R, S] → cos, sin [R, S, D] in the dtype of `x`."""
        exponents = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        angles = position_ids[..., None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
