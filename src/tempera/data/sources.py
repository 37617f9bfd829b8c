"""Sources of training captions and images: ordered sequences of entries, readable from any
position.
"""

import glob
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Protocol

import PIL.Image
import pyarrow.parquet as pq
from huggingface_hub import HfFileSystem
from typing_extensions import override

from tempera.data.prompts import TEXT_NAMES, UNPRINTABLE, field_of, rows_of, text_of
from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_text, reason, regular_file

SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp")
NAME = "file_name"
"""The column of `METADATA` that names the image."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""The name of a tar's member that belongs to a sample: what members share, and kind."""

EncodedPicture = bytes | Path | PIL.Image.Image
"""Encoded bytes, a file, or a decoded image."""


@dataclass(frozen=True)
class Entry:
    """A caption, with or without its image. `where` names file and line; entries of the same image
    share the part of `key` before "#".
    """

    where: str
    key: str
    caption: str
    image: EncodedPicture | None = None


@dataclass(frozen=True)
class Broken:
    """An unusable entry: its place in the source and the reason."""

    where: str
    why: str

    def __str__(self) -> str:
        return shortened(f"{self.where}: {self.why}", 300)


class Source(Protocol):
    """An ordered sequence of entries."""

    def describe(self) -> dict[str, Any]:
        """Kind, place and a fingerprint that changes when the source does, for the manifest."""

    def count(self) -> int | None:
        """Number of entries, including broken ones; None if counting means reading them all."""
        return None

    def fetch(self, processes: Processes) -> None:
        """Download what `count` and `read` need, before any other work. All processes call this."""
        return

    def read(self, start: int) -> Iterator[Entry | Broken]:
        """The entries from position `start` on; broken ones occupy a position too."""


class Listed(Source):
    """Entries that are known one by one. `described`: see `Source.describe`."""

    def __init__(self, entries: Sequence[Entry | Broken], described: dict[str, Any]) -> None:
        self.entries, self.described = entries, described

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def count(self) -> int | None:
        return len(self.entries)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(self.entries, start, None)


def image_folder(path: str, caption: str | None = None) -> Listed:
    """`source=imagefolder`: a folder of images with captions, either in one of `METADATA` with a
    column file_name, as Hugging Face's imagefolder, or in a .txt file beside each image.

    Args:
        path: the folder.
        caption: name of the caption column; None takes the first of `TEXT_NAMES` that exists.
    """
    folder = Path(path)
    found = sorted(folder.rglob("[!.]*")) if os.path.isdir(folder) else []  # noqa: PTH112 (see below)
    files = [one for one in found if _suffix(one) in SUFFIXES]
    if not files:
        raise TemperaError(
            f"there are no images in {shortened(path)}: give a folder of captioned images."
        )
    named = {one.name.lower(): one for one in folder.glob("*")}
    metadata = next((named[name] for name in METADATA if name in named), None)
    if metadata:
        rows = ((n, row if isinstance(row, dict) else {}) for n, row in rows_of(metadata))
        entries = [
            _row_entry(f"{metadata}:{n}", f"{row.get(NAME)}#{n}", row, NAME, caption, folder)
            for n, row in rows
        ]
    else:
        texts = {one.with_suffix(""): one for one in found if _suffix(one) == "txt"}
        entries = [_beside(one, texts.get(one.with_suffix("")), folder) for one in files]
    known = {"kind": "imagefolder", "path": path, "caption": caption}
    return Listed(
        entries, {**known, "fingerprint": _fingerprint([metadata] if metadata else files)}
    )


def _beside(image: Path, caption: Path | None, folder: Path) -> Entry | Broken:
    """An image whose caption is in a .txt beside it."""
    try:
        text = text_of(read_text(caption)) if caption else None
    except TemperaError as problem:
        return Broken(str(image), str(problem))
    return usable_entry(str(image), str(image.relative_to(folder)), text, image)


