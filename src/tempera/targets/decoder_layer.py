"""The decoder layer of every loaded model and of its drafts, as gpt-fast and vLLM have one: few,
large operations. It reads and writes weights under Hugging Face's names, one matrix a projection,
and computes with them merged: queries, keys and values are one product, gate and up another.

Shapes: R rows, S tokens of a pass, K visible keys, H width, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from tempera.targets.attention import SharedMask, attend
from tempera.targets.cache import Keys
from tempera.targets.few_rows import merges, product
from tempera.targets.products import RMSNorm
from tempera.targets.rotary import Rotary, rotate


@dataclass(frozen=True)
class LayerSizes:
    """Sizes and options of a decoder layer.

    Attributes:
        width: H.
        inner: width inside the MLP.
        heads: attention heads.
        kv_heads: heads of keys and values; each serves heads ÷ kv_heads queries.
        head_dim: D.
        eps: epsilon of the RMS norms.
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        head_norm: how each head of queries and keys is normed: not at all; by a LayerNorm with
            weights for every head (Chameleon); or by an RMS norm with one for all (Qwen3).
        four_norms: whether what attention and MLP add is normed too (GLM).
    """

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: Literal["none", "layer", "rms"] = "none"
    four_norms: bool = False

    @classmethod
    def of(cls, config: Any, **options: Any) -> Self:
        """The sizes in a Hugging Face configuration; `options` override them."""
        heads = config.num_attention_heads
        sizes = {
            "width": config.hidden_size,
            "inner": config.intermediate_size,
            "heads": heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "eps": config.rms_norm_eps,
            "qkv_bias": getattr(config, "attention_bias", False),
            "output_bias": getattr(config, "attention_bias", False),
            "mlp_bias": getattr(config, "mlp_bias", False),
        }
        return cls(**sizes | options)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)).

    Args:
        sizes: sizes and options.
        index: number of the layer in its cache.
    """

    def __init__(self, sizes: LayerSizes, index: int = 0) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes, index)
        self.post_attention_layernorm: nn.Module = RMSNorm(sizes.width, sizes.eps)
        self.mlp = GatedMLP(sizes)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if sizes.four_norms:
            self.post_self_attn_layernorm = RMSNorm(sizes.width, sizes.eps)
            self.post_mlp_layernorm = RMSNorm(sizes.width, sizes.eps)

    def forward(
        self, x: Tensor, mask: Tensor | SharedMask, rotation: Tensor, cache: Keys | None = None
    ) -> Tensor:
        """Run the layer.

        Args:
            x: hidden states, [R, S, H].
            mask: additive, [R, 1, S, K], or shared by all rows.
            rotation: cosines and signed sines of the tokens' positions, [2, R, S, D], see
                `rotary.rotate`.
            cache: holds earlier keys and values, and takes those of these tokens; without one the
                keys are these tokens' own.

        Returns:
            [R, S, H].
        """
        after = self.post_self_attn_layernorm
        x = _added(x, self.input_layernorm, self.self_attn, after, mask, rotation, cache)
        return _added(x, self.post_attention_layernorm, self.mlp, self.post_mlp_layernorm)


def _added(
    x: Tensor, norm: nn.Module, part: nn.Module, after: nn.Module | None, *rest: Any
) -> Tensor:
    """x + after(part(norm(x), *rest)); the part's own products norm and add where they can."""
    if type(part) in (Attention, GatedMLP) and merges(part, x):
        mixed: Tensor = part(x, *rest, norm=norm, residual=x if after is None else None)
        return mixed if after is None else x + after(mixed)
    mixed = part(norm(x), *rest)
    return x + (mixed if after is None else after(mixed))


