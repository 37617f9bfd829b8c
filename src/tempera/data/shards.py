"""Sharded image codes with captions: Parquet files and one `manifest.json` that describes them.

A shard has the columns key (string), caption (string) and codes (fixed-size list of int32, one
image in raster order). The manifest is rewritten after every shard, so a directory is consistent at
any moment: shards that the manifest does not list do not count.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from tempera.errors import TemperaError
from tempera.runtime.files import check_same, read_json, reason, replacing, sha256_file
from tempera.runtime.installation import command
from tempera.runtime.row_store import Numbers, read_table

FORMAT = 2
"""Raise it where shards that an earlier version made cannot be read, or would be made otherwise."""
MANIFEST = "manifest.json"

Positive = Annotated[int, Field(ge=1, lt=2**31)]


@pydantic.dataclasses.dataclass(frozen=True)
class Shard:
    """One Parquet file: `count` entries of the source became codes, and `broken` did not."""

    count: NonNegativeInt
    broken: NonNegativeInt
    sha256: str


@pydantic.dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a directory of shards.

    Attributes:
        tokenizer: identity of the image tokenizer that the codes belong to.
        encoder: how the codes were made: `{"kind": "vq" | "target", ...}` with the identities of
            the models used.
        source: where captions and images come from, with a fingerprint.
        grid: rows and columns of an image's codes.
        vocab_size: every code is less than this.
        broken: the first broken entries, as "place: reason".
        left_out: numbers of other things that the source held, by kind; known at the end.
    """

    tokenizer: str
    encoder: dict[str, Any]
    source: dict[str, Any]
    grid: tuple[Positive, Positive]
    vocab_size: Positive
    shard_size: Positive
    limit: Positive | None
    format: int = FORMAT
    complete: bool = False
    shards: tuple[Shard, ...] = ()
    broken: tuple[str, ...] = ()
    left_out: dict[str, NonNegativeInt] = Field(default_factory=dict)

    @property
    def count(self) -> int:
        """Images in all shards."""
        return sum(shard.count for shard in self.shards)

    @property
    def broken_count(self) -> int:
        """Number of source entries that did not become codes."""
        return sum(shard.broken for shard in self.shards)

    @property
    def next(self) -> int:
        """Source position after the last shard."""
        return self.count + self.broken_count

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that determines the shards' contents; equal recipes give equal codes."""
        skipped = ("complete", "shards", "broken", "left_out")
        return {name: value for name, value in asdict(self).items() if name not in skipped}

    @property
    def summary(self) -> dict[str, Any]:
        """What training records about its data: source, encoder, counts, and the shards' hash."""
        digest = hashlib.sha256(" ".join(shard.sha256 for shard in self.shards).encode())
        return {
            "source": self.source,
            "encoder": self.encoder,
            "tokenizer": self.tokenizer,
            "count": self.count,
            "broken": self.broken_count,
            "sha256": digest.hexdigest(),
        }

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read `directory/manifest.json`.

        Raises:
            TemperaError: it is missing, unreadable or in another format.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise TemperaError(
                f"{directory} has no {MANIFEST}: give a directory made by `{command('prepare')}`."
            )
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except ValidationError as problem:
            raise TemperaError(
                f"{path} is damaged ({reason(problem)}): prepare the shards again."
            ) from None


@dataclass(frozen=True)
class CodedImages:
    """Images as codes, with their captions.

    Attributes:
        keys: one per image; keys of the same image are equal up to the first `#`. Those of
            encoded pictures begin with a hash of the pixels.
        captions: one per image.
        codes: int32 [n, rows × columns], in raster order.
    """

    keys: list[str]
    captions: list[str]
    codes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Sequence[int]) -> "CodedImages":
        """The images with these indices, in this order."""
        return CodedImages(
            [self.keys[row] for row in rows],
            [self.captions[row] for row in rows],
            self.codes[list(rows)],
        )

    @property
    def tokens(self) -> Tensor:
        """The codes as a target's tokens, int64 [n, rows × columns]."""
        return torch.from_numpy(self.codes).long()


def write_shard(path: Path, images: CodedImages) -> str:
    """Write one shard atomically and return its sha256. Equal contents give equal bytes."""
    length = images.codes.shape[1]
    codes = pa.FixedSizeListArray.from_arrays(pa.array(images.codes.ravel(), pa.int32()), length)
    keys = pa.array(images.keys, pa.string())
    captions = pa.array(images.captions, pa.string())
    table = pa.table([keys, captions, codes], ["key", "caption", "codes"])
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return sha256_file(path)


def shard_file(directory: Path, number: int) -> Path:
    """The path of a shard."""
    return directory / f"shard-{number:05d}.parquet"


def is_intact(path: Path, shard: Shard) -> bool:
    """Whether the file of a listed shard is there and as it was written."""
    return path.is_file() and sha256_file(path) == shard.sha256


def is_complete(directory: Path) -> bool:
    """Whether a directory holds all shards of its source."""
    return (directory / MANIFEST).is_file() and Manifest.load(directory).complete


def read_shards(
    directory: Path,
    tokenizer: str,
    vocab_size: int,
    grid: tuple[int, int],
    length: int | None = None,
) -> CodedImages:
    """All images of a finished directory of shards, checked against the shards' hashes and against
    the target.

    Args:
        directory: of the shards.
        tokenizer, vocab_size, grid: the target's.
        length: tokens of an image, those of a preview included; by default those of the grid.

    Raises:
        TemperaError: shards are unfinished, empty, missing or damaged, or their codes are for
            another tokenizer, vocabulary or grid.
    """
    manifest = Manifest.load(directory)
    needed = {"format": FORMAT, "tokenizer": tokenizer, "grid": grid}
    check_same(directory, {name: getattr(manifest, name) for name in needed}, needed)
    advice = f"run `{command('prepare')}` with the same options"
    if not manifest.complete:
        raise TemperaError(f"the shards in {directory} are unfinished: {advice}.")
    hashes = [shard.sha256 for shard in manifest.shards if shard.count]
    codes = Numbers(
        0, min(vocab_size, manifest.vocab_size), whole=True, length=length or math.prod(grid)
    )
    rows: list[dict[str, Any]] = []
    for number, shard in enumerate(manifest.shards):
        path = shard_file(directory, number)
        if not is_intact(path, shard) or hashes.count(shard.sha256) > 1:
            raise TemperaError(
                f"{path} is missing, damaged or a copy of another shard: delete it, and {advice}."
            )
        part = read_table(path, {"key": None, "caption": None, "codes": codes})
        if len(part) != shard.count:
            raise TemperaError(
                f"{path} holds {len(part)} images, not {shard.count}: delete it, and {advice}."
            )
        rows += part
    return CodedImages(
        [row["key"] for row in rows],
        [row["caption"] for row in rows],
        np.array([row["codes"] for row in rows], np.int32),
    )
