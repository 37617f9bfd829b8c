"""Sources of training captions and images: ordered sequences of entries, readable from any
position.

The readers are small and direct rather than the builders of `datasets`, because a builder stops at
the first damaged row and cannot say which line of which file it was; `Dataset` wraps any builder or
hub data set for everything that has no reader here.
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

from tempera.data.prompts import file_prompts
from tempera.errors import TemperaError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
CAPTION_NAMES = ("caption", "text", "prompt", "top_caption", "TEXT")
"""Column or field names tried in turn when none is given."""


@dataclass(frozen=True)
class Span:
    """Bytes inside a file, read on use: each of several processes reads only the pictures that it
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
"""Encoded bytes, a file or where in one they stand, an array [h, w, 3] in [0, 1], or a decoded
image.
"""


@dataclass(frozen=True)
class Entry:
    """A caption and perhaps its image. `where` names file and line; entries of one image share the
    part of `key` before "#".
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
        return f"{self.where}: {self.why}"


class Source(Protocol):
    """An ordered sequence of entries."""

    def describe(self) -> dict[str, Any]:
        """Kind, place and fingerprint, for the manifest; it changes when the source does."""

    def count(self) -> int | None:
        """Number of entries, broken ones included; None if only reading all of them would tell."""

    def read(self, start: int) -> Iterator[Entry | Broken]:
        """Entries from position `start`; broken ones take a position too."""


def decode_picture(image: EncodedPicture) -> PIL.Image.Image:
    """Any picture as an RGB image.

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    if isinstance(image, np.ndarray):
        return PIL.Image.fromarray((image * 255).round().clip(0, 255).astype(np.uint8))
    if isinstance(image, PIL.Image.Image):
        return image.convert("RGB")
    if isinstance(image, Span):
        image = image.read()
    with PIL.Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        return opened.convert("RGB")


class ImageFolder(Source):
    """A folder of images with captions in `metadata.jsonl` or `metadata.csv` (columns file_name and
    a caption), as Hugging Face's imagefolder, or in a .txt file beside each image. `caption` names
    the caption column; by default the first of `CAPTION_NAMES`.
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
        return (
            len(self.images) if self.metadata is None else sum(1 for _ in self._rows(self.metadata))
        )

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
            caption = text.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as problem:
            return Broken(str(text), f"unreadable caption ({_reason(problem)})")
        return _entry(str(image), str(image.relative_to(self.path)), caption, image)

    def _listed(self, where: str, row: dict[str, Any] | str) -> Entry | Broken:
        if isinstance(row, str):
            return Broken(where, row)
        name, caption = row.get("file_name"), _caption_of(row, self.caption)
        if not isinstance(name, str) or not name:
            return Broken(where, "no file_name")
        if not (self.path / name).is_file():
            return Broken(where, f"image {name} is missing")
        return _entry(where, f"{name}#{where.rpartition(':')[2]}", caption, self.path / name)


class TarShards(Source):
    """WebDataset tar files: members sharing a name up to the first dot are one sample; the caption
    is its .txt or a field of its .json.
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
        records = [
            file.with_name(f"{file.stem}_stats.json") for file in self.files
        ]  # img2dataset's, one beside each archive
        try:
            return sum(int(json.loads(record.read_text())["successes"]) for record in records)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice((entry for file in self.files for entry in self._samples(file)), start, None)

    def _samples(self, file: Path) -> Iterator[Entry | Broken]:
        key, seen = "", 0
        members: dict[str, Any] = {}  # bytes of captions, and pictures
        try:
            with tarfile.open(file) as archive:
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
        except (tarfile.TarError, OSError, EOFError) as problem:
            yield Broken(
                str(file), f"the archive is damaged after {seen} members ({_reason(problem)})"
            )

    def _sample(self, file: Path, key: str, members: dict[str, Any]) -> Entry | Broken:
        where = f"{file} sample {key.lstrip('/')}"
        image = next((members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members), None)
        if image is None:
            return Broken(where, "no image")
        try:
            fields = json.loads(members.get(".json", b"{}"))
            text = members[".txt"].decode() if ".txt" in members and self.caption is None else None
        except ValueError as problem:
            return Broken(where, f"unreadable caption ({_reason(problem)})")
        return _entry(
            where,
            f"{file.name}/{key.lstrip('/')}",
            text or _caption_of(fields, self.caption),
            image,
        )


