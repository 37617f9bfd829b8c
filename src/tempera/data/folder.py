"""Folders of pictures, and `source=imagefolder`: those with captions."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tempera.data.entries import Broken, Entry, Item, LeftOut, Listed, row_entry, usable_entry
from tempera.data.prompts import rows_of, text_of
from tempera.data.sources import fingerprint, suffix
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import read_text
from tempera.runtime.image_decoding import ENDINGS

NAME = "file_name"
"""The column of `METADATA` that names the picture."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
TRAIN = "train"
"""The training split's directory in Hugging Face's layout."""


def pictures_in(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The pictures in a folder at any depth, in order, and how many other things it holds, by kind.
    What is hidden, such as copies of an editor and thumbnails, is not looked into.
    """
    files, hidden = _walked(folder)
    pictures = [file for file in files if suffix(file) in ENDINGS]
    left_out = Counter(_kind(file) for file in files if suffix(file) not in ENDINGS)
    left_out.update(Counter(item.kind for item in hidden))
    return pictures, left_out


def image_folder(path: str, caption: str | None = None) -> Listed:
    """A folder of pictures with captions, in one of `METADATA` with a column file_name, as Hugging
    Face's imagefolder, or in a .txt file beside each picture. In Hugging Face's layout with
    directories of splits, those of `train` alone are read.

    Its parts are files and rows of the metadata.

    Args:
        path: the folder.
        caption: name of the caption column; None takes the first of `TEXT_NAMES` that exists.

    Raises:
        TemperaError: it holds no pictures, or its metadata cannot be read.
    """
    folder = Path(path)
    files, hidden = _walked(folder)
    root = _split_of(folder, files)
    inside = [file for file in files if root in file.parents]
    pictures = [file for file in inside if suffix(file) in ENDINGS]
    if not pictures:
        raise TemperaError(
            f"there are no images in {shortened(path)}: give a folder of captioned images."
        )
    tables = _tables(inside)
    if tables:
        others = [file for file in inside if file not in tables]
        items = list(_by_rows(tables, others, caption, folder))
        rows = sum(not isinstance(item, LeftOut) for item in items)
        parts = len(others) + rows
    else:
        items = list(_by_names(inside, folder))
        parts = len(inside)
    items += hidden
    parts += sum(item.parts for item in hidden)
    outside = len(files) - len(inside)
    if outside:
        items.append(LeftOut(f"files outside {TRAIN}", outside))
        parts += outside
    described = {
        "kind": "imagefolder",
        "path": path,
        "caption": caption,
        "fingerprint": fingerprint(tables or pictures),
    }
    return Listed(items, described, parts)


def _tables(files: Sequence[Path]) -> list[Path]:
    """The metadata to read: in each directory the first of `METADATA` that is there."""
    by_directory: dict[Path, list[Path]] = {}
    for file in files:
        if file.name.lower() in METADATA:
            by_directory.setdefault(file.parent, []).append(file)
    return [
        min(tables, key=lambda table: METADATA.index(table.name.lower()))
        for tables in by_directory.values()
    ]


def _walked(folder: Path) -> tuple[list[Path], list[LeftOut]]:
    """The files of a folder at any depth, in order, and what is not looked into."""
    files: list[Path] = []
    left_out: list[LeftOut] = []
    for place, folders, names in os.walk(folder):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):  # noqa: PTH114, PTH118 (a million names)
                left_out.append(LeftOut("linked folders"))
            elif name.startswith("."):
                left_out.append(LeftOut("hidden folders"))
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out += [LeftOut("hidden files") for name in names if name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files), left_out


def _split_of(folder: Path, files: Sequence[Path]) -> Path:
    """The directory of the training split if the folder has directories of splits, else itself."""
    places = {file.parent for file in files if file.name.lower() in METADATA}
    return folder / TRAIN if folder / TRAIN in places and folder not in places else folder


def _by_rows(
    tables: Sequence[Path], files: Sequence[Path], caption: str | None, folder: Path
) -> Iterator[Item]:
    """Entries by the rows of the metadata, then the files that no entry uses."""
    unused = dict.fromkeys(files)
    for place, table in enumerate(tables):
        inside = table.parent.relative_to(folder)
        for number, line in rows_of(table):
            row = line if isinstance(line, dict) else {}
            name = row.get(NAME)
            number_of = f"{number}" if len(tables) == 1 else f"{place}.{number}"
            key = f"{inside / name if isinstance(name, str) else name}#{number_of}"
            entry = row_entry(f"{table}:{number}", key, row, NAME, caption, table.parent)
            if isinstance(entry, Entry) and isinstance(entry.image, Path) and entry.image in unused:
                del unused[entry.image]
                entry = replace(entry, parts=2)
            yield entry
    for file in unused:
        picture = suffix(file) in ENDINGS
        yield LeftOut("pictures that no usable row names" if picture else _kind(file))


def _by_names(files: Sequence[Path], folder: Path) -> Iterator[Item]:
    """Pictures whose captions are in .txt files beside them."""
    texts: dict[Path, list[Path]] = defaultdict(list)
    pictures: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        if suffix(file) == "txt":
            texts[file.with_suffix("")].append(file)
        elif suffix(file) in ENDINGS:
            pictures[file.with_suffix("")].append(file)
        else:
            yield LeftOut(_kind(file))
    for stem in texts.keys() - pictures.keys():
        yield LeftOut(".txt files without a picture", len(texts[stem]))
    for file in files:
        if suffix(file) in ENDINGS:
            stem = file.with_suffix("")
            captions = texts.pop(stem, [])
            entry = _beside(file, captions, pictures[stem], folder)
            yield replace(entry, parts=1 + len(captions))


def _beside(
    picture: Path, captions: Sequence[Path], same: Sequence[Path], folder: Path
) -> Entry | Broken:
    """A picture whose caption is in a file beside it.

    Args:
        captions: files of captions with its name.
        same: pictures with its name, itself included.
    """
    where = str(picture)
    if len(same) > 1:
        other = next(file for file in same if file != picture)
        return Broken(where, f"{other.name} has the same name, so one caption is for two pictures")
    if len(captions) > 1:
        return Broken(where, f"it has {len(captions)} files of captions")
    try:
        text = text_of(read_text(captions[0])) if captions else None
    except TemperaError as problem:
        return Broken(where, str(problem))
    return usable_entry(where, str(picture.relative_to(folder)), text, picture)


def _kind(file: Path) -> str:
    return f".{suffix(file)} files" if suffix(file) else "files without an ending"
