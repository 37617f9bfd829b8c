"""Sources of training captions and images in files of many entries: tar files, Parquet files, and
whatever `datasets` streams.
"""

import glob
import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from tempera.data.entries import (
    Broken,
    Entry,
    Item,
    LeftOut,
    Source,
    Tally,
    row_entry,
    tallied,
    usable_entry,
)
from tempera.data.prompts import TEXT_NAMES, field_of, text_of
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import reason, regular_file
from tempera.runtime.image_decoding import ENDINGS

SAMPLE = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""The name of a tar's member that belongs to a sample: what members share, and kind."""
CAPTIONS = ("txt", "json")
"""Kinds of members that hold captions."""
LARGEST = 2**28
"""Bytes of the largest member of a tar that is read; no picture is larger."""
ROWS = 64
"""Rows of a Parquet file in memory."""


class Files(Source):
    """Files that hold many entries each. What cannot be read of one is a broken entry, after which
    the next file follows.

    Args:
        files: in order.
        items: everything in a file, by its path and its name in keys; it counts what it is given in
            the tally, and may raise anything where the file is damaged.
        described: see `Source.describe`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        items: Callable[[Path, str, Tally], Iterator[Item]],
        **described: Any,
    ) -> None:
        self.files = files
        self.items = items
        self.described = {**described, "fingerprint": fingerprint(files)}

    @override
    def describe(self) -> dict[str, Any]:
        return self.described

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return islice(tallied(self, self._all), start, None)

    def _all(self, tally: Tally) -> Iterator[Item]:
        for file, name in zip(self.files, names(self.files), strict=True):
            try:
                yield from self.items(file, name, tally)
            except Exception as problem:  # a decompressor may raise anything on damaged bytes
                tally.given += 1  # the rest
                why = f"the rest of it cannot be read ({reason(problem)})"
                yield Broken(str(file), why, tally.given - tally.accounted)


class Part(NamedTuple):
    """A member of a tar that belongs to a sample. content: of pictures and captions, unless they
    are too large.
    """

    sample: str
    kind: str
    size: int
    content: bytes


def tar_shards(path: str, caption: str | None = None) -> Files:
    """`source=webdataset`: WebDataset tar files. Members whose names agree up to the first dot form
    a sample; its caption is the .txt or a field of the .json. Its parts are the members.
    """
    files = matching(path, "tar")
    return Files(files, partial(_samples, caption), kind="webdataset", path=path, caption=caption)


def _samples(caption: str | None, file: Path, name: str, tally: Tally) -> Iterator[Item]:
    archive: Any
    earlier = set[str]()
    foreign = Counter[str]()

    def parts() -> Iterator[Part]:
        """The members that may belong to a sample; `foreign` counts the others."""
        for member in archive:
            match = SAMPLE.fullmatch(member.name)
            if member.isdir():
                continue
            tally.given += 1
            if not member.isfile():
                foreign["links and devices"] += 1
            elif match is None:
                foreign["members that belong to no sample"] += 1
            else:
                kind = match[2].lower()
                content = b""
                if kind in (*ENDINGS, *CAPTIONS) and member.size <= LARGEST:
                    content = archive.extractfile(member).read()  # at once: it may be compressed
                yield Part(match[1], kind, member.size, content)

    def left_out() -> Iterator[LeftOut]:
        while foreign:
            yield LeftOut(*foreign.popitem())

    with tarfile.open(file, ignore_zeros=True) as archive:  # skips damaged headers, too
        for sample, members in groupby(parts(), lambda part: part.sample):
            where = f"{file}/{sample}"
            key = f"{name}/{sample}"
            yield from _sample(list(members), caption, where, key, sample in earlier)
            earlier.add(sample)
            yield from left_out()
        yield from left_out()
        if not archive.getmembers() or archive.fileobj.tell() % tarfile.BLOCKSIZE:
            raise EOFError("it is cut off, or no tar file")


def _sample(
    parts: Sequence[Part], caption: str | None, where: str, key: str, repeated: bool
) -> Iterator[Item]:
    """A sample, and the members that it does not use. `repeated`: one of its name came before."""
    members = {part.kind: part for part in parts if part.size}
    picture = next((members[kind] for kind in ENDINGS if kind in members), None)
    kinds = ["json"] if caption else CAPTIONS  # a field's name means the .json
    texts = [members[kind] for kind in kinds if kind in members]
    if picture is None and not texts:
        yield from (LeftOut(f".{part.kind} members") for part in parts)
        return
    entry: Entry | Broken
    used: set[str] = set()
    try:
        if picture is None:
            raise ValueError("no image")
        _check(parts, [picture, *texts], repeated)
        kind, text = _caption(texts, caption)
        entry = usable_entry(where, key, text, picture.content)
        used = {picture.kind, kind}
    except ValueError as problem:
        entry = Broken(where, str(problem))
    if isinstance(entry, Broken):
        yield replace(entry, parts=len(parts))
        return
    yield replace(entry, parts=len(used))
    yield from (LeftOut(f".{part.kind} members") for part in parts if part.kind not in used)


def _check(parts: Sequence[Part], needed: Sequence[Part], repeated: bool) -> None:
    """Raise ValueError if members of a sample may belong to another, or were too large to read."""
    kind, times = Counter(part.kind for part in parts).most_common(1)[0]
    if times > 1:
        raise ValueError(f"its .{kind} is there {times} times")
    if repeated:
        raise ValueError("a sample of this name came before")
    for part in needed:
        if part.size > LARGEST:
            raise ValueError(f"its .{part.kind} has {part.size:,} bytes, too many to be read")


def _caption(texts: Sequence[Part], caption: str | None) -> tuple[str, str | None]:
    """The kind of the member that holds the caption, and the caption."""
    for part in texts:
        is_text = part.kind == "txt"
        try:
            content: Any = part.content.decode("utf-8-sig") if is_text else json.loads(part.content)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"its caption cannot be read ({reason(problem)})") from None
        text = text_of(content) if is_text else field_of(content, caption)
        if text:
            return part.kind, text
    return "", None


def parquet(path: str, image: str, caption: str | None = None) -> Files:
    """`source=parquet`: Parquet files with a caption column and an image column, which holds
    encoded bytes, {bytes, path} structs (Hugging Face's Image) or paths relative to the files.
    `datasets` reads them. Their parts are the rows.
    """
    described = {"kind": "parquet", "path": path, "image": image, "caption": caption}
    return Files(matching(path, "parquet"), partial(_rows, image, caption), **described)


def _rows(image: str, caption: str | None, file: Path, name: str, tally: Tally) -> Iterator[Item]:
    place = glob.escape(str(file))
    rows = streamed("parquet", image, caption, data_files=[place], batch_size=ROWS)
    for number, row in enumerate(rows):
        tally.given += 1
        yield row_entry(
            f"{file}:{number + 1}", f"{name}/{number}", row, image, caption, file.parent
        )


def streamed(path: str, image: str | None, caption: str | None, **options: Any) -> Any:
    """The rows of a data set: the column of the pictures, still encoded, and those that captions
    can be in. For the arguments see `Stream` and `datasets.load_dataset`.
    """
    import datasets  # takes seconds

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our errors say it
    rows = datasets.load_dataset(path, streaming=True, **{"split": "train", **options})
    names = rows.column_names or [*next(iter(rows), {})]  # not all builders know their columns
    columns = [image] if image else []
    columns += [caption] if caption else [name for name in names if name.lower() in TEXT_NAMES]
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"it has no column {missing[0]}")
    rows = rows.select_columns(columns)
    if image is None or not isinstance((rows.features or {}).get(image), datasets.Image):
        return rows
    return rows.cast_column(image, datasets.Image(decode=False))


@dataclass
class Stream(Source):
    """`source=dataset`: anything that `datasets` can stream: a data set on the hub, a local one's
    directory, or a builder with `data_files`. What it cannot read to its end is an error. Its parts
    are the rows that `datasets` gives: what a builder itself drops is not counted.

    Args:
        path, split, name, data_files: see `datasets.load_dataset`.
        image: column of the images, encoded or as paths; None for captions alone.
        caption: column of the captions; None takes the first of `TEXT_NAMES` that exists.
    """

    path: str
    split: str
    image: str | None
    name: str | None = None
    caption: str | None = None
    data_files: str | None = None

    @override
    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", **asdict(self)}

    @override
    def read(self, start: int) -> Iterator[Entry | Broken]:
        return tallied(self, partial(self._from, start))

    def _from(self, start: int, tally: Tally) -> Iterator[Item]:
        position = start
        options = {"name": self.name, "split": self.split, "data_files": self.data_files}
        try:
            for row in streamed(self.path, self.image, self.caption, **options).skip(start):
                tally.given += 1
                key = str(position)
                yield row_entry(f"{self.path} sample {key}", key, row, self.image, self.caption)
                position += 1
        except Exception as problem:  # a builder may raise anything, and cannot continue
            raise TemperaError(
                f"datasets cannot read {self.path} from row {position} on ({reason(problem)}): "
                "check the source's path, split and columns, and that its files are whole."
            ) from problem


def suffix(file: Path) -> str:
    """The ending of a file's name in lower case, without its dot."""
    return file.suffix.lower().removeprefix(".")


def matching(pattern: str, ending: str) -> list[Path]:
    """The files of a directory whose names end so, in any case, or those that match a glob pattern,
    in order.
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


def fingerprint(files: Sequence[Path]) -> str:
    """A short hash of names and sizes, to notice that a source has changed."""
    listing = "\n".join(f"{file} {file.stat().st_size}" for file in files if file.exists())
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
