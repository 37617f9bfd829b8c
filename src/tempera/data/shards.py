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
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, reason, replacing, sha256_file
from tempera.runtime.installation import command
from tempera.runtime.row_store import Numbers, read_table

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
    """

    tokenizer: str
    encoder: dict[str, Any]
    source: dict[str, Any]
    grid: tuple[Positive, Positive]
    vocab_size: Positive
    shard_size: Positive
    limit: Positive | None
    format: Literal[1] = 1
    complete: bool = False
    shards: tuple[Shard, ...] = ()
    broken: tuple[str, ...] = ()

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
        skipped = ("complete", "shards", "broken")
        return {name: value for name, value in asdict(self).items() if name not in skipped}

    @property
    def summary(self) -> dict[str, Any]:
        """What training records about its data: source, encoder, counts, and the shards' hash."""
        digest = hashlib.sha256(" ".join(shard.sha256 for shard in self.shards).encode())
        known = {name: getattr(self, name) for name in ("source", "encoder", "tokenizer", "count")}
        return {**known, "broken": self.broken_count, "sha256": digest.hexdigest()}

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read `directory/manifest.json`.

        Raises:
            TemperaError: it is missing, unreadable or in another format.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise TemperaError(
                f"{directory} holds no {MANIFEST}: give a directory made by `{command('prepare')}`."
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
        keys: one per image; keys of the same image are equal up to the first `#`.
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
    texts = (pa.array(values, pa.string()) for values in (images.keys, images.captions))
    table = pa.table([*texts, codes], ["key", "caption", "codes"])
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return sha256_file(path)


def read_shard(path: Path, count: int, length: int, vocab_size: int) -> CodedImages:
    """Read a whole shard of `count` images of `length` codes below `vocab_size`.

    Raises:
        TemperaError: the file is not such a shard.
    """
    columns = {"key": None, "caption": None, "codes": Numbers(0, vocab_size, length)}
    rows = read_table(path, columns)
    if len(rows) != count:
        raise TemperaError(
            f"{path} holds {len(rows)} images and not {count}: prepare the shards again."
        )
    codes = np.array([row["codes"] for row in rows], np.int32).reshape(-1, length)
    return CodedImages([row["key"] for row in rows], [row["caption"] for row in rows], codes)


def shard_file(directory: Path, number: int) -> Path:
    """The path of a shard."""
    return directory / f"shard-{number:05d}.parquet"


def check_shard(path: Path, shard: Shard) -> str | None:
    """What is wrong with a listed shard; None if it is intact."""
    if not path.is_file():
        return f"shard {path} is missing"
    if sha256_file(path) != shard.sha256:
        return f"shard {path} is damaged (its sha256 differs from the one in {MANIFEST})"
    return None


def read_shards(
    directory: Path, tokenizer: str, vocab_size: int, grid: tuple[int, int]
) -> CodedImages:
    """All images of a finished directory of shards, checked against the shards' hashes and against
    the target's tokenizer, vocabulary and grid.

    Raises:
        TemperaError: shards are unfinished, empty, missing or damaged, or their codes are for
            another tokenizer, vocabulary or grid.
    """
    manifest = Manifest.load(directory)
    shards = [(shard_file(directory, n), shard) for n, shard in enumerate(manifest.shards)]
    if problem := _misfit(manifest, tokenizer, vocab_size, grid) or _damage(manifest, shards):
        raise TemperaError(f"the shards in {directory} cannot be used: {problem}.")
    form = math.prod(grid), manifest.vocab_size
    parts = [read_shard(path, shard.count, *form) for path, shard in shards]
    return CodedImages(
        [key for part in parts for key in part.keys],
        [caption for part in parts for caption in part.captions],
        np.concatenate([part.codes for part in parts]),
    )


def _misfit(
    manifest: Manifest, tokenizer: str, vocab_size: int, grid: tuple[int, int]
) -> str | None:
    """Why a target cannot use the shards."""
    if manifest.tokenizer != tokenizer:
        return (
            f"they were made with tokenizer {manifest.tokenizer}, but the target's is {tokenizer}"
        )
    if manifest.vocab_size > vocab_size or manifest.grid != grid:
        rows, columns = manifest.grid
        return (
            f"they hold {rows}×{columns} codes below {manifest.vocab_size}, but the target draws "
            f"{grid[0]}×{grid[1]} below {vocab_size}: prepare shards for this target"
        )
    return None


def _damage(manifest: Manifest, shards: Sequence[tuple[Path, Shard]]) -> str | None:
    """Why nobody can use the shards."""
    again = f"run `{command('prepare')}` with the same options to"
    hashes = [shard.sha256 for shard in manifest.shards if shard.count]
    if not manifest.complete:
        return f"they are unfinished: {again} complete them"
    if not manifest.count:
        return "they hold no images: prepare them from another source"
    if len(set(hashes)) < len(hashes):
        return "one of them is listed twice: prepare them in another directory"
    damage = next(filter(None, (check_shard(*shard) for shard in shards)), None)
    return f"{damage}: {again} rebuild it" if damage else None
