"""Rotary embeddings (Su et al. 2021), with half-split pairs as in Hugging Face. Interleaved pairs
are permuted when weights are loaded (`llamagen.permute_pairs`).

Shapes: R rows, S tokens, N heads, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override


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
        self.head_dim = head_dim
        self.theta = theta
        self.pairs = (head_dim if turned is None else turned) // 2

    def table(self, count: int, prefix: int, device: torch.device) -> Tensor:
        """What `rotate` needs at positions 0 … count − 1, float32 [2, count, D].

        Args:
            count: number of positions; the first is that of the first condition token.
            prefix: number of condition tokens.
            device: device of the table.
        """
        angles = torch.arange(count, device=device)[:, None] * self.speeds(device)
        return turns(angles.cos(), angles.sin())

    def speeds(self, device: torch.device) -> Tensor:
        """By how much one position turns each pair, float32 [D / 2]."""
        pair = torch.arange(self.head_dim // 2, device=device)
        return self.theta ** (-pair.float() / self.pairs) * (pair < self.pairs)


class MultimodalRotary(Rotary):
    """The embedding of Qwen2-VL and GLM-Image (M-RoPE): a token has three positions, and every
    pair turns by one of them. Those of a condition token are all its number. The images follow: if
    one begins at position D, its token in row y and column x has D, D + y and D + x, and the next
    begins at D + max(rows, columns).

    Args:
        head_dim, theta, turned: see `Rotary`.
        sections: numbers of pairs that turn by the first, second, third, first, … position.
        grids: rows and columns of each image.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        sections: Sequence[int],
        grids: Sequence[tuple[int, int]],
        turned: int | None = None,
    ) -> None:
        super().__init__(head_dim, theta, turned)
        axes = [axis % 3 for axis, pairs in enumerate(sections) for _ in range(pairs)]
        self.axes = axes + [0] * (head_dim // 2 - len(axes))
        self.grids = grids

    @override
    def table(self, count: int, prefix: int, device: torch.device) -> Tensor:
        """See `Rotary.table`."""
        axes = torch.tensor(self.axes, device=device)
        text = torch.arange(prefix, device=device).expand(1, 3, -1)
        (three,) = multimodal_positions(count, text, self.grids)
        positions = three[axes].transpose(0, 1)
        angles = positions * self.speeds(device)
        return turns(angles.cos(), angles.sin())


def multimodal_positions(count: int, prefix: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
    """The three positions of every slot, int64 [R, 3, count], behind those of condition tokens,
    int64 [R, 3, T], of which the last is text; see `MultimodalRotary`.
    """
    start = prefix[..., -1:] + 1
    parts = [prefix]
    for rows, columns in grids:
        index = torch.arange(rows * columns, device=prefix.device)
        parts.append(start + torch.stack([index * 0, index // columns, index % columns]))
        start = start + max(rows, columns)
    used = sum(part.shape[-1] for part in parts)
    parts.append(start + torch.arange(max(0, count - used), device=prefix.device))
    return torch.cat(parts, -1)[..., :count]


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
