"""Where a family's parts are in transformers' models, and what such a model says of its images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tempera.errors import TemperaError
from tempera.evaluation.pipeline import ImageDecoder, NoPictures
from tempera.image_tokenizers.emu3 import Emu3Tokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.targets import chameleon, emu3, glm_image, janus
from tempera.targets.token_format import ModelSpec


@dataclass(frozen=True)
class Family:
    """A family of models. Modules are named by their paths inside the model.

    Attributes:
        name: of the module of `tempera.targets` with the sizes of its layers.
        preset: its preset in conf/model/.
        decoder: has `embed_tokens`, `layers`, `norm`, `rotary_emb` and `config`.
        head: what follows the decoder's norm, one after the other; the last gives logits.
        embedding: what embeds image tokens, one after the other.
        layouts: formats of images by the names of their presets; the arguments are a size.
        stated: what a model's configuration says of the format, by the fields of `ModelSpec`.
        pictures: makes a model's image decoder.
        width: numbers of a hidden state before the last module of the head.
        chat: whether a prompt is a turn of the processor's chat template.
        guidance: where the model's generation_config states none, as in the model's `generate`.
    """

    name: str
    preset: str
    decoder: str
    head: tuple[str, ...]
    embedding: tuple[str, ...]
    layouts: Mapping[str, Callable[..., ModelSpec]]
    stated: Callable[[Any], dict[str, object]]
    pictures: Callable[[Any], ImageDecoder] = field(default=lambda _: NoPictures(ADVICE))
    width: Callable[[Any], int] = field(default=lambda model: int(_text(model).hidden_size))
    chat: bool = False
    guidance: float = 1.0

    @property
    def called(self) -> list[str]:
        """The modules that are called, besides the layers."""
        parts = [f"{self.decoder}.{name}" for name in ("embed_tokens", "norm", "rotary_emb")]
        return list(dict.fromkeys([*parts, *self.embedding, *self.head]))


ADVICE = (
    "give accelerate a decoder=, for GLM-Image GlmDecoder(pipe, GlmDecoderConfig()) of "
    "tempera.image_tokenizers.glm_image, or call generate with images=False."
)


def _text(model: Any) -> Any:
    return model.config.get_text_config()


def _of_emu3(model: Any) -> dict[str, object]:
    mapping = model.model.vocabulary_mapping
    codes = len(mapping.image_tokens)
    ids = [mapping.img2bpe[code] for code in range(codes)]
    if ids != list(range(ids[0], ids[0] + codes)):
        raise TemperaError(
            "the ids of this model's image codes are not consecutive, which is not supported."
        )
    return {"codes": codes, "first_code": ids[0], "line_end": mapping.eol_token_id}


def _of_janus(model: Any) -> dict[str, object]:
    side = round(model.config.vision_config.num_image_tokens**0.5)
    return {"codes": model.config.vq_config.num_embeddings, "lines": side, "columns": side}


@dataclass(frozen=True)
class JanusDecoder:
    """A Janus's image decoder as an `ImageDecoder`."""

    model: Any

    def decode_codes(self, codes: Tensor) -> Tensor:
        """See `ImageDecoder`."""
        images: Tensor = self.model.decode_image_tokens(codes.flatten(1))
        return images.permute(0, 3, 1, 2)


FAMILIES = {
    "Emu3ForConditionalGeneration": Family(
        name="emu3",
        preset="emu3",
        decoder="model.text_model",
        head=("lm_head",),
        embedding=("model.text_model.embed_tokens",),
        layouts={"emu3": emu3.emu3},
        stated=_of_emu3,
        pictures=lambda model: LinedTokenizer(Emu3Tokenizer(model.model.vqmodel)),
    ),
    "JanusForConditionalGeneration": Family(
        name="janus",
        preset="janus_pro_7b",
        decoder="model.language_model",
        head=(
            "model.generation_head.proj_out",
            "model.generation_head.activation_fn",
            "model.generation_head.vision_head",
        ),
        embedding=("model.generation_embeddings", "model.generation_aligner"),
        layouts={"janus_pro_7b": lambda: janus.janus()},
        stated=_of_janus,
        pictures=JanusDecoder,
        width=lambda model: int(model.config.vq_config.projection_dim),
        guidance=5.0,
    ),
    "ChameleonForConditionalGeneration": Family(
        name="chameleon",
        preset="anole",
        decoder="model",
        head=("lm_head",),
        embedding=("model.embed_tokens",),
        layouts={
            "anole": chameleon.anole,
            "lumina": chameleon.lumina,
            "lumina2": chameleon.lumina2,
        },
        stated=lambda _: {},
    ),
    "GlmImageForConditionalGeneration": Family(
        name="glm_image",
        preset="glm_image",
        decoder="model.language_model",
        head=("lm_head",),
        embedding=("model.language_model.embed_tokens",),
        layouts={"glm_image": lambda height=1024, width=1024: glm_image.glm_image(height, width)},
        stated=lambda model: {"codes": model.config.vq_config.num_embeddings},
        chat=True,
    ),
}
