"""What sources are made of: entries, what is wrong with others, and the tally of both.

A source is given *parts*: files of a folder, members of an archive, rows of a table. Each of them
becomes part of an entry, is refused with a reason, or is left out and counted.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import PIL.Image
from huggingface_hub import HfFileSystem
from typing_extensions import override

from tempera.data.prompts import NOT_UTF8, UNPRINTABLE, field_of
from tempera.errors import shortened
from tempera.runtime.distributed import Processes

EncodedPicture = bytes | Path | PIL.Image.Image
"""Encoded bytes, a file, or a decoded image."""


@dataclass(frozen=True)
class Entry:
    """A caption, with or without its image, made of `parts` parts of its source. `where` names file
    and line; entries of the same image share the part of `key` before "#".
    """

    where: str
    key: str
    caption: str
    image: EncodedPicture | None = None
    parts: int = 1


@dataclass(frozen=True)
class Broken:
    """An unusable entry: its place in the source, the reason, and its number of parts."""

    where: str
    why: str
    parts: int = 1

    def __str__(self) -> str:
        return shortened(f"{self.where}: {self.why}", 300)


@dataclass(frozen=True)
class LeftOut:
    """Parts that belong to no entry: what they are, in the plural, and how many."""

    kind: str
    parts: int = 1


Item = Entry | Broken | LeftOut


@dataclass
class Tally:
    """What became of the parts that a source was given, as far as it has been read.

    Attributes:
        given: parts that the reader met, counted when it meets them.
        used, refused: parts of entries, and of broken entries.
        left_out: numbers of other parts, by kind.
    """

    given: int = 0
    used: int = 0
    refused: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def accounted(self) -> int:
        """Parts that were used, refused or left out."""
        return self.used + self.refused + self.left_out.total()

    def add(self, item: Item) -> None:
        """Account for the parts of an item."""
        if isinstance(item, Entry):
            self.used += item.parts
        elif isinstance(item, Broken):
            self.refused += item.parts
        else:
            self.left_out[item.kind] += item.parts

    def check(self) -> None:
        """Raise RuntimeError if the reader lost a part, or made one up: it has a bug."""
        if self.given != self.accounted:
            raise RuntimeError(f"a reader met {self.given} parts and told of {self.accounted}")


def shown(left_out: Mapping[str, int]) -> str:
    """Counts of what was left out, as a phrase: "1,000 .json members and 2 links"."""
    counts = [f"{parts:,} {kind}" for kind, parts in sorted(left_out.items())]
    return " and ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:])))


class Source(Protocol):
    """An ordered sequence of entries.

    Attributes:
        tally: what became of everything that the last `read` has met (`tallied`).
    """

    tally: Tally = Tally()  # of nothing; each `read` sets its own

    def describe(self) -> dict[str, Any]:
        """Kind, place and a fingerprint that changes when the source does, for the manifest."""

    def count(self) -> int | None:
        """Number of entries, including broken ones; None if counting means reading them all."""
        return None

    def fetch(self, processes: Processes) -> None:
        """Download what `count` and `read` need, before any other work. All processes call this."""
        return

    def read(self, start: int) -> Iterator[Entry | Broken]:
        """The entries from position `start` on; broken ones occupy a position too. A source that
        does not start at the first entry tallies what it reads.
        """


def tallied(source: Source, items: Callable[[Tally], Iterator[Item]]) -> Iterator[Entry | Broken]:
    """The entries among the items of a source, which are counted in its tally.

    Args:
        source: gets a new tally.
        items: everything that the source is given, in order. It counts each part in `given` when it
            meets the part, and in the `parts` of one item.

    Raises:
        RuntimeError: at the end, if the numbers differ.
    """
    source.tally = tally = Tally()
    for item in items(tally):
        tally.add(item)
        if not isinstance(item, LeftOut):
            yield item
    tally.check()


class Listed(Source):
    """Entries that are known one by one, and parts that are left out.

    Args:
        items: in order.
        described: see `Source.describe`.
        given: number of parts that became the items; by default that of their own.
    """

    def __init__(
        self, items: Sequence[Item], described: dict[str, Any], given: int | None = None
    ) -> None:
        self.items = items
        self.described = described
        self.given = sum(item.parts for item in items) if given is None else given

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def count(self) -> int | None:
        return sum(not isinstance(item, LeftOut) for item in self.items)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(tallied(self, self._all), start, None)

    def _all(self, tally: Tally) -> Iterator[Item]:
        tally.given += self.given
        yield from self.items


def row_entry(
    where: str,
    key: str,
    row: dict[str, Any],
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
        caption: the column of the caption; None takes the first of `TEXT_NAMES` that exists.
        folder: where pictures are that the row names; anywhere if it is None.
    """
    picture = row.get(image) if image else None
    if isinstance(picture, dict):
        picture = picture.get("bytes") or picture.get("path")
    if image and not picture:
        return Broken(where, "no image")
    if folder is None and isinstance(picture, str) and picture.startswith("hf://"):
        picture = bytes(HfFileSystem().cat_file(picture))
    return usable_entry(where, key, field_of(row, caption), picture, folder)


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
