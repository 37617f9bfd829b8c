"""Sources of training captions and images: ordered sequences of entries, readable from any
position.

These readers do not use the builders of `datasets`, because a builder stops at the first damaged
row and cannot say which line of which file it was. `Dataset` wraps builders and hub data sets for
all other formats.
"""

import csv
import glob
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from tempera.errors import TemperaError, shortened
from tempera.runtime.distributed import Processes
from tempera.runtime.files import read_json, regular_file
from tempera.runtime.image_files import decode_picture

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
CAPTION_NAMES = ("caption", "text", "prompt", "top_caption", "TEXT")
"""Names of columns or fields that are tried in turn if none is given."""
OUTSIDE = "its file name points outside the data set"
"""Why an entry is broken whose image is elsewhere."""


@dataclass(frozen=True)
class Span:
    """A byte range of a file, read on demand, so that each process reads only the pictures that it
    encodes.
    """

    file: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """The bytes."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


EncodedPicture = bytes | Path | Span | NDArray[np.float32] | PIL.Image.Image
"""Encoded bytes, a file or a part of one, an array [h, w, 3] in [0, 1], or a decoded image."""


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

    def to_store(self) -> dict[Path, int]:
        """About how many bytes `fetch` will write, by directory. Downloads nothing."""
        return {}

    def fetch(self, processes: Processes) -> None:
        """Download what `count` and `read` need, before any other work. All processes call this and
        share the downloads.
        """
        return

    def read(self, start: int) -> Iterator[Entry | Broken]:
        """The entries from position `start` on; broken ones occupy a position too."""


def decoded(image: EncodedPicture) -> PIL.Image.Image:
    """Decode any picture into an RGB image.

    Raises:
        OSError: it cannot be decoded, or is implausibly large.
    """
    if isinstance(image, np.ndarray):
        return PIL.Image.fromarray((image * 255).round().clip(0, 255).astype(np.uint8))
    return decode_picture(image.read() if isinstance(image, Span) else image)


class ImageFolder(Source):
    """A folder of images with captions, either in `metadata.jsonl` or `metadata.csv` with a column
    file_name (like Hugging Face's imagefolder), or in a .txt file beside each image. `caption`
    names the caption column; by default the first of `CAPTION_NAMES` that exists.
    """

    def __init__(self, path: str, caption: str | None = None) -> None:
        self.path, self.caption = _existing(path, "an image folder"), caption
        self.metadata = next(
            (
                self.path / name
                for name in ("metadata.jsonl", "metadata.csv")
                if (self.path / name).is_file()
            ),
            None,
        )
        self.images = (
            []
            if self.metadata
            else sorted(p for p in self.path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        )
        if self.metadata is None and not self.images:
            raise TemperaError(
                f"{self.path} holds neither metadata.jsonl, metadata.csv nor images: give a "
                "folder of captioned images."
            )

    @override
    def describe(self) -> dict[str, Any]:
        files = [self.metadata] if self.metadata else self.images
        return {
            "kind": "imagefolder",
            "path": str(self.path),
            "caption": self.caption,
            "fingerprint": _fingerprint(files),
        }

    @override
    def count(self) -> int | None:
        if self.metadata is None:
            return len(self.images)
        return sum(1 for _ in self._rows(self.metadata))

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        if self.metadata is None:
            yield from (self._beside(image) for image in self.images[start:])
        else:
            yield from (
                self._listed(where, row)
                for where, row in islice(self._rows(self.metadata), start, None)
            )

    @staticmethod
    def _rows(metadata: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
        return _jsonl_rows(metadata) if metadata.suffix == ".jsonl" else _csv_rows(metadata)

    def _beside(self, image: Path) -> Entry | Broken:
        text = image.with_suffix(".txt")
        try:
            caption = regular_file(text).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as problem:
            return Broken(str(text), f"unreadable caption ({_reason(problem)})")
        return _entry(str(image), str(image.relative_to(self.path)), caption, image)

    def _listed(self, where: str, row: dict[str, Any] | str) -> Entry | Broken:
        if isinstance(row, str):
            return Broken(where, row)
        name, caption = row.get("file_name"), _caption_of(row, self.caption)
        if not isinstance(name, str) or not name:
            return Broken(where, "no file_name")
        if fault := _fault(self.path, name):
            return Broken(where, fault)
        return _entry(where, f"{name}#{where.rpartition(':')[2]}", caption, self.path / name)


class TarShards(Source):
    """WebDataset tar files. Members whose names agree up to the first dot form a sample; its
    caption is the .txt or a field of the .json.
    """

    def __init__(self, path: str, caption: str | None = None) -> None:
        self.files, self.caption = _matching(path, ".tar"), caption

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "kind": "webdataset",
            "files": len(self.files),
            "caption": self.caption,
            "fingerprint": _fingerprint(self.files),
        }

    @override
    def count(self) -> int | None:
        # img2dataset writes one beside each archive
        records = [file.with_name(f"{file.stem}_stats.json") for file in self.files]
        try:
            return sum(int(json.loads(record.read_text())["successes"]) for record in records)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice((entry for file in self.files for entry in self._samples(file)), start, None)

    def _samples(self, file: Path) -> Iterator[Entry | Broken]:
        key, seen = "", 0
        members: dict[str, Any] = {}  # bytes of captions, and pictures
        try:
            with tarfile.open(regular_file(file)) as archive:
                plain = isinstance(archive.fileobj, io.BufferedReader)  # not compressed
                for member in archive:
                    if not member.isfile():
                        continue
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    if members and key != f"{folder}/{stem}":
                        yield self._sample(file, key, members)
                        members = {}
                    key, seen = f"{folder}/{stem}", seen + 1
                    skipped = (
                        plain
                        and not member.issparse()
                        and f".{suffix.lower()}" not in (".txt", ".json")
                    )
                    handle = None if skipped else archive.extractfile(member)
                    members[f".{suffix.lower()}"] = (
                        handle.read() if handle else Span(file, member.offset_data, member.size)
                    )
                if members:
                    yield self._sample(file, key, members)
                elif not seen:
                    yield Broken(str(file), "the archive is empty")
        except Exception as problem:  # damaged archives and compression raise many kinds
            yield Broken(
                str(file), f"the archive is damaged after {seen} members ({_reason(problem)})"
            )

    def _sample(self, file: Path, key: str, members: dict[str, Any]) -> Entry | Broken:
        where = f"{file} sample {key.lstrip('/')}"
        image = next((members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members), None)
        if (key.startswith("/") and key.count("/") > 1) or ".." in key.split("/"):
            return Broken(where, OUTSIDE)
        if image is None:
            return Broken(where, "no image")
        try:
            fields = json.loads(members.get(".json", b"{}"))
            text = members[".txt"].decode() if ".txt" in members and self.caption is None else None
        except (ValueError, RecursionError) as problem:
            return Broken(where, f"unreadable caption ({_reason(problem)})")
        return _entry(
            where,
            f"{file.name}/{key.lstrip('/')}",
            text or _caption_of(fields, self.caption),
            image,
        )


class ParquetShards(Source):
    """Parquet files with a caption column and an image column, which holds encoded bytes, {bytes,
    path} structs (Hugging Face's Image) or paths relative to the file. Files of URLs, such as
    LAION-COCO, are read by `tempera.data.laion_coco`.
    """

    def __init__(self, path: str, image: str = "image", caption: str | None = None) -> None:
        self.files, self.image, self.caption = _matching(path, ".parquet"), image, caption

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "kind": "parquet",
            "files": len(self.files),
            "image": self.image,
            "caption": self.caption,
            "fingerprint": _fingerprint(self.files),
        }

    @override
    def count(self) -> int | None:
        return sum(map(_parquet_rows, self.files))

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        """See `Source`; a file that cannot be read is one broken entry."""
        skip = start
        for file in self.files:
            try:
                opened = pq.ParquetFile(regular_file(file))
            except (pa.ArrowException, OSError, ValueError) as problem:
                if skip == 0:
                    yield Broken(str(file), f"unreadable parquet ({_reason(problem)})")
                skip = max(skip - 1, 0)
                continue
            if skip >= opened.metadata.num_rows:
                skip -= opened.metadata.num_rows
                continue
            yield from self._rows(file, opened, skip)
            skip = 0

    def _rows(self, file: Path, opened: pq.ParquetFile, skip: int) -> Iterator[Entry | Broken]:
        names = opened.schema_arrow.names
        caption = self.caption or next(
            (name for name in CAPTION_NAMES if name in names), CAPTION_NAMES[0]
        )
        for column, option in ((self.image, "image"), (caption, "caption")):
            if column not in names:
                raise TemperaError(
                    f"{file} has no column {column!r} (it has {', '.join(names)}): name the "
                    f"right one with {option}=."
                )
        group = position = 0
        # the loop ends, because `skip` is a row of this file
        while position + (rows := opened.metadata.row_group(group).num_rows) <= skip:
            group, position = group + 1, position + rows
        for number in range(group, opened.num_row_groups):
            end = position + opened.metadata.row_group(number).num_rows
            try:
                for batch in opened.iter_batches(64, [number], [self.image, caption]):
                    for row in batch.to_pylist():
                        if position >= skip:
                            where = f"{file} row {position}"
                            yield self._row(
                                where,
                                f"{file.name}/{position}",
                                row[caption],
                                row[self.image],
                                file.parent,
                            )
                        position += 1
            except (pa.ArrowException, OSError, ValueError) as problem:
                # the rest of the group cannot be read row by row
                for lost in range(max(position, skip), end):
                    yield Broken(f"{file} row {lost}", f"unreadable row group ({_reason(problem)})")
            position = end

    def _row(self, where: str, key: str, caption: Any, value: Any, folder: Path) -> Entry | Broken:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            if fault := _fault(folder, value):
                return Broken(where, fault)
            value = folder / value
        if not isinstance(value, bytes | Path) or not value:
            return Broken(where, "no image")
        return _entry(where, key, caption, value)


class CocoCaptions(Source):
    """An MS-COCO captions file. With `images`, each entry has its image from that directory;
    without, entries are captions from which the target generates images. `per_image` is the most
    captions per image; 0 keeps all.
    """

    def __init__(self, path: str, images: str | None = None, per_image: int = 1) -> None:
        self.path = regular_file(_existing(path, "a captions file"))
        self.images = _existing(images, "an image directory") if images else None
        if per_image < 0:
            raise TemperaError(
                f"per_image={per_image} is not possible: give how many captions to take per "
                "image, or 0 for all."
            )
        self.per_image = per_image
        content = read_json(self.path)
        images_known, annotations = content.get("images", []), content.get("annotations")
        if not isinstance(annotations, list) or not isinstance(images_known, list):
            raise TemperaError(
                f"{self.path} is not an MS-COCO captions file: give one with lists of images and "
                "annotations."
            )
        self.annotations: list[Any] = annotations
        self.names = {
            image["id"]: image["file_name"]
            for image in images_known
            if isinstance(image, dict)
            and isinstance(image.get("id"), int | str)
            and isinstance(image.get("file_name"), str)
        }

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "kind": "coco",
            "path": str(self.path),
            "images": str(self.images) if self.images else None,
            "per_image": self.per_image,
            "fingerprint": _fingerprint([self.path]),
        }

    @override
    def count(self) -> int | None:
        return sum(1 for _ in self._chosen())

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(self._all(), start, None)

    def _all(self) -> Iterator[Entry | Broken]:
        for index, annotation in self._chosen():
            where = f"{self.path} annotation {index}"
            if annotation is None:
                yield Broken(where, "no image_id")
            else:
                image_id = annotation["image_id"]
                yield self._one(
                    where,
                    image_id,
                    f"{image_id}#{annotation.get('id', index)}",
                    annotation.get("caption"),
                )

    def _chosen(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Annotations with their numbers, at most `per_image` per image; None if malformed."""
        seen: dict[Any, int] = {}
        for index, annotation in enumerate(self.annotations):
            if not isinstance(annotation, dict) or not isinstance(
                annotation.get("image_id"), int | str
            ):
                yield index, None
                continue
            image_id = annotation["image_id"]
            seen[image_id] = seen.get(image_id, 0) + 1
            if not self.per_image or seen[image_id] <= self.per_image:
                yield index, annotation

    def _one(self, where: str, image_id: Any, key: str, caption: Any) -> Entry | Broken:
        if self.images is None:
            return _entry(where, key, caption, None)
        name = str(self.names.get(image_id, f"{image_id}.jpg"))
        if fault := _fault(self.images, name):
            return Broken(where, fault)
        return _entry(where, key, caption, self.images / name)


class Dataset(Source):
    """Anything that the `datasets` library can stream: a builder with local files, a local data
    set's directory, or a data set on the hub.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        image: str | None = "image",
        caption: str | None = None,
        data_files: str | None = None,
    ) -> None:
        self.options = {"path": path, "name": name, "split": split, "data_files": data_files}
        self.image, self.caption = image, caption

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", **self.options, "image": self.image, "caption": self.caption}

    @override
    def count(self) -> int | None:
        splits = self._stream().info.splits or {}  # known from the data set's card or builder
        split = splits.get(str(self.options["split"]))
        return split.num_examples or None if split else None

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        """See `Source`; where the data set's builder fails, the last entry is broken."""
        position, rows = start, iter(self._stream().skip(start))
        while True:
            where = f"{self.options['path']} row {position}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as problem:  # a builder may raise anything, and cannot continue
                yield Broken(where, f"the data set ends here ({_reason(problem)})")
                return
            value = row.get(self.image) if self.image else None
            if isinstance(value, dict):
                path = value.get("path")
                value = value.get("bytes") or (Path(path) if path else None)
            if self.image and value is None:
                yield Broken(where, "no image")
            else:
                yield _entry(where, str(position), _caption_of(row, self.caption), value)
            position += 1

    def _stream(self) -> Any:
        import datasets

        try:
            stream = datasets.load_dataset(**self.options, streaming=True)
            if self.image:
                stream = stream.cast_column(self.image, datasets.Image(decode=False))
            return stream
        except Exception as problem:  # a builder may raise anything
            raise TemperaError(
                f"datasets cannot load {self.options['path']} ({_reason(problem)}): check path "
                "and split."
            ) from problem


def _entry(where: str, key: str, caption: Any, image: EncodedPicture | None) -> Entry | Broken:
    """The entry; a broken one if the caption is unusable."""
    if not isinstance(caption, str) or not caption.strip():
        return Broken(where, "no caption")
    if not _is_text(caption) or not _is_text(key):
        return Broken(where, "its caption or its name is not UTF-8 text")
    return Entry(where, key, " ".join(caption.split()), image)


def _is_text(text: str) -> bool:
    """Whether UTF-8 can encode the text; file names and JSON escapes may hold lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _fault(folder: Path, name: str) -> str | None:
    """Why a file name in the metadata names no image in its folder; None if it does."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return OUTSIDE
    try:
        there = (folder / path).is_file()
    except OSError as problem:
        return f"image {shortened(name)} cannot be read ({problem.strerror})"
    return None if there else f"image {shortened(name)} is missing"


def _caption_of(row: Any, name: str | None) -> Any:
    """A row's value under a name, or without one the first that it has under `CAPTION_NAMES`; None
    if there is none.
    """
    if not isinstance(row, dict):
        return None
    if name:
        return row.get(name)
    return next((row[known] for known in CAPTION_NAMES if row.get(known)), None)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """("file:line", object) for each non-empty line; a string says what is wrong with a line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield f"{path}:{number}", row if isinstance(row, dict) else "not a JSON object"
            except (ValueError, RecursionError) as problem:
                yield f"{path}:{number}", f"not valid JSON ({problem})"


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                yield f"{path}:{reader.reader.line_num}", f"unreadable line ({_reason(problem)})"
                continue
            broken = None in row or None in row.values()
            yield (
                f"{path}:{reader.line_num}",
                f"not {len(reader.fieldnames or ())} columns" if broken else dict(row),
            )


def _parquet_rows(file: Path) -> int:
    """Number of rows, from the file's footer; an unreadable file counts as one broken entry."""
    try:
        return int(pq.read_metadata(regular_file(file)).num_rows)
    except (pa.ArrowException, OSError, ValueError):
        return 1


def _existing(path: str, what: str) -> Path:
    try:
        there = Path(path).exists()
    except OSError:  # a name that is too long, for one
        there = False
    if not there:
        raise TemperaError(f"{shortened(path)} does not exist: give the path of {what}.")
    return Path(path)


def _matching(pattern: str, suffix: str) -> list[Path]:
    """The files of a directory, or those that match a glob pattern, in order."""
    folder = Path(pattern)
    try:
        files = (
            sorted(folder.glob(f"*{suffix}"))
            if folder.is_dir()
            else sorted(map(Path, glob.glob(pattern)))  # noqa: PTH207 (absolute patterns)
        )
    except OSError:  # a name that is too long, for one
        files = []
    if not files:
        raise TemperaError(
            f"{shortened(pattern)} matches no {suffix} file: give a directory of them, or a glob "
            "pattern."
        )
    return files


def _fingerprint(files: list[Path]) -> str:
    """A short hash of names and sizes, to notice that a source has changed."""
    listing = "\n".join(f"{file} {_size(file)}" for file in files)
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]


def _size(file: Path) -> int | None:
    """The file's size in bytes; None for a broken link."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def _reason(problem: Exception) -> str:
    """The first line of an exception's message, or its type."""
    return (str(problem) or type(problem).__name__).splitlines()[0]
