"""Pictures with captions that other code made, as they lie in a folder."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tempera.data.entries import METADATA, Broken, shown
from tempera.data.folder import NAME, UNPAIRED, image_folder, pictures_in
from tempera.data.prompts import Prompt, check_unique, field_of, rows_of, text_of
from tempera.errors import TemperaError
from tempera.runtime.files import read_text
from tempera.runtime.image_decoding import decode_picture

SAMPLES = "samples"
"""Where GenEval keeps the pictures of a prompt, beside its metadata.jsonl."""


@dataclass(frozen=True)
class Shown:
    """A picture and its caption.

    Attributes:
        prompt: the caption, under an id made of the file's name.
        file: of the picture.
        tile: its place among the pictures in that file, row by row.
        tiles: how many of them the file has in a row, and in a column.
    """

    prompt: Prompt
    file: Path
    tile: int
    tiles: int

    def picture(self) -> NDArray[np.uint8]:
        """The pixels, uint8 [3, h, w].

        Raises:
            TemperaError: the file is no picture, or cannot be cut into its tiles.
        """
        try:
            whole = np.asarray(decode_picture(self.file)).transpose(2, 0, 1)
        except OSError as problem:
            raise TemperaError(
                f"{self.file} cannot be read as a picture ({problem}): repair or delete it."
            ) from None
        _, height, width = whole.shape
        if height % self.tiles or width % self.tiles:
            raise TemperaError(
                f"{self.file} has {width} × {height} pixels, which cannot be divided into "
                f"{self.tiles} × {self.tiles} pictures of equal size: give another grid=",
                option="grid",
            )
        row, column = divmod(self.tile, self.tiles)
        h, w = height // self.tiles, width // self.tiles
        return whole[:, row * h : (row + 1) * h, column * w : (column + 1) * w].copy()


def gallery(folder: Path, captions: Path | None = None, tiles: int = 1) -> list[Shown]:
    """The pictures of a folder with their captions, in order. The captions are

    - a `.txt` file beside each picture, or metadata.csv, .jsonl or .parquet with a column
      file_name, as of Hugging Face's imagefolder;
    - in GenEval's layout in `<prompt>/metadata.jsonl`, with the pictures in `<prompt>/samples/`;
    - with `captions`, a folder of one `.txt` file a picture (DPG-Bench's `prompts/`), a table with
      a column file_name, or a file of prompts in the order of the pictures (10.png after 9.png).

    Args:
        folder: of the pictures.
        captions: where the captions are, if not among the pictures.
        tiles: pictures in each row and column of a file: 2 for DPG-Bench's grids of four.

    Raises:
        TemperaError: there are no pictures, one has no caption or a caption no picture, or two have
            one id.
    """
    if captions is not None:
        pairs = list(_with_captions(folder, captions))
    elif directories := sorted(folder.glob(f"*/{SAMPLES}")):
        pairs = list(_geneval(directories))
    else:
        pairs = list(_beside(folder))
    found = []
    for file, text in pairs:
        name = _name(file.relative_to(folder))
        for tile in range(tiles**2):
            own = f"{name}-{tile}" if tiles > 1 else name
            found.append(Shown(Prompt(own, text), file, tile, tiles))
    check_unique([one.prompt for one in found])
    return found


def _name(path: Path) -> str:
    """An id of a file's place in its folder; GenEval's `samples` says nothing."""
    parts = [part for part in path.with_suffix("").parts if part != SAMPLES]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).lstrip(".")


def _beside(folder: Path) -> Iterator[tuple[Path, str]]:
    """Pictures with a caption beside them."""
    source = image_folder(str(folder))
    unpaired = {kind: count for kind, count in source.left_out.items() if kind in UNPAIRED}
    if unpaired:
        raise TemperaError(
            f"{folder} contains {shown(unpaired)}: add what is missing, or move these files "
            "elsewhere."
        )
    for item in source.items:
        if isinstance(item, Broken):
            raise TemperaError(
                f"{item}: write captions as .txt files next to the pictures or in metadata.csv, "
                "or give captions=PATH.",
                option="captions",
            )
        assert isinstance(item.image, Path)
        yield item.image, item.caption


def _geneval(directories: list[Path]) -> Iterator[tuple[Path, str]]:
    """Pictures in GenEval's layout."""
    for directory in directories:
        table = directory.parent / METADATA[0]
        if not table.is_file():
            raise TemperaError(f"{directory.parent} has no {METADATA[0]}: add it, with the prompt.")
        texts = [field_of(row) for _, row in rows_of(table)]
        if len(texts) != 1 or texts[0] is None:
            raise TemperaError(f"{table} contains no prompt: write one, as GenEval does.")
        pictures, _ = pictures_in(directory)
        if not pictures:
            raise TemperaError(
                f"{directory} contains no pictures: add them, or delete {directory.parent}."
            )
        for picture in pictures:
            yield picture, texts[0]


def _with_captions(folder: Path, captions: Path) -> Iterator[tuple[Path, str]]:
    """Pictures whose captions lie elsewhere."""
    pictures, _ = pictures_in(folder)
    pictures = [one for one in sorted(pictures, key=_in_order) if captions not in one.parents]
    if not pictures:
        raise TemperaError(f"there are no pictures in {folder}: give a folder of them.")
    if captions.is_dir():
        texts = {file.stem: text_of(read_text(file)) for file in captions.glob("*.txt")}
        yield from _named(pictures, texts, captions)
        return
    rows = [row for _, row in rows_of(captions)]
    if rows and all(isinstance(row, dict) and NAME in row for row in rows):
        yield from _named(pictures, {Path(row[NAME]).stem: field_of(row) for row in rows}, captions)
        return
    if len(rows) != len(pictures):
        raise TemperaError(
            f"{captions} has {len(rows)} prompts for {len(pictures)} pictures of {folder}: give "
            f"one prompt per picture in the order of their names, or a table with a column {NAME}.",
            option="captions",
        )
    yield from _named(
        pictures,
        {one.stem: field_of(row) for one, row in zip(pictures, rows, strict=True)},
        captions,
    )


def _named(
    pictures: list[Path], texts: dict[str, str | None], captions: Path
) -> Iterator[tuple[Path, str]]:
    """Pictures with the texts of their names."""
    lonely = sorted(texts.keys() - {picture.stem for picture in pictures})
    if lonely:
        raise TemperaError(
            f"{len(lonely)} of {len(texts)} captions in {captions} have no picture, such as that "
            f"of {lonely[0]}: add the pictures, or remove the captions.",
            option="captions",
        )
    for picture in pictures:
        text = texts.get(picture.stem)
        if text is None:
            raise TemperaError(
                f"{captions} has no caption for {picture}: add it, or remove the picture.",
                option="captions",
            )
        yield picture, text


def _in_order(file: Path) -> list[Any]:
    """A sort key in which 9 comes before 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(file))]
