"""Networks of Qwen2's layers (Qwen team 2024), whose embedding table may also be the head:
SimpleAR (Wang et al. 2025).

Ids of SimpleAR: Qwen2.5's text tokens and seven special ones, 151672 together, then the 64,000
codes of Cosmos's tokenizer. Prompt formats are from the SimpleAR repository.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tempera.runtime import huggingface
from tempera.targets.family import Family
from tempera.targets.token_format import ModelSpec, patches

PATCH = 16
TEXT_TOKENS = 151672
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad "
    "hands, bad teeth, bad eyes, bad limbs, distortion"
)


def simplear(
    image_size: int = 1024, codes: int = 64000, text_tokens: int = TEXT_TOKENS
) -> ModelSpec:
    """SimpleAR's format. The unconditional row has a negative prompt.

    Args:
        image_size: height and width in pixels, a multiple of 16.
        codes: size of the image codebook.
        text_tokens: entries of the text tokenizer, behind which the codes begin.

    Raises:
        TemperaError: the size is not a multiple of 16.
    """
    side = patches(image_size, PATCH, "image_size")
    return ModelSpec(
        side,
        side,
        codes,
        first_code=text_tokens,
        prompt=("<|t2i|>", "A highly realistic image of {text}", "<|soi|>"),
        null=("<|t2i|>", NEGATIVE, "<|soi|>"),
        context=32768,
        special=("<|t2i|>", "<|soi|>"),
        text_tokens=text_tokens,
    )


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Published names are those of the network; a file without a head has the table for it."""
    table = state.get("model.embed_tokens.weight")
    return dict(state) if table is None else {"lm_head.weight": table, **state}


QWEN2 = Family(
    name="qwen2",
    config=lambda **sizes: huggingface.Qwen2Config(**sizes),
    layer={"qkv_bias": True},
    translate=translate,
)
