"""A Llama-like transformer from its definition, in float64, one sequence at a time, without cache,
padding or library, to compare adapters with. Weights are given by role, so each test maps official
names to roles itself.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        + bias.double()
    )


def interleaved(x: Tensor, theta: float) -> Tensor:
    """Pairs are neighbours: x [S, heads, D]."""
    turns = _angles(x, theta)[:, None]
    return torch.view_as_real(
        torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2))
        * torch.polar(torch.ones_like(turns), turns)
    ).flatten(-2)


def half_split(x: Tensor, theta: float) -> Tensor:
    """Pairs stand half a head apart: x [S, heads, D]."""
    angles = _angles(x, theta)[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


def _angles(x: Tensor, theta: float) -> Tensor:
    size = x.shape[-1]
    rates = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    return torch.arange(len(x), dtype=torch.float64)[:, None] * rates


def logits(
    ids: list[int],
    embedding: Tensor,
    layers: list[Weights],
    norm: Tensor,
    head: Tensor,
    heads: tuple[int, int],
    theta: float,
    rotate: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """Logits after every token, [S, vocabulary]; `heads`: of queries, and of keys and values."""
    x = embedding.double()[ids]
    seen = torch.ones(len(ids), len(ids)).tril().bool()
    for w in layers:
        w = {role: tensor.double() for role, tensor in w.items()}
        h = rms_norm(x, w["attention_norm"])
        q, k, v = (
            (h @ w[role].T).view(len(ids), count, -1)
            for role, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True)
        )
        if "q_norm" in w:
            q, k = layer_norm(q, w["q_norm"], w["q_bias"]), layer_norm(k, w["k_norm"], w["k_bias"])
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = (part.repeat_interleave(heads[0] // heads[1], 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        mixed = torch.einsum(
            "hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v
        ).flatten(1)
        x = x + mixed @ w["o"].T
        h = rms_norm(x, w["mlp_norm"])
        gate = h @ w["gate"].T
        x = x + (gate * gate.sigmoid() * (h @ w["up"].T)) @ w["down"].T
    return rms_norm(x, norm) @ head.double().T
