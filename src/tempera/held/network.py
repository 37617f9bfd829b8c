"""The decoder of a transformers model, as `TransformerTarget` runs it. It shares the model's own
modules: nothing is copied, and nothing of the model is changed.

Shapes: R rows, S tokens of a pass, H width, D turned numbers of a head.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.targets.cache import KVCache
from tempera.targets.decoder_layer import Decoder
from tempera.targets.rotary import MultimodalRotary, Rotary
from tempera.targets.shared_vocabulary import PromptedLM
from tempera.targets.token_format import ModelSpec


class HeldLayer(nn.Module):
    """A decoder layer of transformers, called like `decoder_layer.DecoderLayer`.

    Args:
        layer: the layer.
        config: its configuration.
    """

    def __init__(self, layer: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer = layer
        attention: Any = layer.self_attn
        self.self_attn = SimpleNamespace(
            head_dim=attention.head_dim, kv_heads=config.num_key_value_heads
        )

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """See `decoder_layer.DecoderLayer.forward`; here the sines of `rotation` have no signs."""
        cos, sin = rotation.unbind()
        out = self.layer(
            x,
            attention_mask=mask,
            position_embeddings=(cos, sin),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = out if isinstance(out, Tensor) else out[0]
        return hidden


class HeldDecoder(Decoder):
    """Embedding, layers and norm of a transformers decoder.

    Args:
        text: the decoder: `embed_tokens`, `layers`, `norm` and `config`.
        norm: what follows the layers.
        rotary: its rotary embedding, over the turned numbers of a head.
    """

    def __init__(self, text: Any, norm: nn.Module, rotary: Rotary) -> None:
        nn.Module.__init__(self)  # Decoder's own makes new weights
        self.embed_tokens = text.embed_tokens
        self.layers = nn.ModuleList(HeldLayer(layer, text.config) for layer in text.layers)
        self.norm = norm
        self.rotary = rotary

    @override
    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: Tensor,
        cache: KVCache | None = None,
        features: tuple[int, ...] = (),
    ) -> Tensor:
        """See `decoder_layer.Decoder.forward`."""
        cos, signed = rotation.unbind()
        half = signed.shape[-1] // 2
        sin = torch.cat([-signed[..., :half], signed[..., half:]], -1)
        return super().forward(x, mask, torch.stack([cos, sin]), cache, features)


class HeldNetwork(PromptedLM):
    """A transformers model as a `network.TargetNetwork`.

    Args:
        text: its decoder.
        head: from hidden states to logits.
        spec: format of its sequences.
        family: see `network.TargetNetwork`.
        norm: what follows the layers; by default the decoder's norm.
        embed: the embedding of image tokens; by default the decoder's.
    """

    def __init__(
        self,
        text: Any,
        head: nn.Module,
        spec: ModelSpec,
        family: str,
        norm: nn.Module | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        decoder = HeldDecoder(text, norm or text.norm, rotary_of(text.config, spec))
        super().__init__(text.config, decoder, head, spec, family)
        self._embed = embed or text.embed_tokens

    @override
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """See `network.TargetNetwork.embed_tokens`."""
        return self._embed(tokens)


def rotary_of(config: Any, spec: ModelSpec) -> Rotary:
    """The rotary embedding of a decoder's configuration. Layers of transformers get the turned
    numbers of a head alone, and pair them among themselves.
    """
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if "mrope_section" not in rope:
        return Rotary(turned, rope["rope_theta"])
    grids = [spec.grid] if spec.preview is None else [spec.preview, spec.grid]
    return MultimodalRotary(turned, rope["rope_theta"], rope["mrope_section"], grids)
