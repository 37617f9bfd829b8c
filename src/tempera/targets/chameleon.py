"""Chameleon (Chameleon team 2024) and the image generators derived from it: Lumina-mGPT (Liu et al.
2024), Lumina-mGPT 2.0 (Xin et al. 2025) and Anole (Chern et al. 2024).

Ids are from Meta's Chameleon repository: `<s>` 0, `<pad>` 1, image
codes 4 … 8195 in order, `<racm3:break>` (start of image) 8197,
`<reserved08706>` (end of turn) 8710. Prompt formats are from the Lumina-mGPT and Anole
repositories.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tempera.errors import TemperaError
from tempera.runtime import huggingface
from tempera.targets.family import WrappedFamily
from tempera.targets.llamagen import from_meta
from tempera.targets.token_format import END_OF_TEXT, ModelSpec, patches

PATCH = 16
"""Pixels along each side of a code's patch."""

_BEGIN, _START, _TURN = 0, 8197, 8710


def lumina(height: int = 768, width: int = 768) -> ModelSpec:
    """Lumina-mGPT's format. The size is part of the prompt text and follows the start of the image
    as two ids in steps of 32 pixels; lines end with `<reserved08799>`. The unconditional row has no
    prompt: it begins with the start of the image.

    Args:
        height, width: pixels, multiples of 32.

    Raises:
        TemperaError: a side is not a multiple of 32.
    """
    size: list[int] = [
        8804 + patches(pixels, 2 * PATCH, name)
        for pixels, name in ((height, "height"), (width, "width"))
    ]
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{{text}}"
    prompt: tuple[int | str, ...] = (_BEGIN, text, _TURN, _START, *size)
    null = (_START, *size)
    return ModelSpec(
        height // PATCH,
        width // PATCH,
        8192,
        first_code=4,
        prompt=prompt,
        null=null,
        context=10240,
        line_end=8803,
    )


def lumina2(height: int = 768, width: int = 768) -> ModelSpec:
    """Lumina-mGPT 2.0's format: that of the first, with the codes of MoVQ, of 8×8 pixels, and
    Qwen's text tokenizer with Chameleon's special tokens. Ids are from its repository: codes 155000
    … 171383, end of line 151670; the others are looked up. A prompt begins with the tokenizer's
    end of text, because it has no begin. Start and size of the image are given here; its code
    draws them.

    Args:
        height, width: pixels, multiples of 32.

    Raises:
        TemperaError: a side is not a multiple of 32.
    """
    size = [
        f"<reserved{8800 + patches(pixels, 32, name):05d}>"
        for pixels, name in ((height, "height"), (width, "width"))
    ]
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{{text}}"
    start = "<racm3:break>"
    return ModelSpec(
        height // 8,
        width // 8,
        codes=16384,
        first_code=155000,
        prompt=(END_OF_TEXT, text, "<reserved08706>", start, *size),
        null=(start, *size),
        context=10240,
        line_end=151670,
        special=("<reserved08706>", start, *size),
    )


def anole() -> ModelSpec:
    """Anole's format: images of 512×512 pixels, without end-of-line tokens. Since prompts contain
    no images, Chameleon's guidance on text and image reduces to guidance on text; the unconditional
    row is `<s>` and the start of the image.
    """
    prompt = (_BEGIN, "{text}", _TURN, _START)
    return ModelSpec(
        32,
        32,
        codes=8192,
        first_code=4,
        prompt=prompt,
        null=(_BEGIN, _START),
        context=4096,
    )


def _config(swin_norm: bool, model_parallel_size: int | None, **sizes: Any) -> Any:
    """The decoder's configuration.

    Raises:
        TemperaError: it is of an unsupported variant.
    """
    if swin_norm:
        raise TemperaError(
            "these weights are of a Chameleon with swin_norm (norms after attention and MLP, as in "
            "the 34B models), which is not supported: give a model without it, such as a 7B."
        )
    return huggingface.ChameleonConfig(**sizes, vocabulary_map={})


def translate(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Translate published weights into Hugging Face's current layout.

    Two layouts are supported. In Hugging Face's layout of 2024 (Lumina-mGPT), the norms of queries
    and keys are [model_parallel, head_dim]; each row belongs to the heads of one partition and is
    repeated for them. Meta's layout (Anole, Chameleon) has interleaved rotary pairs and one norm
    for all heads.

    Args:
        state: published weights.
        sizes: of the network; `model_parallel_size` is None if it is not stated.

    Raises:
        TemperaError: the norms are those of another number of partitions.
    """
    heads = sizes["num_attention_heads"]
    partitions = sizes.get("model_parallel_size")
    result = from_meta(state, heads)
    for name, tensor in result.items():
        if ".self_attn.q_norm." in name or ".self_attn.k_norm." in name:
            rows = tensor.reshape(-1, tensor.shape[-1])
            if partitions is not None and len(rows) not in (partitions, heads):
                raise TemperaError(
                    f"{name} is made of {len(rows)} partitions, but config.json states "
                    f"model_parallel_size={partitions}: download both from one repository."
                )
            result[name] = rows.repeat_interleave(max(1, heads // len(rows)), 0)
    return result


CHAMELEON = WrappedFamily(
    name="chameleon",
    config=_config,
    layer={"head_norm": "layer"},
    translate=translate,
    unused=("model.vqmodel.", "rope."),
    model_class="ChameleonForConditionalGeneration",
    preset="anole",
    decoder="model",
    decoders=("ChameleonModel",),
    embedding=("model.embed_tokens",),
    layouts={"anole": anole, "lumina": lumina, "lumina2": lumina2},
)
