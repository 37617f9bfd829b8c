"""A faster forward pass of the EAGLE draft with fused operations."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime.huggingface import LlamaDecoderLayer
from tempera.targets.kv_cache import RowCache


class FastEagle:
    """An `EagleModel` for drafting: the same arithmetic with fewer and larger operations, if its
    layer is a Llama layer without biases.

    Launch overhead dominates a draft step. Joint projections, one rotation for queries and keys,
    and residuals added inside the matrix products make it twice as fast. It has its own copies of
    the weights, [in, out].

    Args:
        model: an `EagleModel`; later changes to its weights have no effect here.
        device, dtype: of the copies.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.model = (
            copy.deepcopy(model).to(device=device, dtype=dtype).eval().requires_grad_(False)
        )
        layer = self.model.layer
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        self.joined = type(layer) is LlamaDecoderLayer and all(
            linear.bias is None for linear in linears
        )
        self._fc, self._fc_bias = self.model.fc.weight.t().contiguous(), self.model.fc.bias
        if self.joined:
            self._join(layer)

    def rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions int64 [R, S] for `__call__`: [R, S, D]. In the fused pass, the
        first half of `sin` is negated.
        """
        cos, sin = self.model.rotary(like, position_ids)
        return (cos, sin * self._sign) if self.joined else (cos, sin)

    def __call__(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: RowCache,
    ) -> Tensor:
        """Like `EagleModel.forward`, with a cache: [R, S, H]."""
        if not self.joined:
            predicted: Tensor = self.model(embeds, hidden, mask, cache=cache, rotation=rotation)
            return predicted
        x = torch.addmm(self._fc_bias, torch.cat([embeds, hidden], -1).flatten(0, 1), self._fc)
        x = self._attend(x, mask, rotation, cache)
        gate, up = torch.mm(self._norm(x), self._gate_up).chunk(2, -1)
        return torch.addmm(x, self._activation(gate) * up, self._down).view(hidden.shape)

    def _attend(
        self, x: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor], cache: RowCache
    ) -> Tensor:
        """Attention and its residual: x [R·S, H] plus attention's output."""
        rows, _, steps, _ = mask.shape
        qkv = torch.mm(self._norm(x), self._qkv).view(rows, steps, -1, self._head_dim)
        qk, value = qkv.split(self._rotated, 2)
        qk = torch.addcmul(
            qk * rotation[0].unsqueeze(2),
            qk.roll(self._head_dim // 2, -1),
            rotation[1].unsqueeze(2),
        )
        query, key = qk.split(self._heads, 2)
        keys, values = cache.write(0, key.flatten(0, 1), value.flatten(0, 1))
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=self._grouped,
        )
        return torch.addmm(x, out.transpose(1, 2).reshape(len(x), -1), self._out)

    def _norm(self, x: Tensor) -> Tensor:
        """RMS norm without its weight, which is part of the next product:
        √H·x / √(Σx² + H·ε).
        """
        if self._floor is None:
            return nn.functional.rms_norm(x, x.shape[-1:], None, self._eps)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)

    def _join(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._eps, self._floor = layer.input_layernorm.variance_epsilon, None
        if (
            norms[0].dtype == torch.float32
        ):  # three operations instead of PyTorch's six; in half precision Σx² is too coarse
            size = float(len(norms[0]))
            self._floor = torch.tensor((size * self._eps) ** 0.5, device=norms[0].device)
            norms = norms[0] * size**0.5, norms[1] * size**0.5
        self._qkv = _joined(norms[0], attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _joined(norms[1], mlp.gate_proj, mlp.up_proj)
        self._out, self._down = (
            attention.o_proj.weight.t().contiguous(),
            mlp.down_proj.weight.t().contiguous(),
        )
        self._activation, self._scale, self._head_dim = (
            mlp.act_fn,
            attention.scaling,
            attention.head_dim,
        )
        heads, kv_heads = (
            linear.out_features // self._head_dim for linear in (attention.q_proj, attention.k_proj)
        )
        self._heads, self._rotated, self._grouped = (
            [heads, kv_heads],
            [heads + kv_heads, kv_heads],
            heads != kv_heads,
        )
        self._sign = torch.ones(self._head_dim, dtype=self._qkv.dtype, device=self._qkv.device)
        self._sign[: self._head_dim // 2] = -1


def _joined(norm: Tensor, *linears: nn.Linear) -> Tensor:
    """Joint weight of projections that share a normed input, with the norm's weight: [in, out]."""
    return (torch.cat([linear.weight for linear in linears]) * norm).t().contiguous()