class Files(Source):
    """Files that hold many entries each. What cannot be read of one is a broken entry, after which
    the next file follows.

    Args:
        files: in order.
        entries: the entries of a file; may raise anything where the file is damaged.
        described: see `Source.describe`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        entries: Callable[[Path], Iterator[Entry | Broken]],
        **described: Any,
    ) -> None:
        self.files, self.entries = files, entries
        self.described = {**described, "fingerprint": _fingerprint(files)}

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(self._entries(), start, None)

    def _entries(self) -> Iterator[Entry | Broken]:
        for file in self.files:
            try:
                yield from self.entries(file)
            except Exception as problem:  # a decompressor may raise anything on damaged bytes
                yield Broken(str(file), f"the rest of it cannot be read ({reason(problem)})")


def tar_shards(path: str, caption: str | None = None) -> Files:
    """`source=webdataset`: WebDataset tar files. Members whose names agree up to the first dot form
    a sample; its caption is the .txt or a field of the .json.
    """
    files = matching(path, "tar")
    return Files(files, partial(_samples, caption), kind="webdataset", path=path, caption=caption)


def _samples(caption: str | None, file: Path) -> Iterator[Entry | Broken]:
    archive: Any
    with tarfile.open(file, ignore_zeros=True) as archive:  # skips damaged headers, too
        named = ((SAMPLE.fullmatch(member.name), member) for member in archive if member.isfile())
        parts = ((match[1], match[2].lower(), member) for match, member in named if match)
        for key, members in groupby(parts, lambda part: part[0]):
            content = {kind: archive.extractfile(one).read() for _, kind, one in members}
            yield _sample(content, caption, f"{file}/{key}", f"{file.name}/{key}")
        if not archive.getmembers() or archive.fileobj.tell() % tarfile.BLOCKSIZE:
            raise EOFError("it is cut off, or no tar file")


def _sample(
    content: Mapping[str, bytes], caption: str | None, where: str, key: str
) -> Entry | Broken:
    image = next((content[kind] for kind in SUFFIXES if content.get(kind)), None)
    if image is None:
        return Broken(where, "no image")
    try:
        text = None if caption else text_of(content.get("txt", b"").decode("utf-8-sig"))
        text = text or field_of(json.loads(content.get("json", b"null")), caption)
    except (ValueError, RecursionError) as problem:
        return Broken(where, f"its caption cannot be read ({reason(problem)})")
    return usable_entry(where, key, text, image)


def parquet(path: str, image: str = "image", caption: str | None = None) -> Files:
    """`source=parquet`: Parquet files with a caption column and an image column, which holds
    encoded bytes, {bytes, path} structs (Hugging Face's Image) or paths relative to the files.
    """
    known = {"kind": "parquet", "path": path, "image": image, "caption": caption}
    return Files(matching(path, "parquet"), partial(_rows, image, caption), **known)


def _rows(image: str, caption: str | None, file: Path) -> Iterator[Entry | Broken]:
    content = pq.ParquetFile(file)
    columns = _columns(content.schema_arrow.names, image, caption)
    batches = content.iter_batches(64, columns=columns)
    for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
        place = f"{file}:{number + 1}", f"{file.name}/{number}"
        yield _row_entry(*place, row, image, caption, file.parent)


def _columns(names: Sequence[str], image: str | None, caption: str | None) -> list[str]:
    """The columns to read: that of the images, and those that the captions can be in."""
    wanted = [image] if image else []
    wanted += [caption] if caption else [name for name in names if name.lower() in TEXT_NAMES]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"it has no column {missing[0]}")
    return wanted


def _row_entry(
    where: str,
    key: str,
    row: dict[str, Any],
    image: str | None,
    caption: str | None,
    folder: Path | None = None,
) -> Entry | Broken:
    picture = row.get(image) if image else None
    if isinstance(picture, dict):
        picture = picture.get("bytes") or picture.get("path")
    if image and not picture:
        return Broken(where, "no image")
    if folder is None and isinstance(picture, str) and picture.startswith("hf://"):
        picture = bytes(HfFileSystem().cat_file(picture))
    return usable_entry(where, key, field_of(row, caption), picture, folder)


@dataclass(frozen=True)
class Stream(Source):
    """`source=dataset`: anything that `datasets` can stream: a data set on the hub, a local one's
    directory, or a builder with `data_files`. What it cannot read to its end is an error.

    Args:
        path, name, split, data_files: see `datasets.load_dataset`.
        image: column of the images, encoded or as paths; None for captions alone.
        caption: column of the captions; None takes the first of `TEXT_NAMES` that exists.
    """

    path: str
    name: str | None = None
    split: str = "train"
    image: str | None = "image"
    caption: str | None = None
    data_files: str | None = None

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", **asdict(self)}

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        position = start
        try:
            for row in self._rows().skip(start):
                key = str(position)
                yield _row_entry(f"{self.path} sample {key}", key, row, self.image, self.caption)
                position += 1
        except Exception as problem:  # a builder may raise anything, and cannot continue
            raise TemperaError(
                f"datasets cannot read {self.path} from row {position} on ({reason(problem)}): "
                "check the source's path, split and columns, and that its files are whole."
            ) from problem

    def _rows(self) -> Any:
        import datasets  # takes seconds

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it
        rows = datasets.load_dataset(
            self.path, self.name, split=self.split, data_files=self.data_files, streaming=True
        )
        rows = rows.select_columns(_columns(rows.column_names, self.image, self.caption))
        if self.image is None:
            return rows
        return rows.cast_column(self.image, datasets.Image(decode=False))


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


def _suffix(file: Path) -> str:
    return file.suffix.lower().removeprefix(".")


def matching(pattern: str, suffix: str) -> list[Path]:
    """The files of a directory whose names end so, in any case, or those that match a glob pattern,
    in order.
    """
    folder = Path(pattern)
    if os.path.isdir(folder):  # noqa: PTH112 (the same)
        files = sorted(one for one in folder.glob("[!.]*") if _suffix(one) == suffix)
    else:
        files = sorted(map(Path, glob.glob(pattern)))  # noqa: PTH207 (absolute patterns)
    if not files:
        raise TemperaError(
            f"{shortened(pattern)} matches no .{suffix} file: give a directory of them, or a glob "
            "pattern."
        )
    return [regular_file(file) for file in files]


def _fingerprint(files: Sequence[Path]) -> str:
    """A short hash of names and sizes, to notice that a source has changed."""
    listing = "\n".join(f"{file} {file.stat().st_size}" for file in files if file.exists())
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
