"""What a draft learns from: captioned image codes, addressed by a counter so that order, sharding and resumption cannot change them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tempera.data.world import World
from tempera.errors import TemperaError
from tempera.training.prepare import VQEncoder
from tempera.training.shards import Images, read_shards
from tempera.training.sources import Entry

HOLDOUT = 20
"""One image in so many is held out: 5%."""


@dataclass(frozen=True)
class Captioned:
    """Captions and their images' codes int64 [B, length]."""

    captions: list[str]
    codes: Tensor


class Codes(Protocol):
    """An indexed stream of training images and a disjoint hold-out."""

    def train(self, positions: list[int]) -> Captioned:
        """Training images number `positions` of the (endless) stream, always the same for the same numbers."""

    def holdout(self, positions: list[int]) -> Captioned:
        """Held-out images number `positions` mod the size of the hold-out."""


class WorldCodes:
    """The embedded world's scenes, encoded as they are needed: unlimited. Scene 0, 20, 40, … are the hold-out."""

    def __init__(self, encoder: VQEncoder, seed: int = 0) -> None:
        self.world, self.encoder = World(seed), encoder

    def train(self, positions: list[int]) -> Captioned:
        """Scenes that are no multiple of 20."""
        return self._scenes([position + position // (HOLDOUT - 1) + 1 for position in positions])

    def holdout(self, positions: list[int]) -> Captioned:
        """Scenes that are multiples of 20."""
        return self._scenes([position * HOLDOUT for position in positions])

    def _scenes(self, indices: list[int]) -> Captioned:
        samples = [self.world.sample(index) for index in indices]
        entries = [Entry(f"world scene {i}", str(i), sample.caption, sample.image) for i, sample in zip(indices, samples, strict=True)]
        return Captioned([sample.caption for sample in samples], torch.from_numpy(self.encoder.encode(entries).codes).long())


class ShardCodes:
    """Shards made by `tempera.training.prepare`, in memory; every epoch is a permutation of its own.

    The hold-out is the 5% of images whose key hashes to it: it does not depend on order or seed, and captions of one image stay together.
    """

    def __init__(self, images: Images, seed: int = 0) -> None:
        parts = [_hash(key.partition("#")[0]) % HOLDOUT == 0 for key in images.keys]
        self.images, self.seed = images, seed
        self.held, self.kept = np.flatnonzero(parts), np.flatnonzero(np.logical_not(parts))
        if not len(self.kept) or not len(self.held):
            raise TemperaError(
                f"{len(images)} images are too few: {len(self.held)} of them fall into the 5% hold-out and {len(self.kept)} are left "
                "to train on; prepare a few hundred."
            )
        self._epoch, self._order = -1, self.kept

    @classmethod
    def read(cls, path: str, tokenizer: str, vocab_size: int, grid: tuple[int, int], seed: int = 0) -> "ShardCodes":
        """Read and check a shards directory; see `tempera.training.shards.read_shards`."""
        return cls(read_shards(Path(path), tokenizer, vocab_size, grid), seed)

    def train(self, positions: list[int]) -> Captioned:
        """Image number p is entry p mod n of the permutation of epoch p // n."""
        return self._images([self._at(position) for position in positions])

    def holdout(self, positions: list[int]) -> Captioned:
        """Held-out images in their order in the shards."""
        return self._images([int(self.held[position % len(self.held)]) for position in positions])

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self.kept))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.kept)
        return int(self._order[place])

    def _images(self, rows: list[int]) -> Captioned:
        return Captioned([self.images.captions[row] for row in rows], torch.from_numpy(self.images.codes[rows]).long())


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
