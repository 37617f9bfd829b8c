"""A Llama-like transformer from its definition, in float64, one sequence at a time, without cache,
padding or library, to compare adapters with. Weights are given by role, see `official_weights`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * weight.double() + bias.double()


def line_turns(count: int, size: int, theta: float = 10000.0) -> Tensor:
    """The turn of every pair at positions 0 …, complex [count, size / 2]."""
    speeds = theta ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles)


def grid_turns(captions: int, count: int, size: int, columns: int) -> Tensor:
    """LlamaGen's: half of the pairs turn by row and half by column; those of captions vanish."""
    places = torch.arange(count)[:, None] - captions
    speeds = 10000.0 ** (-4 * torch.arange(size // 4, dtype=torch.float64) / size)
    image = places.clamp(min=0)
    angles = torch.cat([image // columns * speeds, image % columns * speeds], -1)
    return torch.polar((places >= 0).double().expand_as(angles), angles)


def turned(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    """Queries or keys [S, heads, D]; pairs are neighbours, or stand half a head apart."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns[:, None])
    return (out if interleaved else out.mT).flatten(-2)


def layer(
    x: Tensor,
    weights: Weights,
    heads: tuple[int, int],
    turns: Tensor,
    interleaved: bool,
    epsilon: float = 1e-5,
) -> Tensor:
    """A decoder layer over x [S, H]; `heads`: of queries, and of keys and values. Norms that have
    no weights are left out.
    """
    w = {role: tensor.double() for role, tensor in weights.items()}
    h = rms_norm(x, w["attention_norm"], epsilon) if "attention_norm" in w else x
    counts = heads[0], heads[1], heads[1]
    q, k, v = (
        (h @ w[role].T).unflatten(-1, (count, -1))
        for role, count in zip("qkv", counts, strict=True)
    )
    if "q_norm" in w:
        q, k = layer_norm(q, w["q_norm"], w["q_bias"]), layer_norm(k, w["k_norm"], w["k_bias"])
    q, k = turned(q, turns, interleaved), turned(k, turns, interleaved)
    k, v = (part.repeat_interleave(heads[0] // heads[1], 1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    later = torch.ones_like(scores[0]).triu(1).bool()
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    x = x + mixed.flatten(1) @ w["o"].T
    h = rms_norm(x, w["mlp_norm"], epsilon)
    gate = h @ w["gate"].T
    return x + (gate * gate.sigmoid() * (h @ w["up"].T)) @ w["down"].T


def logits(
    x: Tensor,
    layers: list[Weights],
    norm: Tensor,
    head: Tensor,
    heads: tuple[int, int],
    turns: Tensor,
    interleaved: bool,
) -> Tensor:
    """Logits after every embedding x [S, H], [S, vocabulary]."""
    x = x.double()
    for weights in layers:
        x = layer(x, weights, heads, turns, interleaved)
    return rms_norm(x, norm) @ head.double().T
