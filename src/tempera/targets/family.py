"""Families of models that read prompts as tokens (Chameleon, Emu3, Janus-Pro, SimpleAR, GLM-Image):
their networks, and where the parts of such a network are in a model of transformers.

Shapes: R rows (B, or 2B under guidance), T condition tokens, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pydantic import ImportString
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.targets.decoder_layer import Decoder, LayerSizes
from tempera.targets.prompt_encoder import PADDING
from tempera.targets.rotary import Rotary
from tempera.targets.token_format import ModelSpec


class PromptedLM(nn.Module):
    """A decoder with its head, which gives the logits of all ids, and the format of its sequences.
    Implements `network.TargetNetwork`.

    Args:
        config: a Hugging Face configuration.
        sizes: of the decoder's layers.
        spec: format of its sequences.
    """

    def __init__(self, config: Any, sizes: LayerSizes, spec: ModelSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        rotary = Rotary(sizes.head_dim, config.rope_parameters["rope_theta"])
        self.model = Decoder(sizes, config.num_hidden_layers, config.vocab_size, rotary)
        self.lm_head = nn.Linear(sizes.width, config.vocab_size, bias=False)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed ids of the network's vocabulary, int64 [...] → [..., H]."""
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def embed_prefix(self, condition: Tensor, mask: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the prompt or the null prompt of each row.

        Args:
            condition: ids of the prompt and of the null prompt, int64 [R, 2, T].
            mask: not read: the null prompt has its own padding.
            drop: null-conditioned rows, bool [R].

        Returns:
            [R, T, H], and which tokens are not padding, bool [R, T].
        """
        ids = torch.where(drop[:, None], condition[:, 1], condition[:, 0])
        return self.model.embed_tokens(ids.clamp(min=0)), ids != PADDING


Weights = Mapping[str, Tensor]
"""Tensors by their names."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the networks of a family have of their own.

    Attributes:
        name: what `model_type` in their files starts with.
        config: makes the Hugging Face configuration of the decoder of its sizes, by their names in
            `config.json`.
        layer: options of `LayerSizes` that the configuration does not tell.
        network: the class of the network.
        translate: published weights, and the sizes, to weights by the network's names.
        unused: how names in the files begin that the network does not have.
    """

    name: str
    config: Callable[..., Any]
    layer: Mapping[str, Any] = field(default_factory=dict)
    network: type[PromptedLM] = PromptedLM
    translate: Callable[[Weights, Mapping[str, Any]], Weights] = lambda state, _: state
    unused: tuple[str, ...] = ()

    def layer_sizes(self, config: Any) -> LayerSizes:
        """Sizes of the layers of a decoder with this Hugging Face configuration."""
        return LayerSizes.of(config, **self.layer)

    def build(self, sizes: Mapping[str, Any], spec: ModelSpec) -> PromptedLM:
        """The network of these sizes; see `load_network`."""
        config = self.config(**sizes)
        return self.network(config, self.layer_sizes(config), spec)


class Read(NamedTuple):
    """Prompts with pictures, as the decoder reads them.

    Attributes:
        ids: codes of the pictures among them, int64 [B, T].
        positions: see `prompt_state.Prefix`, [B, 3, T]; None if each is its slot.
    """

    ids: Tensor
    positions: Tensor | None = None


class Asked(NamedTuple):
    """Prompts with pictures, as a processor makes them; B of them, T ids of a prompt.

    Attributes:
        model: the model.
        spec: format of its images.
        ids: with a placeholder for every code of a picture, int64 [B, T].
        mask: 0 where a prompt is padded, [B, T].
        given: see `WrappedFamily`; without pixel_values there are no pictures.
    """

    model: Any
    spec: ModelSpec
    ids: Tensor
    mask: Tensor
    given: Mapping[str, Tensor]


def filled(ids: Tensor, placeholder: int, codes: Tensor) -> Tensor:
    """Ids of prompts, int64 [B, T], with codes, int64 [N], in place of the placeholders.

    Raises:
        TemperaError: there are not N.
    """
    placeholders = ids == placeholder
    if int(placeholders.sum()) != len(codes):
        raise TemperaError(
            f"the prompts have {int(placeholders.sum())} picture tokens, but the pictures have "
            f"{len(codes)} codes: process pictures and texts together with the model's processor."
        )
    return ids.masked_scatter(placeholders, codes.to(ids))


def width_of_text(model: Any) -> int:
    """Numbers of a hidden state of a model of transformers."""
    return int(model.config.get_text_config().hidden_size)


@dataclass(frozen=True, kw_only=True)
class WrappedFamily(Family):
    """A family whose models a user may hold as transformers makes them: where their parts are, and
    what such a model says of its images. Modules are named by their paths inside the model.

    Attributes:
        model_class: the name of the models' class.
        preset: its preset in conf/model/.
        decoder: has `embed_tokens`, `layers`, `norm`, `rotary_emb` and `config`.
        decoders: the classes of it whose equations are those of `wrapped.network.WrappedDecoder`:
            nothing but a causal mask, the layers one after the other, and the norm.
        head: what follows the decoder's norm, one after the other; the last gives logits.
        embedding: what embeds image tokens, one after the other.
        layouts: formats of images by the names of their presets; the arguments are a size.
        stated: what a model's configuration says of the format, by the fields of `ModelSpec`.
        pictures: makes a model's image decoder, an `evaluation.pipeline.ImageDecoder`; None if
            transformers has none.
        width: numbers of a hidden state before the last module of the head.
        chat: whether a prompt is a turn of the processor's chat template.
        guidance: where the model's generation_config states none, as in the model's `generate`.
        given: what the processor makes of pictures in prompts beside their ids, by its names; none
            if the model's `generate` draws images from text alone.
        read: puts these pictures into prompts.
    """

    model_class: str
    preset: str
    decoder: str
    decoders: tuple[str, ...]
    head: tuple[str, ...] = ("lm_head",)
    embedding: tuple[str, ...]
    layouts: Mapping[str, Callable[..., ModelSpec]]
    stated: Callable[[Any], dict[str, object]] = lambda _: {}
    pictures: Callable[[Any], Any] | None = None
    width: Callable[[Any], int] = width_of_text
    chat: bool = False
    guidance: float = 1.0
    given: tuple[str, ...] = ()
    read: Callable[["Asked"], Read] = lambda asked: Read(asked.ids)

    @property
    def processor(self) -> str:
        """The class of the models' processors, as transformers names it."""
        return self.model_class.replace("ForConditionalGeneration", "Processor")

    @property
    def called(self) -> list[str]:
        """The modules that are called, besides the layers."""
        parts = [f"{self.decoder}.{name}" for name in ("embed_tokens", "norm", "rotary_emb")]
        return list(dict.fromkeys([*parts, *self.embedding, *self.head]))


def load_network(
    family: ImportString[Any],
    spec: ModelSpec,
    weights: str,
    files: list[str],
    hub: str,
    sizes: Mapping[str, Any],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> PromptedLM:
    """Load a network with published weights.

    Args:
        family: its `Family`; in a YAML file the full name of one, as `tempera.targets.emu3.EMU3`.
        spec: format of its sequences.
        weights, files, hub: see `tempera.runtime.pretrained.PretrainedFiles`.
        sizes: by their names in `config.json`, `rope_theta` among them; those of a `config.json`
            beside the weights come first.
        device, dtype: device and dtype of random weights; published weights keep those of their
            files.

    Raises:
        TemperaError: the files are missing, do not fit, or are of an unsupported variant.
    """
    if not isinstance(family, Family):
        raise TemperaError(
            f"{family!r} is not a Family: give one such as tempera.targets.emu3.EMU3.",
            option="family",
        )
    published = PretrainedFiles(weights, files, hub)
    stated = stated_sizes(published, family.name, sizes)
    network: PromptedLM = load_pretrained(
        lambda: family.build(stated, spec),
        published,
        lambda state: family.translate(state, stated),
        device,
        dtype,
        ignore=family.unused,
    )
    return network


ROPE = ("partial_rotary_factor", "mrope_section")
"""Sizes of rotary embeddings that only some models have."""


def stated_sizes(files: PretrainedFiles, kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a Hugging Face configuration: the sizes that `config.json` beside the weights
    states, else those given.

    Args:
        files, kind: see `PretrainedFiles.stated`.
        sizes: by their names in `config.json`, `rope_theta` among them.

    Raises:
        TemperaError: the file states an unsupported network.
    """
    stated = files.stated({"num_key_value_heads": sizes["num_attention_heads"], **sizes}, kind)
    rope = {"rope_type": "default", "rope_theta": stated.pop("rope_theta")}
    rope |= {name: stated.pop(name) for name in ROPE if name in stated}
    return {**stated, "rope_parameters": rope}
