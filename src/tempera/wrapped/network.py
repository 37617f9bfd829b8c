"""A transformers model as `TransformerTarget` runs it. The model's own modules are called, and they
are looked up at every call: nothing is copied, nothing of the model is changed, and what sits on
them or replaces them works.

Shapes: R rows, S tokens of a pass, H width, D turned numbers of a head, V image tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.probabilities import Sampling
from tempera.targets.cache import KVCache
from tempera.targets.family import WrappedFamily
from tempera.targets.prompt_encoder import PADDING
from tempera.targets.rotary import Rotary, multimodal_positions
from tempera.targets.token_format import ModelSpec
from tempera.targets.token_head import FORBIDDEN, TokenHead


class WrappedRotary(Rotary):
    """The decoder's own rotary embedding.

    Args:
        decoder: has it as `rotary_emb`.
        spec: format of the sequences.
        head_dim: numbers of a head.
    """

    def __init__(self, decoder: Any, spec: ModelSpec, head_dim: int) -> None:
        self.decoder = decoder
        self.spec = spec
        self.head_dim = self.turned = head_dim

    @override
    def table(self, count: int, prefix: int, device: torch.device) -> Tensor:
        """See `Rotary.table`."""
        positions = torch.arange(count, device=device)[None]
        rotary = self.decoder.rotary_emb
        if getattr(rotary, "mrope_section", None) is not None:  # its configuration may not tell
            return self.tables(count, positions[:, :prefix].expand(1, 3, -1))[0]
        return self._turns(positions)[0]

    def tables(self, count: int, positions: Tensor) -> Tensor:
        """The tables of rows whose condition tokens have these three positions, int64 [R, 3, T] ->
        [R, 2, count, D].
        """
        return self._turns(multimodal_positions(count, positions, self.spec.grids).transpose(0, 1))

    def _turns(self, positions: Tensor) -> Tensor:
        """What the model's rotary embedding gives, as tables: [R, 2, S, D]."""
        like = torch.empty(0, device=positions.device)
        cos, sin = self.decoder.rotary_emb(like, position_ids=positions)
        return torch.stack([self._whole(cos, 1.0), self._whole(_signs(sin), 0.0)], 1)

    def _whole(self, turned: Tensor, rest: float) -> Tensor:
        """The numbers of a head of which some turn, which are those at the start of each half:
        [R, S, numbers that turn] -> [R, S, numbers of a head].
        """
        pad = (self.head_dim - turned.shape[-1]) // 2
        halves = [nn.functional.pad(half, (0, pad), value=rest) for half in turned.chunk(2, -1)]
        self.turned = turned.shape[-1]
        return torch.cat(halves, -1)

    def of_the_layers(self, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines as the model's layers take them, of entries of the table."""
        halves = [half[..., : self.turned // 2] for half in rotation.chunk(2, -1)]
        cos, sin = torch.cat(halves, -1).unbind()
        return cos, _signs(sin)


def _signs(sin: Tensor) -> Tensor:
    """The first half of the last dimension with the other sign, as `rotary.rotate` wants it, and
    back.
    """
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


class WrappedDecoder:
    """Embedding, layers and norm of a transformers decoder, called as `decoder_layer.Decoder`, and
    what follows the norm.

    Args:
        model: the model.
        family: where its parts are.
        spec: format of its sequences.
    """

    def __init__(self, model: Any, family: WrappedFamily, spec: ModelSpec) -> None:
        self._model = model
        self._decoder = family.decoder
        self._after_norm = family.head[:-1]
        self.sizes = family.layer_sizes(self.text.config)
        self.rotary = WrappedRotary(self.text, spec, self.sizes.head_dim)

    @property
    def text(self) -> Any:
        """The decoder."""
        return self._model.get_submodule(self._decoder)

    @property
    def layers(self) -> Any:
        """Its layers."""
        return self.text.layers

    @property
    def norm(self) -> Any:
        """The norm after them."""
        return self.text.norm

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embed ids of texts, int64 [...] -> [..., H]."""
        out: Tensor = self.text.embed_tokens(ids)
        return out

    def __call__(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: Tensor,
        cache: KVCache | None = None,
        features: tuple[int, ...] = (),
    ) -> Tensor:
        """See `decoder_layer.Decoder.forward`."""
        turns = self.rotary.of_the_layers(rotation)
        inputs: list[Tensor] = []
        for layer in self.layers:
            inputs.append(x)
            out = layer(
                x,
                attention_mask=mask,
                position_embeddings=turns,
                past_key_values=cache,
                use_cache=cache is not None,
            )
            x = out if isinstance(out, Tensor) else out[0]
        inputs.append(x)
        normed: Tensor = called(self._model, self._after_norm, self.norm(x))
        read = [inputs[layer] for layer in features]
        return torch.cat([normed, *read], -1) if read else normed


def called(model: nn.Module, paths: tuple[str, ...], x: Tensor) -> Tensor:
    """What a model's modules give, one after the other."""
    for path in paths:
        x = model.get_submodule(path)(x)
    return x


class WrappedNetwork:
    """A transformers model as a `network.TargetNetwork`. It is not a module of its own, so it holds
    no module of the model either.

    Args:
        model: the model.
        family: where its parts are.
        spec: format of its sequences.
    """

    def __init__(self, model: Any, family: WrappedFamily, spec: ModelSpec) -> None:
        self._model = model
        self._parts = family
        self.spec: ModelSpec | None = spec
        self.model = WrappedDecoder(model, family, spec)
        self.config = self.model.text.config
        self.width = family.width(model)

    @property
    def lm_head(self) -> Any:
        """The model's head."""
        return self._model.get_submodule(self._parts.head[-1])

    def eval(self) -> "WrappedNetwork":
        """The model is in evaluation mode, or it is refused."""
        return self

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """See `network.TargetNetwork.embed_tokens`. No module is called for no tokens: those of
        quantised models look for the largest input.
        """
        if not tokens.numel():
            norm: Tensor = next(self.model.norm.parameters())
            return norm.new_empty(*tokens.shape, self.model.sizes.width)
        return called(self._model, self._parts.embedding, tokens)

    def embed_prefix(self, condition: Tensor, mask: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        """See `family.PromptedLM.embed_prefix`."""
        ids = torch.where(drop[:, None], condition[:, 1], condition[:, 0])
        return self.model.embed_tokens(ids.clamp(min=0)), ids != PADDING


class WrappedHead(TokenHead):
    """The model's own head. It is called whole, and the logits of image codes are kept. Guidance is
    applied to logits, as in transformers: what is called need not be linear.

    Args:
        network: the network.
        spec: its format.
        sampling: see `TokenHead`.
    """

    def __init__(self, network: WrappedNetwork, spec: ModelSpec, sampling: Sampling) -> None:
        norm: Tensor = next(network.model.norm.parameters())
        device = norm.device
        self._dtype = norm.dtype
        self._held = network
        self._embed = network.embed_tokens
        self._ids = spec.token_ids.to(device)
        self._codes = slice(spec.first_code, spec.first_code + spec.codes)
        self._line_ends = len(self._ids) - spec.codes
        self.forced = None if spec.forced is None else spec.forced.to(device)
        self.hidden_size = network.width
        self.vocab_size = len(self._ids)
        self.length = spec.length
        self.sampling = sampling

    @property
    def linear(self) -> Any:  # type: ignore[override]
        """The head as the model has it now."""
        return self._held.lm_head

    @override
    def lm_logits(self, hidden: Tensor) -> Tensor:
        """See `TokenHead.lm_logits`."""
        return nn.functional.pad(self._of_codes(hidden), (0, self._line_ends), value=FORBIDDEN)

    @override
    def guided_logits(self, hidden: Tensor) -> Tensor:
        """See `TokenHead.guided_logits`."""
        guided = self.sampling.guide(self._of_codes(hidden))
        return nn.functional.pad(guided, (0, self._line_ends), value=-torch.inf)

    def _of_codes(self, hidden: Tensor) -> Tensor:
        """The logits of the codes alone."""
        own = hidden[..., : self.hidden_size].to(self._dtype)
        logits: Tensor = self.linear(own)[..., self._codes]
        return logits

    @override
    def copy_to(self, dtype: torch.dtype) -> None:
        """Nothing is copied: hidden states of a draft are converted to the model's dtype."""

    @override
    def directions(self, vectors: Tensor) -> Tensor:
        """See `TokenHead.directions`: without what the head gives for zeros."""
        return self.lm_logits(vectors) - self.lm_logits(torch.zeros_like(vectors))
