"""NVIDIA's Cosmos tokenizer of discrete codes (DV8x16x16), for single images: TorchScript, as
published.

Its codebook is a grid of numbers (FSQ, Mentzer et al. 2023) without a table, so methods that
compare codes (LANTERN, GSD) have nothing to compare.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained, note

FACTOR = 16


@dataclass(frozen=True)
class CosmosConfig:
    """Number of codes."""

    codebook_size: int = 64000


class CosmosTokenizer(ImageTokenizer):
    """Images ↔ codes, each of 16×16 pixels.

    Args:
        encoder: images [B, 3, 1, H, W] in [−1, 1] → a tuple that begins with codes [B, 1, h, w].
        decoder: codes [B, 1, h, w] → images [B, 3, 1, H, W] in [−1, 1].
        config: number of codes.
    """

    factor = FACTOR

    def __init__(self, encoder: nn.Module, decoder: nn.Module, config: CosmosConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.config = config
        self.vocab_size = config.codebook_size

    @override
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [−1, 1] → codes int64 [B, h, w]."""
        frames = images.unsqueeze(2).to(_dtype(self.encoder))
        codes: Tensor = self.encoder(frames)[0]
        return codes[:, 0].long()

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w] → images [B, 3, H, W] in [−1, 1]."""
        out: Tensor = self.decoder(codes.unsqueeze(1))[:, :, 0].clamp(-1, 1)
        return out


class UntrainedDecoder(nn.Module):
    """What stands in for the published decoder with `weights=random`, since its architecture is not
    published as code: a colour of `factor`×`factor` pixels for every code.

    Args:
        codes, factor: their number, and pixels of each along a side.
        instead_of: what a dry run cannot weigh; "" for random weights, which this is all of.
    """

    def __init__(self, codes: int, factor: int = FACTOR, instead_of: str = "") -> None:
        super().__init__()
        self.instead_of = instead_of
        self.colours = nn.Embedding(codes, 3)
        self.factor = factor

    def forward(self, codes: Tensor) -> Tensor:
        """Codes [B, 1, h, w] -> images [B, 3, 1, H, W]."""
        colours: Tensor = self.colours(codes).permute(0, 4, 1, 2, 3)
        return colours.repeat_interleave(self.factor, -1).repeat_interleave(self.factor, -2)


class UntrainedEncoder(nn.Module):
    """The counterpart of `UntrainedDecoder`: the mean colour of every 16×16 pixels decides."""

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.codes = codes

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Images [B, 3, 1, H, W] -> codes [B, 1, h, w]."""
        mean = nn.functional.avg_pool2d(images.flatten(1, 2), FACTOR).mean(1, keepdim=True)
        codes = ((mean + 1) / 2 * self.codes).long()
        return (codes.clamp(0, self.codes - 1),)


def load_cosmos(weights: str, files: list[str], hub: str, codes: int = 64000) -> CosmosTokenizer:
    """Load the published encoder and decoder.

    Args:
        weights, files, hub: see `PretrainedFiles`; the first file is the decoder's, the second the
            encoder's. `weights="random"` gives `UntrainedDecoder`.
        codes: number of codes.

    Raises:
        TemperaError: a file is missing or is not TorchScript.
    """
    config = CosmosConfig(codes)
    decoder_file, encoder_file = files
    decoder = PretrainedFiles(weights, [decoder_file], hub)
    encoder = PretrainedFiles(weights, [encoder_file], hub)
    if decoder.random or note(decoder):
        note(encoder)
        nothing = PretrainedFiles("random", files, hub)
        instead_of = "" if decoder.random else "NVIDIA's Cosmos decoder"

        def untrained() -> CosmosTokenizer:
            colours = UntrainedDecoder(codes, instead_of=instead_of)
            return CosmosTokenizer(UntrainedEncoder(codes), colours, config)

        return load_pretrained(untrained, nothing)
    return CosmosTokenizer(_script(encoder), _script(decoder), config)


def _script(files: PretrainedFiles) -> Any:
    """The TorchScript module in the first of these files."""
    path: Path = files.find()[0]
    try:
        return torch.jit.load(path, map_location="cpu").eval()
    except RuntimeError as problem:
        raise TemperaError(f"{path} is not TorchScript: download it again.") from problem


def _dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's weights; float32 if it has none."""
    return next((weight.dtype for weight in module.parameters()), torch.float32)
