"""Sources of training captions and images in files of many entries: tar files, Parquet files, and
whatever `datasets` streams.
"""

import glob
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from tempera.data.entries import (
    METADATA,
    Broken,
    Entry,
    Source,
    picture_of,
    row_entry,
    usable_entry,
)
from tempera.data.prompts import CAPTION_NAMES, caption_column, text_of
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import fingerprint, reason, regular_file
from tempera.runtime.image_decoding import ENDINGS

SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""The name of a tar's member that belongs to a sample: what members share, and kind."""
CAPTIONS = ("txt", "json")
"""Kinds of members that hold captions."""
LARGEST = 2**28
"""Bytes of the largest member of a tar that is read; no picture is larger."""
ROWS = 64
"""Rows of a Parquet file in memory, beside the pages of the file that they are in."""
BUFFER = 2**20
"""Bytes of a Parquet column that are read at a time; without a buffer a row group is."""


class Files(Source):
    """Files that hold many entries each. What cannot be read of one is a broken entry, after which
    the next file follows.

    Args:
        files: in order.
        entries: those in a file, by its path and its name in keys; it may raise anything where the
            file is damaged.
        beside: files that these name.
        described: see `Source.describe`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        entries: Callable[[Path, str], Iterator[Entry | Broken]],
        beside: Iterable[Path] = (),
        **described: Any,
    ) -> None:
        self.files = files
        self.entries = entries
        self.described = {
            **described,
            "fingerprint": fingerprint({"files": state_of((*files, *beside))}),
        }

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(self._all(), start, None)

    def _all(self) -> Iterator[Entry | Broken]:
        for file, name in zip(self.files, names(self.files), strict=True):
            try:
                yield from self.entries(file, name)
            except Exception as problem:  # a decompressor may raise anything on damaged bytes
                yield Broken(str(file), f"the rest of it cannot be read ({reason(problem)})")


class Member(NamedTuple):
    """A picture or a caption of a sample in a tar. content: None if it is too large to be read."""

    sample: str
    kind: str
    content: bytes | None


def tar_shards(path: str, caption: str | None = None) -> Files:
    """`source=webdataset`: WebDataset tar files. Members whose names agree up to the first dot form
    a sample; its caption is the .txt or a field of the .json.
    """
    files = matching(path, "tar")
    return Files(files, partial(_samples, caption), kind="webdataset", path=path, caption=caption)


def _samples(caption: str | None, file: Path, name: str) -> Iterator[Entry | Broken]:
    earlier = set[str]()
    archive: Any
    with tarfile.open(file, ignore_zeros=True) as archive:  # skips damaged headers, too
        for sample, group in groupby(_members(archive), lambda member: member.sample):
            where = f"{file}/{sample}"
            members = list(group)
            try:
                if sample in earlier:
                    raise ValueError("an earlier sample has the same name")
                picture, text = _picture_and_caption(members, caption)
                yield usable_entry(where, f"{name}/{sample}", text, picture)
            except ValueError as problem:
                yield Broken(where, str(problem))
            earlier.add(sample)
        if not archive.getmembers() or archive.fileobj.tell() % tarfile.BLOCKSIZE:
            raise EOFError("it is truncated or not a tar file")


def _members(archive: tarfile.TarFile) -> Iterator[Member]:
    """The pictures and captions of a tar that are not empty."""
    for member in archive:
        match = SAMPLE.fullmatch(member.name)
        if match is None or not member.isfile() or not member.size:
            continue
        kind = match[2].lower()
        if kind in (*ENDINGS, *CAPTIONS):
            file = archive.extractfile(member) if member.size <= LARGEST else None
            content = file.read() if file else None  # at once: it may be compressed
            yield Member(match[1], kind, content)


def _picture_and_caption(
    members: Sequence[Member], caption: str | None
) -> tuple[bytes, str | None]:
    """What a sample holds; ValueError if it is not usable, or may be of two samples."""
    contents = {member.kind: member.content for member in members}
    kinds = [member.kind for member in members]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"it has {kinds.count(kind)} .{kind} files")
    pictures = [contents[kind] for kind in ENDINGS if kind in contents]
    if not pictures:
        raise ValueError("no image")
    text = None
    for kind in ["json"] if caption else CAPTIONS:  # a field's name means the .json
        if kind in contents and text is None:
            text = _caption(kind, contents[kind], caption)
    if pictures[0] is None:
        raise ValueError("its picture is too large")
    return pictures[0], text


def _caption(kind: str, content: bytes | None, field: str | None) -> str | None:
    """The caption in a member of a sample."""
    if content is None:
        raise ValueError(f"its .{kind} file is too large")
    try:
        text = content.decode("utf-8-sig")
        value = text if kind == "txt" else json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"its caption cannot be read ({reason(problem)})") from None
    if not isinstance(value, dict):
        return text_of(value)
    return text_of(value.get(field or caption_column(value)))


def parquet(path: str, image: str, caption: str | None = None) -> Files:
    """`source=parquet`: Parquet files with a caption column and an image column, which holds
    encoded bytes, {bytes, path} structs (Hugging Face's Image) or paths relative to the files.
    """
    files = matching(path, "parquet")
    return Files(
        files,
        partial(_rows, image, caption),
        _pictures_beside(files, image),
        kind="parquet",
        path=path,
        image=image,
        caption=caption,
    )


def _rows(image: str, caption: str | None, file: Path, name: str) -> Iterator[Entry | Broken]:
    with pq.ParquetFile(file, buffer_size=BUFFER) as table:
        column = _check_columns(table.schema_arrow.names, image, caption)
        for number, row in enumerate(_by_group(table, [image, column])):
            where = f"{file}:{number + 1}"
            yield row_entry(where, f"{name}/{number}", row, image, column, file.parent)


def _by_group(table: pq.ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file. Only between row groups pyarrow frees what it has read."""
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(ROWS, [group], columns):
            yield from batch.to_pylist()


def _check_columns(columns: Sequence[str], image: str | None, caption: str | None) -> str:
    """Which of a table's columns holds the captions; ValueError if it or the pictures' is not
    there.
    """
    for name in (image, caption):
        if name and name not in columns:
            raise ValueError(f"it has no column {name}")
    found = caption or caption_column(columns)
    if found is None:
        raise ValueError(
            f"it has no column {' or '.join(CAPTION_NAMES)}: give the name of the caption column "
            "as source.caption="
        )
    return found


def _pictures_beside(files: Sequence[Path], image: str) -> Iterator[Path]:
    """The files that Parquet files name in the column of pictures."""
    for file in files:
        with suppress(pa.ArrowException, OSError), pq.ParquetFile(file) as table:  # told later
            paths = [
                column.path
                for column in table.schema
                if column.path in (image, f"{image}.path") and column.logical_type.type == "STRING"
            ]
            for row in _by_group(table, paths) if paths else ():
                picture = picture_of(row[image])
                if picture is not None:
                    yield file.parent / picture


@dataclass
class Stream(Source):
    """`source=dataset`: anything that `datasets` can stream: a data set on the hub, a local one's
    directory, or a builder with `data_files`. What it cannot read to its end is an error; what a
    builder itself drops is not told.

    Args:
        path, split, name, data_files: see `datasets.load_dataset`.
        image: column of the images, encoded or as paths; None for captions alone.
        caption: column of the captions; None takes the first of `CAPTION_NAMES` that exists.
    """

    path: str
    split: str
    image: str | None
    name: str | None = None
    caption: str | None = None
    data_files: str | None = None

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", **asdict(self), "fingerprint": self._fingerprint}

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        """See `Source.read`: the samples of the dataset from number `start` on."""
        position = start
        with self._telling():
            rows, caption = self._rows()
        rows = iter(rows.skip(start))
        while True:
            where = f"{self.path} sample {position}"
            with self._telling(f" from row {position} on"):
                row = next(rows, None)
                if row is None:
                    return
                entry = row_entry(where, str(position), row, self.image, caption)
            yield entry
            position += 1

    @contextmanager
    def _telling(self, where: str = "") -> Iterator[None]:
        """Raises TemperaError for whatever a builder of `datasets` raises."""
        try:
            yield
        except TemperaError:
            raise
        except Exception as problem:
            raise TemperaError(
                f"datasets cannot read {self.path}{where} ({reason(problem)}): check the source's "
                "path, split and columns, and that its files are complete."
            ) from problem

    @cached_property
    def _builder(self) -> Any:
        import datasets  # takes seconds

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our errors say it
        builder = datasets.load_dataset_builder(self.path, self.name, data_files=self.data_files)
        names = [file.rpartition("/")[2] for file in self._files(builder)]
        tables = [name for name in names if name in METADATA or name.endswith(".zip")]
        if self._is_folder(builder) and len(tables) > 1:
            raise TemperaError(
                f"{shortened(self.path)} has {len(tables)} metadata files, which the datasets "
                "library reads in a different order in every process: use source=imagefolder "
                "with this directory instead."
            )
        return builder

    def _rows(self) -> tuple[Any, str]:
        """The rows with the columns that are read, pictures still encoded, and the captions'."""
        import datasets
        import pyarrow.dataset as arrow  # imports pandas
        from datasets.packaged_modules.parquet.parquet import Parquet

        options: dict[str, Any] = {"split": self.split, "data_files": self.data_files}
        if isinstance(self._builder, Parquet):
            scan = arrow.ParquetFragmentScanOptions(
                use_buffered_stream=True, buffer_size=BUFFER, pre_buffer=False
            )
            options |= {"batch_size": ROWS, "fragment_scan_options": scan}
        rows = datasets.load_dataset(self.path, self.name, streaming=True, **options)
        columns = rows.column_names or [*next(iter(rows), {})]  # not all builders know theirs
        caption = _check_columns(columns, self.image, self.caption)
        rows = rows.select_columns([self.image, caption] if self.image else [caption])
        if self.image and isinstance((rows.features or {}).get(self.image), datasets.Image):
            rows = rows.cast_column(self.image, datasets.Image(decode=False))
        return rows, caption

    @cached_property
    def _fingerprint(self) -> str:
        """Of the files that `datasets` reads, as it tells versions apart, and of pictures that
        their rows name.
        """
        with self._telling():
            files = self._files(self._builder)
            changed = files.origin_metadata if files else []
            named = state_of(self._named_pictures())
            return fingerprint({"files": list(files), "changed": changed, "named": named})

    def _named_pictures(self) -> Iterator[Path]:
        """The pictures in files of their own, of builders that do not list these."""
        if self.image is None or self._is_folder(self._builder):
            return
        for row in self._rows()[0].select_columns([self.image]):
            picture = picture_of(row[self.image])
            if not isinstance(picture, str):
                return
            yield Path(picture)

    def _files(self, builder: Any) -> Any:
        """The list of a builder's files, for the split alone if it is a name."""
        splits = builder.config.data_files or {}
        return splits.get(self.split) or [file for files in splits.values() for file in files]

    def _is_folder(self, builder: Any) -> bool:
        from datasets.packaged_modules.folder_based_builder import folder_based_builder

        return isinstance(builder, folder_based_builder.FolderBasedBuilder)


def suffix(file: Path) -> str:
    """The ending of a file's name in lower case, without its dot."""
    return file.suffix.lower().removeprefix(".")


def matching(pattern: str, ending: str) -> list[Path]:
    """The files of a directory whose names end so, in any case, or those that match a glob pattern,
    in order.

    Raises:
        TemperaError: there is none.
    """
    folder = Path(pattern)
    if os.path.isdir(folder):  # noqa: PTH112 (False for a name that is too long)
        files = sorted(file for file in folder.glob("[!.]*") if suffix(file) == ending)
    else:
        files = sorted(map(Path, glob.glob(pattern)))  # noqa: PTH207 (absolute patterns)
    if not files:
        raise TemperaError(
            f"{shortened(pattern)} matches no .{ending} file: give a directory of them, or a glob "
            "pattern."
        )
    return [regular_file(file) for file in files]


def names(files: Sequence[Path]) -> list[str]:
    """How keys name files: by their names if these differ, else by their paths from the directory
    that they share.
    """
    file_names = [file.name for file in files]
    if len(set(file_names)) == len(files):
        return file_names
    shared = Path(os.path.commonpath([file.parent for file in files]))
    return [file.relative_to(shared).as_posix() for file in files]


def state_of(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Paths, sizes and times of the last change of those files that exist, from which a changed
    source is noticed.
    """
    found = []
    for file in files:
        with suppress(OSError, ValueError):  # ValueError: a null byte in the path
            state = file.stat()
            found.append((str(file), state.st_size, state.st_mtime_ns))
    return found
