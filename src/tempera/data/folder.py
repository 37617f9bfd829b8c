"""Folders of pictures, and `source=imagefolder`: those with captions."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tempera.data.entries import METADATA, Broken, Entry, Listed, row_entry, usable_entry
from tempera.data.prompts import caption_column, rows_of, text_of
from tempera.data.sources import state_of, suffix
from tempera.errors import TemperaError, shortened
from tempera.runtime.files import fingerprint, read_text
from tempera.runtime.image_decoding import ENDINGS

NAME = "file_name"
"""The column of `METADATA` that names the picture."""
UNPAIRED = ("pictures without a usable row", ".txt files without a picture")
"""Kinds of what a folder leaves out that lack their other half."""
TRAIN = "train"
"""The training split's directory in Hugging Face's layout."""


def pictures_in(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The pictures in a folder at any depth, in order, and how many other things it holds, by kind.
    What is hidden, such as copies of an editor and thumbnails, is not looked into.
    """
    files, left_out = _walked(folder)
    left_out.update(_kind(file) for file in files if not _is_picture(file))
    return [file for file in files if _is_picture(file)], left_out


def image_folder(path: str, caption: str | None = None) -> Listed:
    """A folder of pictures with captions, in one of `METADATA` with a column file_name, as Hugging
    Face's imagefolder, or in a .txt file beside each picture. In Hugging Face's layout with
    directories of splits, those of `train` alone are read.

    Args:
        path: the folder.
        caption: name of the caption column; None takes the first of `CAPTION_NAMES` that exists.

    Raises:
        TemperaError: it contains no pictures, or its metadata cannot be read.
    """
    folder = Path(path)
    files, left_out = _walked(folder)
    root = _split_of(folder, files)
    inside = [file for file in files if root in file.parents]
    left_out[f"files outside {TRAIN}"] = len(files) - len(inside)
    if not any(map(_is_picture, inside)):
        raise TemperaError(
            f"there are no images in {shortened(path)}: give a folder of captioned images."
        )
    tables = _tables(inside)
    if tables:
        entries = list(_by_rows(tables, caption, folder))
        images = (entry.image for entry in entries if isinstance(entry, Entry))
        read = {*tables, *(image for image in images if isinstance(image, Path))}
    else:
        entries = list(_by_names(inside, folder))
        pictures = {file for file in inside if _is_picture(file)}
        stems = {file.with_suffix("") for file in pictures}
        texts = {file for file in inside if suffix(file) == "txt"}
        read = pictures | {text for text in texts if text.with_suffix("") in stems}
        left_out[UNPAIRED[1]] = len(texts - read)
        inside = [file for file in inside if file not in texts]
    for file in inside:
        if file not in read:
            left_out[UNPAIRED[0] if _is_picture(file) else _kind(file)] += 1
    described = {
        "kind": "imagefolder",
        "path": path,
        "caption": caption,
        "fingerprint": fingerprint({"files": state_of(sorted(read))}),
    }
    return Listed(entries, described, +left_out)


def _is_picture(file: Path) -> bool:
    return suffix(file) in ENDINGS


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


def _walked(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The files of a folder at any depth, in order, and how much is not looked into."""
    files: list[Path] = []
    left_out = Counter[str]()
    for directory, folders, names in os.walk(folder):
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out["hidden folders"] += len(hidden)
        left_out["linked folders"] += sum(Path(directory, name).is_symlink() for name in folders)
        left_out["hidden files"] += sum(name.startswith(".") for name in names)
        files += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(files), +left_out


def _split_of(folder: Path, files: Sequence[Path]) -> Path:
    """The directory of the training split if the folder has directories of splits, else itself."""
    directories = {file.parent for file in files if file.name.lower() in METADATA}
    return folder / TRAIN if folder / TRAIN in directories and folder not in directories else folder


def _by_rows(tables: Sequence[Path], caption: str | None, folder: Path) -> Iterator[Entry | Broken]:
    """Entries by the rows of the metadata."""
    for index, table in enumerate(tables):
        inside = table.parent.relative_to(folder)
        rows = [(number, row if isinstance(row, dict) else {}) for number, row in rows_of(table)]
        columns = dict.fromkeys(name for _, row in rows for name in row)
        column = caption or caption_column(columns)
        for number, row in rows:
            name = row.get(NAME)
            number_of = f"{number}" if len(tables) == 1 else f"{index}.{number}"
            key = f"{inside / name if isinstance(name, str) else name}#{number_of}"
            yield row_entry(f"{table}:{number}", key, row, NAME, column, table.parent)


def _by_names(files: Sequence[Path], folder: Path) -> Iterator[Entry | Broken]:
    """Pictures whose captions are in .txt files beside them."""
    texts: dict[Path, list[Path]] = defaultdict(list)
    pictures: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        if suffix(file) == "txt":
            texts[file.with_suffix("")].append(file)
        elif _is_picture(file):
            pictures[file.with_suffix("")].append(file)
    for stem, same in pictures.items():
        for file in same:
            yield _beside(file, texts[stem], same, folder)


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
        return Broken(
            where,
            f"{other.name} has the same name, so it is unclear which picture the caption describes",
        )
    if len(captions) > 1:
        return Broken(where, f"it has {len(captions)} caption files")
    try:
        text = text_of(read_text(captions[0])) if captions else None
    except TemperaError as problem:
        return Broken(where, str(problem))
    return usable_entry(where, str(picture.relative_to(folder)), text, picture)


def _kind(file: Path) -> str:
    return f".{suffix(file)} files" if suffix(file) else "files without an extension"