class ParquetShards(Source):
    """Parquet files with a caption column and an image column: encoded bytes, a {bytes, path}
    struct (Hugging Face's Image), or a path relative to the file. LAION-COCO as published holds
    only URLs: download it first, for example with img2dataset.
    """

    def __init__(self, path: str, image: str = "image", caption: str | None = None) -> None:
        self.files, self.image, self.caption = _matching(path, ".parquet"), image, caption

    @override
    def describe(self) -> dict[str, Any]:
        columns = {"image": self.image, "caption": self.caption}
        return {
            "kind": "parquet",
            "files": len(self.files),
            **columns,
            "fingerprint": _fingerprint(self.files),
        }

    @override
    def count(self) -> int | None:
        return sum(map(_parquet_rows, self.files))

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        skip = start
        for file in self.files:
            try:
                opened = pq.ParquetFile(file)
            except (pa.ArrowException, OSError) as problem:
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
        while (
            position + (rows := opened.metadata.row_group(group).num_rows) <= skip
        ):  # skip is a row of this file
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
            except (
                pa.ArrowException,
                OSError,
            ) as problem:  # the rest of the group cannot be told row from row
                for lost in range(max(position, skip), end):
                    yield Broken(f"{file} row {lost}", f"unreadable row group ({_reason(problem)})")
            position = end

    def _row(self, where: str, key: str, caption: Any, value: Any, folder: Path) -> Entry | Broken:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            if not (folder / value).is_file():
                return Broken(where, f"image {value} is missing")
            value = folder / value
        if not isinstance(value, bytes | Path) or not value:
            return Broken(where, "no image")
        return _entry(where, key, caption, value)


class CocoCaptions(Source):
    """An MS-COCO captions file. With `images` each entry carries that directory's image; without,
    captions alone, for the target to generate from. `per_image` limits the captions kept of one
    image; 0 keeps all.
    """

    def __init__(self, path: str, images: str | None = None, per_image: int = 1) -> None:
        self.path = _existing(path, "a captions file")
        self.images = _existing(images, "an image directory") if images else None
        self.per_image = per_image
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.names = {image["id"]: image["file_name"] for image in content.get("images", [])}
            self.annotations: list[Any] = content["annotations"]
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise TemperaError(
                f"{self.path} is no MS-COCO captions file ({_reason(problem)}): give one with "
                "annotations."
            ) from problem

    @override
    def describe(self) -> dict[str, Any]:
        kind = {
            "kind": "coco",
            "path": str(self.path),
            "images": str(self.images) if self.images else None,
        }
        return {**kind, "per_image": self.per_image, "fingerprint": _fingerprint([self.path])}

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
        """Annotations with their numbers, at most `per_image` for an image; None for a malformed
        one.
        """
        seen: dict[Any, int] = {}
        for index, annotation in enumerate(self.annotations):
            if not isinstance(annotation, dict) or "image_id" not in annotation:
                yield index, None
                continue
            image_id = annotation["image_id"]
            seen[image_id] = seen.get(image_id, 0) + 1
            if not self.per_image or seen[image_id] <= self.per_image:
                yield index, annotation

    def _one(self, where: str, image_id: Any, key: str, caption: Any) -> Entry | Broken:
        if self.images is None:
            return _entry(where, key, caption, None)
        path = self.images / str(self.names.get(image_id, f"{image_id}.jpg"))
        return (
            _entry(where, key, caption, path)
            if path.is_file()
            else Broken(where, f"image {path} is missing")
        )


