"""Encoders that turn captions and images into codes: an image tokenizer encodes the images, or the
target generates codes for the captions.
"""

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageOps
from PIL.Image import Image, Resampling
from torch import Tensor

from tempera.data.entries import Broken, Entry
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import ImageTokenizer, to_images
from tempera.rules.standard import Exact
from tempera.runtime.image_decoding import decode_picture
from tempera.runtime.network_identity import identity_of
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class Encoded:
    """Codes int32 [n, length] of the n `entries`, and the entries that could not be encoded."""

    entries: list[Entry]
    codes: NDArray[np.int32]
    broken: list[Broken]


class CodeEncoder(Protocol):
    """Turns entries into codes: `length` of an image, that in `grid` and those of a preview."""

    tokenizer: str
    grid: tuple[int, int]
    length: int
    vocab_size: int

    def describe(self) -> dict[str, Any]:
        """The encoder's kind and the identities of its models, for the manifest."""

    def encode(self, entries: list[Entry]) -> Encoded:
        """One batch."""


class VQEncoder:
    """`encoder=vq`: codes of the images themselves, which are scaled and cropped to their centre.

    Args:
        grid: rows and columns of codes; they and the tokenizer's factor set the picture's size.
        tokenizer: the target's, on its device.
    """

    def __init__(self, grid: tuple[int, int], tokenizer: ImageTokenizer) -> None:
        self.vq = tokenizer
        self.tokenizer = identity_of(tokenizer)
        self.grid = grid
        self.length = grid[0] * grid[1]
        self.device = next(iter(tokenizer.state_dict().values())).device
        self.vocab_size = tokenizer.vocab_size
        self.size = tokenizer.image_size(grid)

    def describe(self) -> dict[str, Any]:
        """Picture size."""
        return {"kind": "vq", "size": list(self.size)}

    @torch.no_grad()
    def encode(self, entries: list[Entry]) -> Encoded:
        """Encode the pictures; those that cannot be decoded are broken. The keys of the entries get
        a hash of the pixels in front, by which copies of a picture are found.

        Raises:
            TemperaError: an entry has no picture.
        """
        encoded: list[Entry] = []
        pixels: list[Tensor] = []
        broken: list[Broken] = []
        for entry in entries:
            if entry.image is None:
                raise TemperaError(
                    f"{entry.where} has a caption but no image: use encoder=target, or add its "
                    "image to the source."
                )
            try:
                picture = to_pixels(decode_picture(entry.image), self.size)
                digest = hashlib.sha256(picture.numpy().tobytes()).hexdigest()[:16]
                encoded.append(replace(entry, key=f"{digest}#{entry.key}"))
                pixels.append(picture)
            except (OSError, ValueError) as problem:
                broken.append(Broken(entry.where, f"unreadable image ({problem})"))
        if not encoded:
            return Encoded([], np.zeros((0, self.length), np.int32), broken)
        codes = self.vq.encode(torch.stack(pixels).to(self.device)).flatten(1)
        return Encoded(encoded, codes.cpu().numpy().astype(np.int32), broken)


class TargetEncoder:
    """`encoder=target`: codes that the target generates for the captions, autoregressively with its
    own guidance and temperature (self-distillation).

    Args:
        target: the target; `tokenizer`: its image tokenizer.
        seed: the seed and an entry's key determine its image.
    """

    def __init__(self, target: TransformerTarget, tokenizer: ImageTokenizer, seed: int) -> None:
        self.target = target
        self.tokenizer = identity_of(tokenizer)
        self.seed = seed
        self.grid = target.grid
        self.length = target.length
        self.vocab_size = target.vocab_size

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
    image = ImageOps.fit(image, size[::-1], Resampling.BICUBIC)
    return to_images(torch.from_numpy(np.array(image)).permute(2, 0, 1))
