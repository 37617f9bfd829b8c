"""Emu3's image tokenizer (Wang et al. 2024): Hugging Face's network with weights in the layout of
Emu3-VisionTokenizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.image_tokenizers.line_ends import LinedTokenizer
from tempera.runtime import huggingface
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.runtime.tensor_files import renamed

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
