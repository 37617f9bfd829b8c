"""Emu3 (Wang et al. 2024): a Llama-like decoder over text and image tokens, and its image
tokenizer, Hugging Face's network with weights in the layout of Emu3-VisionTokenizer.

Ids are from the Emu3 repository (BAAI). Special tokens start at 151643 (`<|endoftext|>`):
`<|extra_200|>` (end of line) 151846, start of text 151849, `<|image token|>` 151851 and
`<|image start|>` 151852. The codes are 151854 … 184621.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime import huggingface
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.runtime.tensor_files import renamed
from tempera.targets.family import Asked, Read, WrappedFamily, filled
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


GROUP_NORMS = {"norm_groups": 32, "norm_eps": 1e-6}
"""Of the network's norms, as it has them without an option."""


class Emu3Tokenizer(ImageTokenizer):
    """Emu3's image tokenizer, for single images.

    Args:
        vq: the network, Hugging Face's `Emu3VQVAE`.
    """

    def __init__(self, vq: Any) -> None:
        super().__init__()
        self.vq = vq
        self.config = vq.config
        self.vocab_size = vq.config.codebook_size
        self.factor = 2 ** (len(vq.config.channel_multiplier) - 1)

    @property
    @override
    def codebook(self) -> Tensor:
        """[V, D]."""
        codes: Tensor = self.vq.quantize.embedding.weight
        return codes

    @override
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → codes int64 [B, h, w]."""
        sizes = torch.tensor([images.shape[-2:]] * len(images))
        return torch.stack(self.vq.encode(images, sizes).image_tokens)

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, H, W] in [−1, 1]."""
        out: Tensor = self.vq.decode(codes).clamp(-1, 1)
        return out


def load_emu3_tokenizer(
    weights: str, files: list[str], hub: str, sizes: dict[str, Any] | None = None
) -> LinedTokenizer:
    """Load Emu3's image tokenizer, with a token for the end of each line; `sizes` overrides its
    configuration.
    """
    config = huggingface.Emu3VQVAEConfig(**sizes or {}, attn_implementation="sdpa")
    heads = config.num_attention_heads
    vq = load_pretrained(
        lambda: huggingface.Emu3VQVAE(config),
        PretrainedFiles(weights, files, hub),
        vq_from_official,
        untold={"num_attention_heads": heads, **GROUP_NORMS, "hidden_act": "silu"},
    )
    return LinedTokenizer(Emu3Tokenizer(vq))


_NAMES = {
    r"\.(down|up)\.(\d+\.)": r".\1_block.\1.\2",
    r"\.mid\.attn_1\.norm\.": ".middle_block.attn_norm.",
    r"\.mid\.": ".middle_block.",
    r"\.attn\.(\d+)\.norm\.": r".attn_norms.\1.",
    r"(\.attn(?:_1|\.\d+))\.([qkv])\.": r"\1.\2_proj.",
    r"(\.attn(?:_1|\.\d+))\.proj_out\.": r"\1.out_proj.",
}


def vq_from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate Emu3-VisionTokenizer's names into those of Hugging Face; 1×1 convolutions in
    attention become matrices.
    """
    result = renamed(state, _NAMES)
    for name, tensor in result.items():
        if name.endswith("_proj.weight"):
            result[name] = tensor.flatten(1)
    return result


def _stated(model: Any) -> dict[str, object]:
    mapping = model.model.vocabulary_mapping
    codes = len(mapping.image_tokens)
    ids = [mapping.img2bpe[code] for code in range(codes)]
    if ids != list(range(ids[0], ids[0] + codes)):
        raise TemperaError(
            "the ids of this model's image codes are not consecutive, which is not supported."
        )
    return {"codes": codes, "first_code": ids[0], "line_end": mapping.eol_token_id}


def _read(asked: Asked) -> Read:
    """Pictures are codes in lines in Emu3's prompts, as it draws them."""
    if "pixel_values" not in asked.given:  # the processor gives the size of the image alone
        return Read(asked.ids)
    model = asked.model
    tokens = model.model.get_image_tokens(asked.given["pixel_values"], asked.given["image_sizes"])
    return Read(filled(asked.ids, model.vocabulary_mapping.image_token_id, tokens))


EMU3 = WrappedFamily(
    name="emu3",
    config=lambda **sizes: huggingface.Emu3TextConfig(**sizes, attention_dropout=0.0),
    model_class="Emu3ForConditionalGeneration",
    preset="emu3",
    decoder="model.text_model",
    decoders=("Emu3TextModel",),
    embedding=("model.text_model.embed_tokens",),
    layouts={"emu3": emu3},
    stated=_stated,
    pictures=lambda model: LinedTokenizer(Emu3Tokenizer(model.model.vqmodel)),
    given=("pixel_values", "image_sizes"),
    read=_read,
)
