"""A draft's training data: codes from shards, or codes that the target generates. Images are
numbered, and a number always gives the same image, whatever the number of processes or restarts.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import NonNegativeInt

from tempera.data.encoders import CodeEncoder, TargetEncoder, VQEncoder
from tempera.data.entries import Source
from tempera.data.prepare import entries_to_read, prepare
from tempera.data.prompts import CaptionCheck
from tempera.data.shards import CodedImages, Manifest, Positive, read_shards
from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import ImageTokenizer
from tempera.runtime.distributed import Processes
from tempera.runtime.network_identity import identity_of
from tempera.targets.transformer import TransformerTarget

CODES = "codes"
"""Where a training keeps its shards in its directory, unless they have a place of their own."""
HOLDOUT = 20
"""One image in 20 is held out: 5%."""
SHARD_BATCHES = 4
"""Batches in a shard of generated images; processes share the batches of a shard."""


class Codes(Protocol):
    """An indexed stream of training images, and a hold-out that is disjoint from it."""

    def train(self, positions: list[int]) -> CodedImages:
        """Training images by their numbers in an endless stream; a number always means the same
        image.
        """

    def holdout(self, positions: list[int]) -> CodedImages:
        """Held-out images by number, modulo the size of the hold-out."""


class ShardCodes:
    """Shards written by `tempera.data.prepare`, in memory, in a new order in every epoch.

    A hash of an image's key decides whether it is held out, so the hold-out does not depend on
    order or seed, and all captions of an image are on the same side, in whatever rows or files it
    is (`CodedImages.keys`).

    Args:
        images: all images.
        seed: seed of the orders.
        described: their origin, number and hash, for the record of the run.
    """

    def __init__(
        self, images: CodedImages, seed: int = 0, described: dict[str, Any] | None = None
    ) -> None:
        self.described = described or {}
        parts = [_hash(key.partition("#")[0]) % HOLDOUT == 0 for key in images.keys]
        self.images = images
        self.seed = seed
        self.held = np.flatnonzero(parts)
        self.train_rows = np.flatnonzero(np.logical_not(parts))
        if not len(self.train_rows) or not len(self.held):
            raise TemperaError(
                f"{len(images)} images are too few: {len(self.held)} of them are in the 5% "
                f"hold-out and {len(self.train_rows)} are left for training; prepare a few hundred."
            )
        self._epoch = -1
        self._order = self.train_rows

    def train(self, positions: list[int]) -> CodedImages:
        """Training image p is entry p mod n of the order of epoch p // n."""
        return self.images[[self._at(position) for position in positions]]

    def holdout(self, positions: list[int]) -> CodedImages:
        """Held-out images, in the order of the shards."""
        return self.images[[int(self.held[position % len(self.held)]) for position in positions]]

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, len(self.train_rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.train_rows)
        return int(self._order[index])


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])


def shard_codes(
    target: TransformerTarget, tokenizer: ImageTokenizer, directory: Path, path: str, seed: int
) -> ShardCodes:
    """`train_data=shards`: the shards in `path`, which must belong to this tokenizer.

    Raises:
        TemperaError: see `tempera.data.shards.read_shards`.
    """
    shards = Path(path)
    images = read_shards(
        shards, identity_of(tokenizer), target.vocab_size, target.grid, target.length
    )
    return ShardCodes(images, seed, Manifest.load(shards).summary)


def encoded_codes(
    target: TransformerTarget,
    tokenizer: ImageTokenizer,
    directory: Path,
    source: Source,
    *,
    draws: bool,
    batch_size: Positive,
    seed: int,
    path: str | None = None,
    captions: CaptionCheck | None = None,
    processes: Processes | None = None,
    limit: Positive | None = None,
    shard_size: Positive | None = None,
    max_broken: NonNegativeInt = 1000,
) -> ShardCodes:
    """Images of `source`, or those that the target draws for its captions, encoded once and kept as
    shards, the same that `train_draft/prepare.py` writes.

    Args:
        source: captioned images, or captions.
        draws: the target draws the images; the seed and a caption's key determine one.
        batch_size: images encoded or drawn at a time.
        seed: seed of the images' orders.
        path: the directory of shards, which may be complete, partial or missing; by default
            `directory/CODES`.
        captions: entries whose captions it refuses are broken.
        processes: the processes that share the work; by default only this one.
        limit: number of images; None takes all.
        shard_size: source entries per shard; by default `SHARD_BATCHES` batches.
        max_broken: stop when more entries than this are unusable.

    Raises:
        TemperaError: the source is too small for a hold-out.
    """
    count = entries_to_read(source, limit)
    if count is not None and count < HOLDOUT:
        raise TemperaError(
            f"{count} images are too few for a 5% hold-out: give a few hundred",
            option="train_data.limit",
        )
    shards = directory / CODES if path is None else Path(path)
    encoder: CodeEncoder = VQEncoder(target.grid, tokenizer)
    if draws:
        encoder = TargetEncoder(target, tokenizer, seed)
    prepare(
        source,
        encoder,
        shards,
        shard_size=shard_size or SHARD_BATCHES * batch_size,
        batch_size=batch_size,
        limit=limit,
        max_broken=max_broken,
        captions=captions,
        processes=processes,
    )
    return shard_codes(target, tokenizer, directory, str(shards), seed)
