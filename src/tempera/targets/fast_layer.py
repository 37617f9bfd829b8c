"""A decoder layer of the Llama family with fused operations, for decoding.

In a pass over few tokens, launching operations costs as much as their arithmetic. So one projection
gives queries, keys and values, and another gate and up; in float32 the norms' weights are folded
into these projections; one rotation serves queries and keys; and residuals are added inside the
matrix products. Up to rounding, the result is that of the layer that it replaces.

Shapes: R rows, S tokens of a pass, K visible keys, H hidden size, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime.processor import computes_bfloat16
from tempera.targets.frozen_linear import FrozenLinear, freeze, is_half
from tempera.targets.kv_cache import RowLayer


class FastLayer(nn.Module):
    """Replaces a decoder layer of Hugging Face's Llama, Emu3 or Chameleon.

    Args:
        layer: a layer for which `fits` is true; its weights are copied.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        heads, kv_heads = (
            linear.out_features // attention.head_dim
            for linear in (attention.q_proj, attention.k_proj)
        )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, attention.head_dim
        self._scale, self._activation = attention.scaling, mlp.act_fn
        self._first_norm, self._qkv = _normed(
            layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj
        )
        self._second_norm, self._gate_up = _normed(
            layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj
        )
        self._out = freeze(attention.o_proj.weight)
        self._down = freeze(mlp.down_proj.weight)
        self._head_norm = _HeadNorm(attention) if _has_head_norms(layer) else nn.Identity()
        weight = mlp.down_proj.weight
        multiplies = weight.dtype == torch.bfloat16 and computes_bfloat16(weight.device)
        self._attend = attend_by_products if multiplies and weight.is_cpu else attend

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether the layer's class is known and its linear layers have no biases."""
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        return _is_known(layer) and all(linear.bias is None for linear in linears)

    def forward(
        self, hidden: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor], entries: RowLayer
    ) -> Tensor:
        """Apply the layer to the tokens of a pass.

        Args:
            hidden: [R, S, H].
            mask: additive, [R, 1, S, K].
            rotation: cos and sin from `turned`.
            entries: this layer's part of the cache, with the pass's places already set.

        Returns:
            [R, S, H].
        """
        x = hidden.flatten(0, 1)
        qkv = self._qkv(self._first_norm(x)).view(*hidden.shape[:2], -1, self.head_dim)
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 2)
        qk = self._head_norm(qk)
        cos, sin = rotation
        first, second = qk.chunk(2, -1)
        qk = torch.addcmul(qk * cos, torch.cat([second, first], -1), sin)
        query, key = qk.split([self.heads, self.kv_heads], 2)
        keys, values = entries.write(key.flatten(0, 1), value.flatten(0, 1))
        attended = self._attend(query.transpose(1, 2), keys, values, mask, self._scale)
        x = self._out.added_to(x, attended.transpose(1, 2).reshape(len(x), -1))
        gate, up = self._gate_up(self._second_norm(x)).chunk(2, -1)
        return self._down.added_to(x, self._activation(gate) * up).view(hidden.shape)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v by PyTorch's fused attention.

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D].
        mask: additive, [R, 1, S, K].

    Returns:
        [R, heads, S, D].
    """
    grouped = query.shape[1] != keys.shape[1]
    return nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def attend_by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """`attend` by two matrix products, with scores rounded to the tensors' dtype. On CPUs that
    multiply bfloat16 numbers it takes less time, for a single token a quarter of the time.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1))
    # oneDNN takes half as long for k·qᵀ as for q·kᵀ, because there are more keys than queries
    by_key = keys @ grouped.flatten(2, 3).transpose(-1, -2)
    scores = by_key.transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format)
    masked = torch.add(mask.unsqueeze(2), scores.view(*grouped.shape[:-1], -1), alpha=scale)
    weights = masked.softmax(-1).to(values.dtype)
    mixed: Tensor = weights.flatten(2, 3) @ values
    return mixed.view(query.shape)


