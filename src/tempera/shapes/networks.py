"""The shipped model: a tiny LlamaGen with its own text encoder, shipped inside the package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tempera.drafters.independent import SmallerModel
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import read_json
from tempera.runtime.network_directory import CONFIG, parse_sizes, read_network
from tempera.shapes.world import WORDS, parse_caption
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig, from_meta
from tempera.targets.prompt_encoder import numbered, too_long

SHIPPED = Path(__file__).resolve().with_name("weights")
"""Where the package keeps the trained weights."""

VOCABULARY = ("<pad>", "<unknown>", *WORDS)
UNKNOWN = VOCABULARY.index("<unknown>")


def words_of(prompt: str) -> list[str]:
    """The words of a prompt, in lower case and without punctuation."""
    return [word.strip(".,;:!?\"'()") for word in prompt.lower().split()]


def read_words(prompts: list[str], length: int, truncate: bool) -> list[list[str]]:
    """The words of every prompt, `length` at most.

    Raises:
        TemperaError: a prompt is empty, or too long and `truncate` is False.
    """
    rows = []
    for prompt, where in numbered(prompts):
        words = words_of(prompt)
        if not words:
            raise TemperaError(f"{where} is empty: give it at least one word.")
        if len(words) > length and not truncate:
            raise too_long(where, len(words), length)
        rows.append(words[:length])
    return rows


def tokenize(prompts: list[str], length: int, truncate: bool = True) -> Tensor:
    """Word ids int64 [B, length], padded on the left with 0; words outside the world are
    `<unknown>`. Errors as of `read_words`.
    """
    id_of = {word: i for i, word in enumerate(VOCABULARY)}
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, words in enumerate(read_words(prompts, length, truncate)):
        ids[row, -len(words) :] = torch.tensor([id_of.get(word, UNKNOWN) for word in words])
    return ids


class WorldCaptions:
    """Tells which prompts the shipped model can read, without its weights.

    Args:
        directory: of its text encoder.
        truncate: whether words that are too many are dropped, instead of refused.
    """

    def __init__(self, directory: str | Path = SHIPPED / "text_encoder", truncate: bool = False):
        self.length = parse_length(read_json(Path(directory) / CONFIG))
        self.truncate = truncate

    def check(self, prompts: list[str]) -> None:
        """Raise TemperaError for a prompt without words, or with too many."""
        read_words(prompts, self.length, self.truncate)

    def warnings(self, prompts: Sequence[str]) -> list[str]:
        """What the model does not understand, in sentences."""
        unknown: set[str] = set()
        not_captions = []
        for prompt in prompts:
            new = set(words_of(prompt)) - set(WORDS)
            unknown |= new
            if not new and parse_caption(prompt) is None:
                not_captions.append(prompt)
        sentences = []
        if unknown:
            few = ", ".join(shortened(word, 20) for word in sorted(unknown)[:5])
            sentences.append(
                f"the shapes model does not know words such as {few} ({len(unknown)} in these "
                "prompts): it reads each as <unknown> and draws something else"
            )
        if not_captions:
            sentences.append(
                f"{len(not_captions)} of {len(prompts)} prompts are not captions of the shapes "
                f"world, such as '{shortened(not_captions[0], 40)}': the model interprets them as "
                "best it can"
            )
        return sentences


def parse_length(config: Mapping[str, Any]) -> int:
    """The number of words that a text encoder's `config.json` states.

    Raises:
        TemperaError: it states none.
    """
    length = config.get("length")
    if type(length) is not int or length < 1:
        raise TemperaError(
            f"the {CONFIG} of the text encoder states length={length}, not a whole number of 1 or "
            "more: give another directory."
        )
    return length


class TextEncoder(nn.Module):
    """Word embedding, learned positions and a small bidirectional transformer: word ids [B, T] →
    features [B, T, D].
    """

    def __init__(self, length: int, width: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.config = {"length": length, "width": width, "layers": layers, "heads": heads}
        self.truncate = True
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
        mask = ids != 0
        features: Tensor = self.layers(self.words(ids) + self.positions, src_key_padding_mask=~mask)
        return features * mask[..., None], mask

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Prompts → features [B, T, D] and mask [B, T] on the encoder's device.

        Raises:
            TemperaError: a prompt is empty, or too long and `truncate` is False.
        """
        ids = tokenize(prompts, self.length, self.truncate).to(self.positions.device)
        out: tuple[Tensor, Tensor] = self(ids)
        return out


def load_text_encoder(
    directory: str | Path = SHIPPED / "text_encoder", truncate: bool = False
) -> TextEncoder:
    """The shipped text encoder, frozen.

    Args:
        directory: of its files.
        truncate: drop words that are too many, instead of refusing them.
    """
    encoder = read_network(directory, lambda config: TextEncoder(**config))
    encoder.truncate = truncate
    return encoder.eval().requires_grad_(False)


def load_target_network(directory: str | Path = SHIPPED / "target") -> LlamaGen:
    """The shipped target, frozen; its file is in LlamaGen's official key layout or in our own."""

    def build(values: dict[str, Any]) -> LlamaGen:
        return LlamaGen(parse_sizes(LlamaGenConfig, values))

    def translate(state: dict[str, Tensor], network: LlamaGen) -> dict[str, Tensor]:
        return from_meta(state, network.config.num_attention_heads)

    network = read_network(directory, build, translate)
    return network.eval().requires_grad_(False)


def load_smaller(directory: str | Path = SHIPPED / "independent") -> SmallerModel:
    """The half-size model in `directory`, with its own text encoder in `directory`/text_encoder,
    that drafts for `method=independent`.
    """
    network = load_target_network(directory)
    text_encoder = load_text_encoder(Path(directory) / "text_encoder", truncate=True)
    return SmallerModel(network, text_encoder)