class Attention(nn.Module):
    """Attention of grouped heads with rotated queries and keys."""

    def __init__(self, sizes: LayerSizes, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = sizes.head_dim
        self.heads = sizes.heads
        self.kv_heads = sizes.kv_heads
        parts = {
            "q_proj": sizes.heads * sizes.head_dim,
            "k_proj": sizes.kv_heads * sizes.head_dim,
            "v_proj": sizes.kv_heads * sizes.head_dim,
        }
        self.qkv = nn.Linear(sizes.width, sum(parts.values()), sizes.qkv_bias)
        store_apart(self, "qkv", parts)
        self.o_proj = nn.Linear(parts["q_proj"], sizes.width, sizes.output_bias)
        self.q_norm = head_norm(sizes, sizes.heads)
        self.k_norm = head_norm(sizes, sizes.kv_heads)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: Keys | None,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + attention(norm(x)), [R, S, H] -> [R, S, H]; for the other arguments see
        `DecoderLayer.forward`.
        """
        q, k, v = self.project(x, rotation, norm)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        reached = None if cache is None else cache.reached
        mixed = attend(q, k, v, mask, self.head_dim**-0.5, reached=reached)
        return product(self.o_proj, mixed.transpose(1, 2).flatten(2), residual=residual)

    def project(
        self, x: Tensor, rotation: Tensor, norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of tokens [R, S, H]: [R, heads, S, D] each."""
        heads = product(self.qkv, x, norm).unflatten(-1, (-1, self.head_dim))
        rotated, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.split([self.heads, self.kv_heads], 2)
            rotated = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        rotated = rotate(rotated, rotation).transpose(1, 2)
        q, k = rotated.split([self.heads, self.kv_heads], 1)
        return q, k, v.transpose(1, 2)


class GatedMLP(nn.Module):
    """SiLU(gate·x) ∘ up·x, projected down."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.inner, sizes.mlp_bias)
        store_apart(self, "gate_up", {"gate_proj": sizes.inner, "up_proj": sizes.inner})
        self.down_proj = nn.Linear(sizes.inner, sizes.width, sizes.mlp_bias)

    def forward(
        self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + MLP(norm(x)), [..., H] -> [..., H]."""
        inner = product(self.gate_up, x, norm, gated=True)
        return product(self.down_proj, inner, residual=residual)


class PerHeadLayerNorm(nn.Module):
    """A LayerNorm over each head, with weights and biases of its own for every head."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, size))
        self.bias = nn.Parameter(torch.zeros(heads, size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] -> [..., heads, D]."""
        normed = nn.functional.layer_norm(x, x.shape[-1:])
        return torch.addcmul(self.bias, normed, self.weight)


def head_norm(sizes: LayerSizes, heads: int) -> nn.Module | None:
    """The norm of `heads` heads of queries or keys, if they have one."""
    if sizes.head_norm == "layer":
        return PerHeadLayerNorm(heads, sizes.head_dim)
    return RMSNorm(sizes.head_dim, sizes.eps) if sizes.head_norm == "rms" else None


class Decoder(nn.Module):
    """Embedding, decoder layers and the norm after them.

    Args:
        sizes: of every layer.
        layers: number of layers.
        vocab_size: entries of the embedding.
        rotary: the positions' rotary embedding.
    """

    def __init__(self, sizes: LayerSizes, layers: int, vocab_size: int, rotary: Rotary) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, sizes.width)
        self.layers = nn.ModuleList(DecoderLayer(sizes, index) for index in range(layers))
        self.norm: nn.Module = RMSNorm(sizes.width, sizes.eps)
        self.rotary = rotary
        self.sizes = sizes
        start_small(self)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: Tensor,
        cache: Keys | None = None,
        features: tuple[int, ...] = (),
    ) -> Tensor:
        """Hidden states after the norm and, behind them, the inputs of the layers `features`: [R,
        S, H] -> [R, S, (1 + number of features)·H]. For the arguments see `DecoderLayer.forward`.
        """
        inputs: list[Tensor] = []
        for layer in self.layers:
            inputs.append(x)
            x = layer(x, mask, rotation, cache)
        normed: Tensor = self.norm(x)
        read = [inputs[layer] for layer in features]
        return torch.cat([normed, *read], -1) if read else normed


def start_small(module: nn.Module) -> None:
    """Start linear layers and embeddings as transformers does: weights N(0, 0.02²), biases 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def store_apart(module: nn.Module, merged: str, parts: Mapping[str, int]) -> None:
    """Let a merged linear layer of a module be read from and written to files as its parts.

    Args:
        module: has the layer.
        merged: the layer's name.
        parts: outputs of each part by its name in files, in the layer's order.
    """
    module.register_state_dict_post_hook(partial(_part, merged=merged, parts=parts))
    module.register_load_state_dict_pre_hook(partial(_merge, merged=merged, parts=parts))


def _part(
    module: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Any,
    *,
    merged: str,
    parts: Mapping[str, int],
) -> None:
    """Replace the merged tensors of a state dict by views of their parts."""
    for kind in ("weight", "bias"):
        whole = state.pop(f"{prefix}{merged}.{kind}", None)
        if whole is not None:
            pieces = whole.split(list(parts.values()))
            for name, piece in zip(parts, pieces, strict=True):
                state[f"{prefix}{name}.{kind}"] = piece


def _merge(
    module: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    *_: Any,
    merged: str,
    parts: Mapping[str, int],
) -> None:
    """Merge the parts of a state dict, in which they are whole or missing together."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.{kind}" for name in parts]
        if all(name in state for name in names):
            pieces = [state.pop(name) for name in names]
            state[f"{prefix}{merged}.{kind}"] = torch.cat(pieces)
