"""Encoders that turn captions and images into codes: an image tokenizer encodes the images, or the
target generates codes for the captions.
"""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from torch import Tensor

from tempera.data.sources import Broken, Entry
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQModel
from tempera.rules.standard import Exact
from tempera.runtime.image_files import decode_picture
from tempera.runtime.network_identity import identity_of
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class Encoded:
    """Codes int32 [n, length] of the n `entries`, and the entries that could not be encoded."""

    entries: list[Entry]
    codes: NDArray[np.int32]
    broken: list[Broken]


class CodeEncoder(Protocol):
    """Turns entries into codes."""

    tokenizer: str
    grid: tuple[int, int]
    vocab_size: int

    def describe(self) -> dict[str, Any]:
        """The encoder's kind and the identities of its models, for the manifest."""

    def encode(self, entries: list[Entry]) -> Encoded:
        """One batch."""


class VQEncoder:
    """Encodes the images themselves: resizes the shorter side, crops the centre, encodes.

    Args:
        vq: the target's tokenizer, on its device; `tokenizer`: its identity.
        grid: rows and columns of codes; they and the tokenizer's factor set the picture's size.
    """

    def __init__(self, vq: VQModel, tokenizer: str, grid: tuple[int, int]) -> None:
        self.vq, self.tokenizer, self.grid = vq, tokenizer, grid
        self.device = next(vq.parameters()).device
        self.vocab_size, self.size = vq.vocab_size, vq.image_size(grid)

    def describe(self) -> dict[str, Any]:
        """Picture size."""
        return {"kind": "vq", "size": list(self.size)}

    @torch.no_grad()
    def encode(self, entries: list[Entry]) -> Encoded:
        """Encode the pictures; those that cannot be decoded are broken."""
        kept: list[Entry] = []
        pixels: list[Tensor] = []
        broken: list[Broken] = []
        for entry in entries:
            if entry.image is None:
                raise TemperaError(
                    f"{entry.where} has a caption but no image: use encoder=target, or give the "
                    "source its images."
                )
            try:
                pixels.append(to_pixels(decode_picture(entry.image), self.size))
                kept.append(entry)
            except (OSError, ValueError) as problem:
                broken.append(Broken(entry.where, f"unreadable image ({problem})"))
        if not kept:
            return Encoded([], np.zeros((0, self.grid[0] * self.grid[1]), np.int32), broken)
        codes = self.vq.encode(torch.stack(pixels).to(self.device)).flatten(1)
        return Encoded(kept, codes.cpu().numpy().astype(np.int32), broken)


class TargetEncoder:
    """Lets the target generate codes for the captions, autoregressively with its own guidance and
    temperature (self-distillation).

    Args:
        target: the target; `tokenizer`: the identity of its image tokenizer.
        seed: the seed and an entry's key determine its image.
    """

    def __init__(self, target: TransformerTarget, tokenizer: str, seed: int = 0) -> None:
        self.target, self.tokenizer, self.seed = target, tokenizer, seed
        self.grid, self.vocab_size = target.grid, target.vocab_size

    def describe(self) -> dict[str, Any]:
        """Target identity, sampling and seed."""
        return {
            "kind": "target",
            "target": self.target.identity,
            "seed": self.seed,
            "sampling": asdict(self.target.sampling),
        }

    def encode(self, entries: list[Entry]) -> Encoded:
        """Generate one image per caption."""
        streams = RandomStreams(self.seed, [entry.key for entry in entries], self.target.device)
        output = decode(
            self.target, NoDraft(), Exact(), streams, [entry.caption for entry in entries]
        )
        return Encoded(entries, output.tokens.cpu().numpy().astype(np.int32), [])


def to_pixels(image: Image, size: tuple[int, int]) -> Tensor:
    """An RGB image as float32 [3, height, width] in [−1, 1]: scaled to cover `size` = (height,
    width), then cropped to its centre.
    """
    height, width = size
    scale = max(height / image.height, width / image.width)
    if (image.height, image.width) != size:
        scaled = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(scaled, Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 127.5 - 1


def vq_encoder(grid: tuple[int, int], tokenizer: VQModel) -> VQEncoder:
    """`encoder=vq`: the images' own codes on the target's grid."""
    return VQEncoder(tokenizer, identity_of(tokenizer), grid)


def target_encoder(target: TransformerTarget, tokenizer: VQModel, seed: int = 0) -> TargetEncoder:
    """`encoder=target`: codes that the target generates."""
    return TargetEncoder(target, identity_of(tokenizer), seed)
