"""Emu3 (Wang et al. 2024): a Llama-like decoder over text and image tokens.

Ids are from the Emu3 repository (BAAI). Special tokens start at 151643 (`<|endoftext|>`):
`<|extra_200|>` (end of line) 151846, start of text 151849, `<|image token|>` 151851 and
`<|image start|>` 151852. The codes are 151854 … 184621.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tempera.runtime import huggingface
from tempera.targets.decoder_layer import LayerSizes
from tempera.targets.shared_vocabulary import PromptedLM, shared_vocabulary_lm
from tempera.targets.token_format import ModelSpec, patches

PATCH = 8
_BEGIN, _IMAGE, _START = 151849, 151851, 151852
POSITIVE = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal "
    "quality, jpeg artifacts, signature, watermark, username, blurry."
)


def emu3(
    height: int = 720, width: int = 720, positive: str = POSITIVE, negative: str = NEGATIVE
) -> ModelSpec:
    """Emu3-Gen's format: the prompt and a quality suffix, then the size in codes as text. The
    unconditional row has a negative prompt.

    Args:
        height, width: pixels, multiples of 8.
        positive: suffix of every prompt.
        negative: prompt of the unconditional row.

    Raises:
        TemperaError: a side is not a multiple of 8.
    """
    lines, columns = patches(height, PATCH, "height"), patches(width, PATCH, "width")
    head = (_START, f"{lines}*{columns}", _IMAGE)
    return ModelSpec(
        lines=lines,
        columns=columns,
        codes=32768,
        first_code=151854,
        prompt=(_BEGIN, "{text}" + positive, *head),
        null=(_BEGIN, negative, *head),
        context=9216,
        line_end=151846,
    )


UNUSED = ()


def build(sizes: dict[str, Any], spec: ModelSpec) -> PromptedLM:
    """The network of these sizes; see `shared_vocabulary.load_network`."""
    config = huggingface.Emu3TextConfig(**sizes, attention_dropout=0.0)
    return shared_vocabulary_lm(config, LayerSizes.of(config), spec, "emu3")


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Published names are those of the network."""
    return state


def layer_sizes(config: Mapping[str, Any]) -> LayerSizes:
    """Sizes of a decoder layer for the fields of an `Emu3TextConfig`."""
    return LayerSizes.of(huggingface.Emu3TextConfig(**config))
