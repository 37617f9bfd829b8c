"""LlamaGen's forward pass in float64, written apart from the package."""

import math

import torch
from torch import Tensor


def reference_logits(
    official: dict[str, Tensor],
    features: Tensor,
    keep: Tensor,
    tokens: Tensor,
    grid: tuple[int, int] = (2, 3),
) -> Tensor:
    """LlamaGen from its definition, on the official keys: complex rotary pairs, explicit softmax,
    float64.
    """
    w = {key: value.double() for key, value in official.items()}
    heads, size, base, prefix = 2, 8, 10000.0, features.shape[1]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    turns = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            freqs = [base ** (-2 * j / (size // 2)) for j in range(size // 4)]
            turns.append(
                [
                    complex(math.cos(a), math.sin(a))
                    for a in [row * f for f in freqs] + [column * f for f in freqs]
                ]
            )
    rotation = torch.cat(
        [
            torch.zeros(prefix, size // 2, dtype=torch.complex128),
            torch.tensor(turns, dtype=torch.complex128),
        ]
    )

    hidden = torch.nn.functional.gelu(
        features.double() @ w["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh"
    )
    x = torch.cat(
        [
            hidden @ w["cls_embedding.cap_proj.fc2.weight"].T,
            w["tok_embeddings.weight"][tokens[:, :-1]],
        ],
        1,
    )
    rows, length = x.shape[:2]
    for layer in range(2):
        g = f"layers.{layer}."
        fused = norm(x, w[g + "attention_norm.weight"]) @ w[g + "attention.wqkv.weight"].T
        q, k, v = fused.view(rows, length, 3, heads, size).unbind(2)
        pairs = (t.reshape(rows, length, heads, size // 2, 2).contiguous() for t in (q, k))
        q, k = (
            torch.view_as_real(torch.view_as_complex(pair) * rotation[None, :length, None]).flatten(
                -2
            )
            for pair in pairs
        )
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(size)
        visible = (
            torch.ones(length, length).tril().bool()[None]
            & torch.cat([keep, keep.new_ones(rows, length - prefix)], 1)[:, None]
        )
        visible |= torch.eye(length).bool()
        mixed = torch.einsum(
            "bhij,bjhd->bihd", scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1), v
        ).flatten(2)
        x = x + mixed @ w[g + "attention.wo.weight"].T
        h = norm(x, w[g + "ffn_norm.weight"])
        gate, up = h @ w[g + "feed_forward.w1.weight"].T, h @ w[g + "feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[g + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T
