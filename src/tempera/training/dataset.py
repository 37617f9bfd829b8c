"""What a draft learns from: captioned image codes, addressed by a counter so that order, sharding
and resumption cannot change them.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tempera.data.encoders import TargetEncoder, VQEncoder
from tempera.data.prepare import prepare
from tempera.data.shards import MANIFEST, Images, Manifest, read_shards
from tempera.data.sources import Source
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQModel
from tempera.runtime.network_identity import identity_of
from tempera.targets.transformer import TransformerTarget

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
        """Training images number `positions` of the (endless) stream, always the same for the same
        numbers.
        """

    def holdout(self, positions: list[int]) -> Captioned:
        """Held-out images number `positions` mod the size of the hold-out."""


class ShardCodes:
    """Shards made by `tempera.data.prepare`, in memory; every epoch is a permutation of its own.

    The hold-out is the 5% of images whose key hashes to it: it does not depend on order or seed,
    and captions of one image stay together.
    """

    def __init__(self, images: Images, seed: int = 0) -> None:
        parts = [_hash(key.partition("#")[0]) % HOLDOUT == 0 for key in images.keys]
        self.images, self.seed = images, seed
        self.held, self.kept = np.flatnonzero(parts), np.flatnonzero(np.logical_not(parts))
        if not len(self.kept) or not len(self.held):
            raise TemperaError(
                f"{len(images)} images are too few: {len(self.held)} of them fall into the 5% "
                f"hold-out and {len(self.kept)} are left "
                "to train on; prepare a few hundred."
            )
        self._epoch, self._order = -1, self.kept

    @classmethod
    def read(
        cls, path: str, tokenizer: str, vocab_size: int, grid: tuple[int, int], seed: int = 0
    ) -> "ShardCodes":
        """Read and check a shards directory; see `tempera.data.shards.read_shards`."""
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
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.kept),
            )
        return int(self._order[place])

    def _images(self, rows: list[int]) -> Captioned:
        return Captioned(
            [self.images.captions[row] for row in rows],
            torch.from_numpy(self.images.codes[rows]).long(),
        )


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])


def vq_encoder(grid: tuple[int, int], tokenizer: VQModel) -> VQEncoder:
    """`encoder=vq`: the images' own codes on the target's grid."""
    return VQEncoder(tokenizer, identity_of(tokenizer), grid)


def target_encoder(target: TransformerTarget, tokenizer: VQModel, seed: int = 0) -> TargetEncoder:
    """`encoder=target`: codes that the target draws."""
    return TargetEncoder(target, identity_of(tokenizer), seed)


def shard_codes(
    target: TransformerTarget, tokenizer: VQModel, directory: Path, path: str, seed: int = 0
) -> ShardCodes:
    """`train_data=shards`: shards in `path`, made for this tokenizer."""
    return ShardCodes.read(path, identity_of(tokenizer), target.vocab_size, target.grid, seed)


def generated_codes(
    target: TransformerTarget,
    tokenizer: VQModel,
    directory: Path,
    source: Any,
    limit: int | None = 4096,
    batch_size: int = 64,
    seed: int = 0,
) -> ShardCodes:
    """`train_data=generated`: images that the target draws for the captions of `source`, kept as
    shards in `directory/codes`.

    Raises:
        TemperaError: several processes, and the images are not drawn yet.
    """
    shards, origin = directory / "codes", _source(source)
    drawn = (shards / MANIFEST).is_file() and Manifest.load(shards).complete
    if not drawn and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TemperaError(
            "several processes cannot draw one set of training images: draw them first with "
            "train_draft/prepare.py encoder=target, "
            "then train with train_data=shards train_data.path=DIR."
        )
    with tqdm(desc="draw training images", unit="image", disable=drawn) as bar:
        encoder = target_encoder(target, tokenizer, seed)
        prepare(
            origin,
            encoder,
            shards,
            shard_size=4 * batch_size,
            batch_size=batch_size,
            limit=limit,
            report=bar.write,
            bar=bar,
        )
    return ShardCodes.read(
        str(shards), identity_of(tokenizer), target.vocab_size, target.grid, seed
    )


def _source(source: Any) -> Source:
    """The source, which configuration files cannot annotate."""
    found: Source = source
    return found
