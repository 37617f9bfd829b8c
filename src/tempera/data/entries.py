"""What sources are made of: entries, and what is wrong with others."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import PIL.Image
from typing_extensions import override

from tempera.data.prompts import NOT_UTF8, UNPRINTABLE, text_of
from tempera.errors import shortened
from tempera.runtime.distributed import Processes

EncodedPicture = bytes | Path | PIL.Image.Image
"""Encoded bytes, a file, or a decoded image."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Files that list the pictures of a folder, as of Hugging Face's imagefolder."""


@dataclass(frozen=True)
class Entry:
    """A caption, with or without its image. `where` names file and line; entries whose images are
    known to be the same share the part of `key` before "#".
    """

    where: str
    key: str
    caption: str
    image: EncodedPicture | None = None


@dataclass(frozen=True)
class Broken:
    """An unusable entry: its place in the source, and the reason."""

    where: str
    why: str

    def __str__(self) -> str:
        return shortened(f"{self.where}: {self.why}", 300)


class Source(Protocol):
    """An ordered sequence of entries.

    Attributes:
        left_out: numbers of other things that `read` has met, by kind, in the plural.
    """

    left_out: Mapping[str, int] = {}

    def describe(self) -> dict[str, Any]:
        """Kind, place and a fingerprint that changes when the source does, for the manifest."""

    def count(self) -> int | None:
        """Number of entries, including broken ones; None if counting means reading them all."""
        return None

    def fetch(self, processes: Processes) -> None:
        """Download what `count` and `read` need, before any other work. All processes call this."""
        return

    def read(self, start: int) -> Iterator[Entry | Broken]:
        """The entries from position `start` on, in an order that is the same in every process and
        at every call; broken ones occupy a position too.
        """


class Listed(Source):
    """Entries that are known one by one.

    Args:
        items: in order.
        described: see `Source.describe`.
        left_out: see `Source`.
    """

    def __init__(
        self,
        items: Sequence[Entry | Broken],
        described: dict[str, Any],
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        self.items = items
        self.described = described
        self.left_out = left_out or {}

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def count(self) -> int | None:
        return len(self.items)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(self.items, start, None)


def shown(left_out: Mapping[str, int]) -> str:
    """Counts of what was left out, as a phrase: "1,000 .json files and 2 links"."""
    counts = [f"{times:,} {kind}" for kind, times in sorted(left_out.items())]
    return " and ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:])))


def row_entry(
    where: str,
    key: str,
    row: Mapping[str, Any],
    image: str | None,
    caption: str | None,
    folder: Path | None = None,
) -> Entry | Broken:
    """The entry in a row of a table.

    Args:
        where, key: see `Entry`.
        row: its cells by column.
        image: the column of the picture: encoded, {bytes, path}, or a path in the folder; None for
            captions alone.
        caption: the column of the caption, if there is one.
        folder: where pictures are that the row names; anywhere if it is None.
    """
    picture = picture_of(row.get(image)) if image else None
    if image and not picture:
        return Broken(where, "no image")
    if folder is None and isinstance(picture, str) and picture.startswith("hf://"):
        from huggingface_hub import HfFileSystem  # it takes a fifth of a second

        picture = bytes(HfFileSystem().cat_file(picture))
    text = text_of(row.get(caption)) if caption else None
    return usable_entry(where, key, text, picture, folder)


def picture_of(cell: Any) -> Any:
    """What a table's cell holds of a picture: encoded bytes, an image, or a path."""
    if isinstance(cell, dict):
        return cell.get("bytes") or cell.get("path")
    return cell


def usable_entry(
    where: str,
    key: str,
    caption: str | None,
    image: EncodedPicture | str | None,
    folder: Path | None = None,
) -> Entry | Broken:
    """The entry; a broken one if the caption is unusable, or if an image's name leads nowhere or
    out of the folder that it should be in.
    """
    if caption is None:
        return Broken(where, "no caption")
    if UNPRINTABLE.search(caption):
        return Broken(where, f"its caption is {NOT_UTF8}")
    if UNPRINTABLE.search(key):
        return Broken(where, "its name is not text")
    if isinstance(image, str):
        path = Path(image)
        if folder is not None and (path.is_absolute() or ".." in path.parts):
            return Broken(where, "its file name points outside the data set")
        path = path if folder is None else folder / path
        if not os.path.isfile(path):  # noqa: PTH113 (False for a name that is too long)
            return Broken(where, f"image {shortened(image)} is missing")
        image = path
    return Entry(where, key, caption, image)
