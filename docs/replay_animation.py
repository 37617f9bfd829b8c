"""A prompt's decode under several runs, side by side, one frame a round.

    python docs/replay_animation.py FILE.webp RUNS [NUMBER]

RUNS contains the run directories; NUMBER is the prompt's, from 0.
"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tempera.decoding.replay import REPLAYS
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED
from tempera.errors import TemperaError
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import Run
from tempera.reporting.page import blank_columns
from tempera.runtime.files import replacing
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Store

INK, PAPER, MUTED, GAP = (26, 26, 30), (255, 255, 255), (110, 110, 118), 12
FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
SIDE = 264
"""Pixels of a picture's side."""
MILLISECONDS, LAST = 110, 3500
"""How long a round's frame is shown, and the last one."""
BLANK = (228, 228, 232)
COLOURS = {ACCEPTED: (0, 158, 115), RESAMPLED: (213, 94, 0), BONUS: (0, 114, 178)}
"""Of Okabe and Ito, as in report.html."""
NAMES = {ACCEPTED: "accepted draft", RESAMPLED: "resampled", BONUS: "drawn by the target"}
NAME, NOTE, LEGEND = 14, 12, 22


@dataclass(frozen=True)
class Decode:
    """One run's decode of the prompt.

    Attributes:
        name: the run's.
        picture: finished, `SIDE` pixels wide and high.
        grid: rows and columns of tokens that have pixels.
        cells: for every token in the order of decoding, its row and column.
        origins: for every token, as in `tempera.decoding.trace.Trace`.
        ends: number of tokens after each round, rising.
    """

    name: str
    picture: Image.Image
    grid: tuple[int, int]
    cells: list[tuple[int, int]]
    origins: list[int]
    ends: list[int]


def write(path: Path, runs: Sequence[Run], number: int) -> Path:
    """Write the animation and return its path. A cell of the picture appears in the round that
    emits its token, in a frame of its origin's colour.

    Args:
        path: the file to write, .webp.
        runs: those to show.
        number: of the prompt, from 0, among the first run's.

    Raises:
        TemperaError: there is no such prompt, or no run kept its replay.
    """
    texts = list(runs[0].texts.items())
    if not 0 <= number < len(texts):
        raise TemperaError(f"there is no prompt {number}: give 0 to {len(texts) - 1}.")
    name, text = texts[number]
    decodes = [decode for run in runs if (decode := _decode(run, name)) is not None]
    if not decodes:
        raise TemperaError(
            f"no run kept the replay of prompt {number}: choose one of the first, or decode again "
            "in a new directory with a larger replays=."
        )
    frames = [
        _frame(text, decodes, turn) for turn in range(max(len(one.ends) for one in decodes) + 1)
    ]
    with replacing(path) as temporary:
        frames[0].save(
            temporary,
            format="WEBP",
            save_all=True,
            append_images=frames[1:],
            duration=[MILLISECONDS] * (len(frames) - 1) + [LAST],
            loop=0,
            quality=80,
            method=4,
        )
    return path


def _decode(run: Run, name: str) -> Decode | None:
    """A run's decode of a prompt; None if it was not kept."""
    directory = Path(run.directory)
    replay = Store(directory / REPLAYS, run.made_by).rows().get(name)
    if replay is None:
        return None
    picture = read_picture(picture_path(directory, name), run.made_by)
    rows, columns = replay["rows"], replay["columns"]
    blank = blank_columns(replay, picture.shape[1:])
    order = replay.get("order") or range(len(replay["place"]))
    starts = [at for at, place in enumerate(replay["place"]) if place == 1]
    return Decode(
        run.name,
        Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).resize((SIDE, SIDE)),
        (rows, columns - blank),
        [divmod(cell, columns) for cell in order],
        replay["origin"],
        [*starts[1:], len(replay["place"])],
    )


def _frame(text: str, decodes: Sequence[Decode], turn: int) -> Image.Image:
    """All decodes after `turn` rounds; one that has ended stays as it is."""
    name, note = (ImageFont.truetype(FONT, size) for size in (NAME, NOTE))
    width = GAP + len(decodes) * (SIDE + GAP)
    title = textwrap.wrap(text, width // 9, max_lines=2, placeholder="…")
    top = GAP + 20 * len(title) + 8
    page = Image.new("RGB", (width, top + 22 + SIDE + 24 + LEGEND + GAP), PAPER)
    draw = ImageDraw.Draw(page)
    for line, words in enumerate(title):
        draw.text((GAP, GAP + 20 * line), words, INK, name)
    for place, decode in enumerate(decodes):
        left = GAP + place * (SIDE + GAP)
        rounds = min(turn, len(decode.ends))
        draw.text(
            (left, top), textwrap.shorten(decode.name, SIDE // 8, placeholder="…"), MUTED, note
        )
        page.paste(_partial(decode, turn), (left, top + 22))
        done = ([0, *decode.ends])[rounds]
        said = f"round {rounds}: {done} of {len(decode.cells)} tokens"
        draw.text((left, top + 22 + SIDE + 5), said, INK, note)
    x, y = GAP, top + 22 + SIDE + 28
    for origin, meaning in NAMES.items():
        draw.rectangle((x, y + 2, x + 11, y + 13), outline=COLOURS[origin], width=3)
        draw.text((x + 17, y), meaning, MUTED, note)
        x += 17 + int(note.getlength(meaning)) + 16
    return page


def _partial(decode: Decode, turn: int) -> Image.Image:
    """The picture after `turn` rounds, with this round's tokens framed."""
    shown = Image.new("RGB", (SIDE, SIDE), BLANK)
    draw = ImageDraw.Draw(shown)
    ends = [0, *decode.ends]
    done = ends[min(turn, len(decode.ends))]
    new = range(*_last(ends, turn))
    rows, columns = decode.grid
    for at in range(done):
        row, column = decode.cells[at]
        if column >= columns:
            continue
        box = (
            column * SIDE // columns,
            row * SIDE // rows,
            (column + 1) * SIDE // columns,
            (row + 1) * SIDE // rows,
        )
        shown.paste(decode.picture.crop(box), box[:2])
        if at in new:
            inside = (box[0], box[1], box[2] - 1, box[3] - 1)
            draw.rectangle(inside, outline=COLOURS[decode.origins[at]], width=3)
    return shown


def _last(ends: Sequence[int], turn: int) -> tuple[int, int]:
    """The tokens of round `turn`, first and end; none before the first and after the last one."""
    rounds = list(pairwise(ends))
    return rounds[turn - 1] if 0 < turn <= len(rounds) else (0, 0)


if __name__ == "__main__":
    file, runs, *number = sys.argv[1:]
    print(write(Path(file), collect(find_runs([runs])[0])[0], int(number[0]) if number else 0))
