"""Janus-Pro (Chen et al. 2025): a Llama decoder whose image tokens have an embedding and a head of
their own. Weights are in the layout of Hugging Face's `JanusForConditionalGeneration`.

The image head is Linear → GELU → Linear. Guidance and drafts work on the input of its last layer.
These are the hidden states here, so the first two layers follow the decoder's final norm.

Begin of sentence is 100000, as in the Janus repository; prompt format and guidance are from its
`generation_inference.py`. Ports of the model number padding differently, so its id is the
tokenizer's.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from tempera.runtime import huggingface
from tempera.runtime.tensor_files import renamed
from tempera.targets.decoder_layer import LayerSizes
from tempera.targets.family import PromptedLM, WrappedFamily
from tempera.targets.token_format import ModelSpec, patches

PATCH = 16
CODE_DIM = 8
_BEGIN = 100000
_PAD = "<｜▁pad▁｜>"


def janus(image_size: int = 384, codes: int = 16384) -> ModelSpec:
    """Janus-Pro's format, without a system prompt. In the unconditional row, padding that is
    attended to replaces all tokens of the prompt but the first and the last.

    Args:
        image_size: height and width in pixels, a multiple of 16.
        codes: size of the image codebook.

    Raises:
        TemperaError: the size is not a multiple of 16.
    """
    side = patches(image_size, PATCH, "image_size")
    return ModelSpec(
        side,
        side,
        codes,
        first_code=0,
        prompt=(_BEGIN, "<|User|>: {text}\n\n<|Assistant|>:<begin_of_image>"),
        null=(),
        context=16384,
        null_filling=_PAD,
    )


class Janus(PromptedLM):
    """The part of Janus-Pro that generates images. For the arguments see `PromptedLM`."""

    def __init__(self, config: Any, sizes: LayerSizes, spec: ModelSpec) -> None:
        super().__init__(config, sizes, spec)
        width = sizes.width
        self.lm_head = nn.Linear(width, spec.codes)
        self.model.norm = nn.Sequential(self.model.norm, nn.Linear(width, width), nn.GELU())
        self.codes = nn.Embedding(spec.codes, CODE_DIM)
        self.aligner = nn.Sequential(nn.Linear(CODE_DIM, width), nn.GELU(), nn.Linear(width, width))

    @override
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed image codes, int64 [...] → [..., H]."""
        out: Tensor = self.aligner(self.codes(tokens))
        return out


_NAMES = {
    r"^model\.language_model\.norm\.": "model.norm.0.",
    r"^model\.language_model\.": "model.",
    r"^model\.generation_embeddings\.": "codes.",
    r"^model\.generation_aligner\.fc1\.": "aligner.0.",
    r"^model\.generation_aligner\.hidden_layers\.0\.": "aligner.2.",
    r"^model\.generation_head\.proj_out\.": "model.norm.1.",
    r"^model\.generation_head\.vision_head\.": "lm_head.",
}


@dataclass(frozen=True)
class JanusDecoder:
    """A Janus's image decoder as an `ImageDecoder`."""

    model: Any

    def decode_codes(self, codes: Tensor) -> Tensor:
        """See `ImageDecoder`."""
        images: Tensor = self.model.decode_image_tokens(codes.flatten(1))
        return images.permute(0, 3, 1, 2)


def _stated(model: Any) -> dict[str, object]:
    side = round(model.config.vision_config.num_image_tokens**0.5)
    return {"codes": model.config.vq_config.num_embeddings, "lines": side, "columns": side}


JANUS = WrappedFamily(
    name="janus",
    config=lambda **sizes: huggingface.LlamaConfig(**sizes, pad_token_id=None),
    network=Janus,
    translate=lambda state, _: renamed(state, _NAMES),
    unused=("model.vision_model.", "model.aligner.", "model.vqmodel.", "lm_head."),
    model_class="JanusForConditionalGeneration",
    preset="janus_pro_7b",
    decoder="model.language_model",
    decoders=("LlamaModel", "MistralModel", "GemmaModel", "Olmo2Model"),
    head=(
        "model.generation_head.proj_out",
        "model.generation_head.activation_fn",
        "model.generation_head.vision_head",
    ),
    embedding=("model.generation_embeddings", "model.generation_aligner"),
    layouts={"janus_pro_7b": lambda: janus()},
    stated=_stated,
    pictures=JanusDecoder,
    width=lambda model: int(model.config.vq_config.projection_dim),
    guidance=5.0,
)
