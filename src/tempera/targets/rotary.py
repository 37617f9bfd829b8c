"""Rotary embeddings (Su et al. 2021), with half-split pairs as in Hugging Face. Interleaved pairs
are permuted when weights are loaded (`llamagen.permute_pairs`).

Shapes: R rows, S tokens, N heads, D head size.
"""

import torch
from torch import Tensor


class Rotary:
    """The one-dimensional rotary embedding of language models: pair i of a head turns by
    position · θ^(−2i/D).

    Angles are float32, whatever the dtype of the network: in bfloat16 the angle at position 9,000
    would be off by radians.

    Args:
        head_dim: D.
        theta: θ.
        turned: numbers of a head that are turned; the others, by default none, stay as they are.
            The pairs are those of the first and the second half of a head all the same.
    """

    def __init__(self, head_dim: int, theta: float, turned: int | None = None) -> None:
        self.head_dim, self.theta = head_dim, theta
        self.pairs = (head_dim if turned is None else turned) // 2

    def table(self, count: int, prefix: int, device: torch.device) -> Tensor:
        """What `rotate` needs at positions 0 … count − 1, float32 [2, count, D].

        Args:
            count: number of positions; the first is that of the first condition token.
            prefix: number of condition tokens.
            device: device of the table.
        """
        pair = torch.arange(self.head_dim // 2, device=device)
        speeds = self.theta ** (-pair.float() / self.pairs) * (pair < self.pairs)
        angles = torch.arange(count, device=device)[:, None] * speeds
        return turns(angles.cos(), angles.sin())


def turns(cos: Tensor, sin: Tensor) -> Tensor:
    """Cosines of both halves of a head, and sines with the signs of `rotate`: [S, D / 2] each ->
    [2, S, D].
    """
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of every head: [R, S, N, D] -> [R, S, N, D].

    Args:
        x: queries or keys.
        rotation: entries of a `Rotary.table`, [2, R, S, D].
    """
    cos, sin = rotation.unsqueeze(3).unbind()
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
