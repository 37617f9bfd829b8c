"""The shipped model: a tiny LlamaGen with its own text encoder and tokenizer, shipped inside the
package.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.drafters.independent import SmallerModel
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQModel, read_vq
from tempera.runtime.network_directory import parse_sizes, read_network
from tempera.shapes.world import WORDS
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig, from_meta

SHIPPED = Path(__file__).resolve().with_name("weights")
"""Where the package keeps the trained weights."""

VOCABULARY = ("<pad>", "<unknown>", *WORDS)


def tokenize(prompts: list[str], length: int) -> Tensor:
    """Word ids int64 [B, length], padded on the left with 0; words outside the world are
    `<unknown>`, words past `length` are dropped.
    """
    known = {word: i for i, word in enumerate(VOCABULARY)}
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        words = [known.get(word.strip(".,;:!?\"'()"), 1) for word in prompt.lower().split()][
            :length
        ]
        if not words:
            raise TemperaError(
                f"prompt {row + 1} of {len(prompts)} is empty: give it at least one word."
            )
        ids[row, -len(words) :] = torch.tensor(words)
    return ids


class TextEncoder(nn.Module):
    """Word embedding, learned positions and a small bidirectional transformer: word ids [B, T] →
    features [B, T, D].
    """

    def __init__(self, length: int, width: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.config = {"length": length, "width": width, "layers": layers, "heads": heads}
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        nn.init.normal_(self.words.weight, std=0.5)

    @property
    def length(self) -> int:
        """Words a caption can have."""
        return int(self.config["length"])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids int64 [B, T] → features [B, T, D], and which of them are real, bool [B, T]."""
        keep = ids != 0
        features: Tensor = self.layers(self.words(ids) + self.positions, src_key_padding_mask=~keep)
        return features * keep[..., None], keep

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Prompts → features [B, T, D] and mask [B, T] on the encoder's device."""
        out: tuple[Tensor, Tensor] = self(tokenize(prompts, self.length).to(self.positions.device))
        return out


def load_text_encoder(directory: str | Path = SHIPPED / "text_encoder") -> TextEncoder:
    """The shipped text encoder, frozen."""
    encoder = read_network(directory, lambda config: TextEncoder(**config))
    return encoder.eval().requires_grad_(False)


def load_target_network(directory: str | Path = SHIPPED / "target") -> LlamaGen:
    """The shipped target, frozen; its file is in LlamaGen's official key layout or in our own."""

    def build(values: dict[str, Any]) -> LlamaGen:
        return LlamaGen(parse_sizes(LlamaGenConfig, values))

    def translate(state: dict[str, Tensor], network: LlamaGen) -> dict[str, Tensor]:
        return from_meta(state, network.config.num_attention_heads)

    network = read_network(directory, build, translate)
    return network.eval().requires_grad_(False)


def load_tokenizer(directory: str | Path = SHIPPED / "tokenizer") -> VQModel:
    """The shipped image tokenizer, frozen."""
    return read_vq(directory)


def load_smaller(directory: str | Path = SHIPPED / "independent") -> SmallerModel:
    """The half-size model in `directory`, with its own text encoder in `directory`/text_encoder,
    that drafts for `method=independent`.
    """
    directory = Path(directory)
    return SmallerModel(
        load_target_network(directory), load_text_encoder(directory / "text_encoder")
    )