class PromptFile(Source):
    """Captions without images from a text, TSV or MS-COCO file, read as evaluation's prompts are
    (`tempera.data.prompts`).
    """

    def __init__(self, path: str) -> None:
        self.path, self.prompts = _existing(path, "a file of prompts"), file_prompts(path)

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "prompts", "path": str(self.path), "fingerprint": _fingerprint([self.path])}

    @override
    def count(self) -> int | None:
        return len(self.prompts)

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for index, prompt in enumerate(self.prompts[start:], start):
            yield Entry(f"{self.path} prompt {index}", prompt.id, prompt.text)


class Dataset(Source):
    """Anything the `datasets` library can stream: a builder with local files, a local data set
    directory, or a hub name.
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
        splits = self._stream().info.splits or {}  # where the data set's card or builder tells
        split = splits.get(str(self.options["split"]))
        return split.num_examples or None if split else None

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        for position, row in enumerate(self._stream().skip(start), start):
            where, value = (
                f"{self.options['path']} row {position}",
                row.get(self.image) if self.image else None,
            )
            value = (
                (value.get("bytes") or Path(value["path"])) if isinstance(value, dict) else value
            )
            if self.image and value is None:
                yield Broken(where, "no image")
            else:
                yield _entry(where, str(position), _caption_of(row, self.caption), value)

    def _stream(self) -> Any:
        import datasets

        try:
            stream = datasets.load_dataset(**self.options, streaming=True)
            return (
                stream.cast_column(self.image, datasets.Image(decode=False))
                if self.image
                else stream
            )
        except Exception as problem:  # a builder may raise anything
            raise TemperaError(
                f"datasets cannot load {self.options['path']} ({_reason(problem)}): check path "
                "and split."
            ) from problem


def _entry(where: str, key: str, caption: Any, image: EncodedPicture | None) -> Entry | Broken:
    """An entry, or the reason why its caption is unusable."""
    if not isinstance(caption, str) or not caption.strip():
        return Broken(where, "no caption")
    return Entry(where, key, " ".join(caption.split()), image)


def _caption_of(row: Any, name: str | None) -> Any:
    if not isinstance(row, dict):
        return None
    return (
        row.get(name)
        if name
        else next((row[known] for known in CAPTION_NAMES if row.get(known)), None)
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each non-empty line as ("file:line", its object, or what is wrong with it)."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield f"{path}:{number}", row if isinstance(row, dict) else "not a JSON object"
            except ValueError as problem:
                yield f"{path}:{number}", f"not valid JSON ({problem})"


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            broken = None in row or None in row.values()
            yield (
                f"{path}:{reader.line_num}",
                f"not {len(reader.fieldnames or ())} columns" if broken else dict(row),
            )


def _parquet_rows(file: Path) -> int:
    """Rows by the file's footer; an unreadable file is one broken entry."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError):
        return 1


def _existing(path: str, what: str) -> Path:
    if not Path(path).exists():
        raise TemperaError(f"{path} does not exist: give the path of {what}.")
    return Path(path)


def _matching(pattern: str, suffix: str) -> list[Path]:
    """Files of a directory, or of a glob pattern, in order."""
    folder = Path(pattern)
    files = (
        sorted(folder.glob(f"*{suffix}"))
        if folder.is_dir()
        else sorted(map(Path, glob.glob(pattern)))  # noqa: PTH207 (absolute patterns)
    )
    if not files:
        raise TemperaError(
            f"{pattern} matches no {suffix} file: give a directory of them, or a glob pattern."
        )
    return files


def _fingerprint(files: list[Path]) -> str:
    """Short hash of names and sizes: notices that a source changed."""
    listing = "\n".join(f"{file} {file.stat().st_size}" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _reason(problem: Exception) -> str:
    """The first line of an exception's message, or its type."""
    return (str(problem) or type(problem).__name__).splitlines()[0]
