"""Sources of training captions and images: ordered sequences of entries, readable from any
position. `datasets` streams tar shards, Parquet files and data sets of the hub; a folder's metadata
is read as prompt files are.
"""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import PIL.Image
from huggingface_hub import HfFileSystem
from typing_extensions import override

from tempera.data.prompts import TEXT_NAMES, UNPRINTABLE, field_of, rows_of, text_of
from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_text, reason, regular_file

SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp")
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")

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
    folder = existing(path, "an image folder")
    found = sorted(folder.rglob("[!.]*"))
    files = [one for one in found if _suffix(one) in SUFFIXES]
    named = {one.name.lower(): one for one in folder.glob("*")}
    metadata = next((named[name] for name in METADATA if name in named), None)
    if not files:
        raise TemperaError(f"{path} holds no images: give a folder of captioned images.")
    if metadata:
        entries = list[Entry | Broken]()
        for number, row in rows_of(metadata):
            name = row.get("file_name") if isinstance(row, dict) else None
            place = f"{metadata}:{number}", f"{name}#{number}"
            entries.append(
                usable_entry(*place, field_of(row, caption), name, folder)
                if name and isinstance(name, str)
                else Broken(place[0], "no file_name")
            )
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


class Stream(Source):
    """What the `datasets` library streams. An entry without a usable picture or caption is broken;
    a file that `datasets` cannot read to its end is an error.

    Args:
        path: name of a builder or of a data set, for `datasets.load_dataset`.
        image: column of the images, encoded or as paths; None for captions alone.
        caption: column of the captions; None takes the first of `TEXT_NAMES` that exists.
        files: files on this machine, for a builder.
        options: further arguments of `load_dataset`.
    """

    def __init__(
        self,
        path: str,
        image: str | None,
        caption: str | None,
        files: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        self.path, self.image, self.caption, self.files = path, image, caption, files
        self.options, self.folder = options, files[0].parent if files else None

    @override
    def describe(self) -> dict[str, Any]:
        known = {"kind": self.path, **self.options, "image": self.image, "caption": self.caption}
        return {**known, "fingerprint": _fingerprint(self.files)} if self.files else known

    @override
    def count(self) -> int | None:
        return None

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        position, rows = start, None
        while True:
            try:
                rows = iter(self._stream().skip(start)) if rows is None else rows
                row = next(rows, None)
                entry = None if row is None else self._read(row, position)
            except Exception as problem:  # a builder may raise anything, and cannot continue
                raise TemperaError(
                    f"datasets cannot read {self.folder or self.path} from row {position} on "
                    f"({reason(problem)}): check the source's path, split and columns, and that "
                    "its files are whole."
                ) from problem
            if entry is None:
                return
            yield entry
            position += 1

    def _read(self, row: dict[str, Any], position: int) -> Entry | Broken:
        key = str(position)
        if self.path == "webdataset":
            key = f"{Path(row['__url__']).name}/{row['__key__']}"
            row = {name.lower(): value for name, value in row.items() if value is not None}
            text = None if self.caption else text_of(row.get("txt"))
            text = text or field_of(row.get("json"), self.caption)
            image = next((row[name] for name in SUFFIXES if row.get(name)), None)
        else:
            text, image = field_of(row, self.caption), row[self.image] if self.image else None
        if isinstance(image, dict):
            image = image["bytes"] or image["path"]
        where = f"{self.folder or self.path} sample {key}"
        if self.image and not image:
            return Broken(where, "no image")
        if isinstance(image, str) and image.startswith("hf://"):  # of a data set on the hub
            image = bytes(HfFileSystem().cat_file(image))
        return usable_entry(where, key, text, image, self.folder)

    def _stream(self) -> Any:
        import datasets  # takes seconds

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it
        picture, options = datasets.Image(decode=False), dict(self.options)
        if self.files:
            options["data_files"] = [glob.escape(str(file.absolute())) for file in self.files]
        if self.path == "webdataset":
            text = datasets.Value("string")
            members = {"txt": text, "json": datasets.Json(), **dict.fromkeys(SUFFIXES, picture)}
            members |= {name.upper(): kind for name, kind in members.items()}
            options["features"] = datasets.Features({"__key__": text, "__url__": text, **members})
            return datasets.load_dataset(self.path, streaming=True, **options)
        stream = datasets.load_dataset(self.path, streaming=True, **options)
        named = [name for name in stream.column_names if name.lower() in TEXT_NAMES]
        captions = [self.caption] if self.caption else named or [TEXT_NAMES[0]]
        if self.image is None:
            return stream.select_columns(captions)
        return stream.select_columns([self.image, *captions]).cast_column(self.image, picture)


def tar_shards(path: str, caption: str | None = None) -> Stream:
    """`source=webdataset`: WebDataset tar files. Members whose names agree up to the first dot form
    a sample; its caption is the .txt or a field of the .json.
    """
    return Stream("webdataset", "image", caption, matching(path, "tar"), split="train")


def parquet(path: str, image: str = "image", caption: str | None = None) -> Stream:
    """`source=parquet`: Parquet files with a caption column and an image column, which holds
    encoded bytes, {bytes, path} structs (Hugging Face's Image) or paths relative to the files.
    """
    return Stream("parquet", image, caption, matching(path, "parquet"), split="train")


def dataset(
    path: str,
    name: str | None = None,
    split: str = "train",
    image: str | None = "image",
    caption: str | None = None,
    data_files: str | None = None,
) -> Stream:
    """`source=dataset`: anything that `datasets` can stream: a data set on the hub, a local one's
    directory, or a builder with `data_files`.
    """
    return Stream(path, image, caption, name=name, split=split, data_files=data_files)


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


def existing(path: str, what: str) -> Path:
    """The path; raise TemperaError if nothing is there."""
    if not os.path.exists(path):  # noqa: PTH110 (the same)
        raise TemperaError(f"{shortened(path)} does not exist: give the path of {what}.")
    return Path(path)


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
    sizes = (f"{file} {file.stat().st_size}" for file in files if file.exists())
    listing = "\n".join(sizes)
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
