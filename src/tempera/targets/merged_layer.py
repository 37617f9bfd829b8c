"""Decoder layers of the Llama family with merged projections, for decoding.

In a pass over few tokens, launching operations costs as much as their arithmetic, and a large
product reads its weights faster than small ones. So one projection gives queries, keys and values,
and another gate and up. Norms, residuals and rotation remain Hugging Face's.

Shapes: R rows, S tokens of a pass, K visible keys, H hidden size, D head size.
"""

from typing import Any

from torch import Tensor, nn

from tempera.runtime import huggingface
from tempera.targets.packed_linear import joined


def merge(layer: Any) -> bool:
    """Merge the projections of a decoder layer of Hugging Face's Llama, Emu3 or Chameleon in place;
    return whether they are merged. A layer of another class stays as it is.
    """
    # Llama is checked first, since the other classes are only imported when accessed
    if not isinstance(layer, huggingface.LlamaDecoderLayer):  # noqa: SIM102
        if not isinstance(layer, huggingface.Emu3DecoderLayer | huggingface.ChameleonDecoderLayer):
            return False
    if not isinstance(layer.self_attn, MergedAttention):
        layer.self_attn, layer.mlp = MergedAttention(layer.self_attn), MergedMLP(layer.mlp)
    return True


class MergedMLP(nn.Module):
    """down(act(gate(x))·up(x)) with one projection for gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self._gate_up, self._down = joined(mlp.gate_proj, mlp.up_proj), joined(mlp.down_proj)
        self._activation = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """[R, S, H] -> [R, S, H]."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(self._activation(gate) * up)  # type: ignore[no-any-return]


class MergedAttention(nn.Module):
    """Self-attention with one projection for queries, keys and values; Chameleon norms the first
    two.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._widths = [linear.out_features for linear in projections]
        self._qkv, self._out = joined(*projections), joined(attention.o_proj)
        self._q_norm = getattr(attention, "q_norm", nn.Identity())
        self._k_norm = getattr(attention, "k_norm", nn.Identity())
        self.head_dim, self._scale = attention.head_dim, attention.scaling
        self._index = attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As Hugging Face's attention with a cache: [R, S, H] -> [R, S, H] and no weights."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self._qkv(hidden_states).split(self._widths, -1)
        )
        query, key = huggingface.apply_rotary_pos_emb(
            self._q_norm(query).transpose(1, 2),
            self._k_norm(key).transpose(1, 2),
            *position_embeddings,
        )
        keys, values = past_key_values.update(key, value.transpose(1, 2), self._index)
        mixed = attend(query, keys, values, attention_mask, self._scale)
        return self._out(mixed.transpose(1, 2).flatten(2)), None


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale·q·kᵀ + mask)·v by PyTorch's fused attention.

    On CUDA its fast kernels with a mask support neither grouped keys nor head sizes that are no
    multiple of 8. So the queries of a group follow each other as if they were further tokens, and
    queries are padded to the head size of the cache (`cache.head_size`).

    Args:
        query: [R, heads, S, D].
        keys, values: [R, key-value heads, K, D or more].
        mask: additive, [R, 1, S, K].

    Returns:
        [R, heads, S, D].
    """
    groups, padding = query.shape[1] // keys.shape[1], keys.shape[-1] - query.shape[-1]
    tokens = query
    if groups > 1:
        tokens = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mask = mask.repeat(1, 1, groups, 1)
    if padding:
        tokens = nn.functional.pad(tokens, (0, padding))
    mixed = nn.functional.scaled_dot_product_attention(
        tokens, keys, values, attn_mask=mask, scale=scale
    )
    return mixed[..., : query.shape[-1]].reshape(query.shape)
