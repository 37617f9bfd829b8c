"""GLM-Image (Z.ai 2026): a GLM-4 decoder that draws the codes of a small preview, then those of the
image. diffusers' pipeline makes the picture of them (`image_tokenizers.glm_image`).

Weights are in the layout of Hugging Face's `GlmImageForConditionalGeneration`. Ids 0 … 16383 are
the codes themselves, 16384 starts an image; text ids follow. Sizes, positions and prompts are from
transformers' `models/glm_image`, sampling is from the model's repository.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime import huggingface
from tempera.runtime.tensor_files import renamed
from tempera.targets.decoder_layer import Decoder, LayerSizes
from tempera.targets.rotary import MultimodalRotary
from tempera.targets.shared_vocabulary import PromptedLM
from tempera.targets.token_format import ModelSpec, patches

PATCH = 32
"""Pixels along each side of a code's patch."""
START = 16384


def glm_image(height: int = 1024, width: int = 1024, codes: int = 16384) -> ModelSpec:
    """GLM-Image's format: the prompt in the tokenizer's chat template, the two sizes in codes as
    text, and the start of the image. The preview has about 16×16 codes, in the proportions of the
    image. There is no unconditional row. Codes alone are drawn: transformers draws from all ids of
    the head, so that special ids, which must not come, count in its top-p.

    Args:
        height, width: pixels, multiples of 32.
        codes: size of the image codebook.

    Raises:
        TemperaError: a side is not a multiple of 32.
    """
    lines, columns = patches(height, PATCH, "height"), patches(width, PATCH, "width")
    small = int(math.sqrt(lines / columns) * 16), int(math.sqrt(columns / lines) * 16)
    sizes = f"<sop>{lines} {columns}<eop><sop>{small[0]} {small[1]}<eop>"
    return ModelSpec(
        lines,
        columns,
        codes,
        first_code=0,
        prompt=("{text}" + sizes, START),
        null=(),
        context=131072,
        preview=small,
        special=("<sop>", "<eop>"),
    )


class GlmImage(PromptedLM):
    """The part of GLM-Image that draws codes.

    Args:
        config: the decoder's configuration.
        spec: format of its sequences.
    """

    def __init__(self, config: Any, spec: ModelSpec) -> None:
        sizes = _sizes(config)
        rope = config.rope_parameters
        rotary = MultimodalRotary(
            sizes.head_dim,
            rope["rope_theta"],
            rope["mrope_section"],
            spec.grids,
            _turned(sizes.head_dim, rope),
        )
        model = Decoder(sizes, config.num_hidden_layers, config.vocab_size, rotary)
        head = nn.Linear(config.hidden_size, config.vision_vocab_size, bias=False)
        super().__init__(config, model, head, spec, "glm_image")


UNUSED = ("model.visual.", "model.vqmodel.")


def build(sizes: dict[str, Any], spec: ModelSpec) -> GlmImage:
    """The network of these sizes; see `shared_vocabulary.load_network`."""
    return GlmImage(huggingface.GlmImageTextConfig(**sizes), spec)


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Translate Hugging Face's names into those of `GlmImage`. Gate and up are apart; and the
    turned numbers of a head, which come first there, stand first in each of its halves
    (`rotary.Rotary`).
    """
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    result: dict[str, Tensor] = {}
    for name, tensor in renamed(state, {r"^model\.language_model\.": "model."}).items():
        if ".gate_up_proj." in name:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                result[name.replace("gate_up", part)] = piece
            continue
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if f".{part}." in name:
                each = tensor.unflatten(0, (count, -1))
                turned = _turned(each.shape[1], sizes["rope_parameters"])
                tensor = each[:, _halves(each.shape[1], turned)].flatten(0, 1)
        result[name] = tensor
    return result


def layer_sizes(config: Mapping[str, Any]) -> LayerSizes:
    """Sizes of a decoder layer for the fields of a `GlmImageTextConfig`."""
    return _sizes(huggingface.GlmImageTextConfig(**config))


def _sizes(config: Any) -> LayerSizes:
    return LayerSizes.of(config, output_bias=False, four_norms=True)


def _turned(head_dim: int, rope: Mapping[str, Any]) -> int:
    """How many numbers of a head are turned."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _halves(head_dim: int, turned: int) -> Tensor:
    """The order of a head's numbers in which those turned, the first ones, stand first in each
    half, int64 [head_dim].
    """
    turns, rest = torch.arange(turned), torch.arange(turned, head_dim)
    halves = zip(turns.chunk(2), rest.chunk(2), strict=False)
    return torch.cat([torch.cat(half) for half in halves]) if len(rest) else turns