def turned(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary embedding's cos and sin, [R, S, D], in the form that `FastLayer` takes, [R, S, 1,
    D]. The first half of `sin` changes sign, so that x·cos + roll(x)·sin rotates half-split pairs.
    """
    half = sin.shape[-1] // 2
    sign = torch.cat([sin.new_full((half,), -1.0), sin.new_ones(half)])
    return cos.unsqueeze(2), (sin * sign).unsqueeze(2)


class FastNorm(nn.Module):
    """A root-mean-square norm, x·w / √(mean x² + ε).

    In float32 it computes x / √(Σx² + H·ε), which takes three operations instead of PyTorch's six,
    and the missing factor w·√H is folded into the projection that follows. It is multiplied by if
    the projection would then not fit in float16 any more, or if there is none. Half precision is
    too coarse for Σx², so PyTorch's norm is used there.

    Args:
        norm: the norm that it replaces, of size H.
        projection: the weight that reads its result, [O, H]; None if others read it, too.
    """

    _weight: Tensor
    _floor: Tensor

    def __init__(self, norm: Any, projection: Tensor | None = None) -> None:
        super().__init__()
        weight, self._eps = norm.weight.detach(), float(norm.variance_epsilon)
        self._coarse = weight.dtype != torch.float32
        self.folds = projection is not None and not self._coarse and not is_half(projection)
        factor = weight if self._coarse else weight * len(weight) ** 0.5
        self.register_buffer("_weight", factor, persistent=False)
        floor = weight.new_tensor((len(weight) * self._eps) ** 0.5)
        self.register_buffer("_floor", floor, persistent=False)

    @staticmethod
    def fits(norm: Any) -> bool:
        """Whether it is such a norm of Hugging Face's."""
        return hasattr(norm, "variance_epsilon")

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], without the factor that `fold` adds."""
        if self._coarse:
            return nn.functional.rms_norm(x, x.shape[-1:], self._weight, self._eps)
        scale = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return x / scale if self.folds else x / scale * self._weight

    def fold(self, projection: Tensor) -> Tensor:
        """The projection [O, H], adapted to take this norm's result."""
        return projection * self._weight if self.folds else projection


class _HeadNorm(nn.Module):
    """Chameleon's layer norms of queries and keys, which have weights per head, in one module."""

    _weight: Tensor
    _bias: Tensor

    def __init__(self, attention: Any) -> None:
        super().__init__()
        query, key = attention.q_norm, attention.k_norm
        weight, bias = torch.cat([query.weight, key.weight]), torch.cat([query.bias, key.bias])
        self.register_buffer("_weight", weight.detach(), persistent=False)
        self.register_buffer("_bias", bias.detach(), persistent=False)

    def forward(self, qk: Tensor) -> Tensor:
        """[..., heads, D] -> the same."""
        normed = nn.functional.layer_norm(qk, qk.shape[-1:], eps=1e-5)
        return torch.addcmul(self._bias, normed, self._weight)


def _is_known(layer: Any) -> bool:
    """Whether the layer's class is known. Llama is checked first, since the other classes are only
    imported when accessed.
    """
    from tempera.runtime import huggingface  # takes seconds, and most mistakes are found without it

    return isinstance(layer, huggingface.LlamaDecoderLayer) or isinstance(  # noqa: SIM101
        layer, huggingface.Emu3DecoderLayer | huggingface.ChameleonDecoderLayer
    )


def _has_head_norms(layer: Any) -> bool:
    from tempera.runtime import huggingface

    return not isinstance(layer, huggingface.LlamaDecoderLayer) and isinstance(
        layer, huggingface.ChameleonDecoderLayer
    )


def _normed(norm: Any, *linears: nn.Linear) -> tuple["FastNorm", FrozenLinear]:
    """A norm, and several projections of its result in one layer."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    fast = FastNorm(norm, weight)
    return fast, freeze(fast.fold(weight))
