"""A prompt's decode under several runs, side by side, one frame a round.

    python docs/replay_animation.py FILE.webp RUNS [NUMBER]

RUNS contains the run directories; NUMBER is the prompt's, from 0.
"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.replay import REPLAYS
from tempera.errors import TemperaError
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import Run
from tempera.reporting.page import blank_columns
from tempera.runtime.files import replacing
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Store

INK = (115, 123, 134, 255)
"""Reads on white and on black."""
PAPER = (0, 0, 0, 0)
BLANK = (128, 128, 136, 70)
"""Of tokens that are not there yet."""
GAP = 12
"""Pixels between the parts of a frame."""
FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
SIDE = 264
"""Pixels of a picture's side."""
MILLISECONDS = 110
"""How long a round's frame is shown."""
LAST_MILLISECONDS = 3500
"""How long the last frame is shown."""
COLOURS = {ACCEPTED: (0, 158, 115), RESAMPLED: (213, 94, 0), BONUS: (0, 114, 178)}
"""Of Okabe and Ito, as in report.html."""
NAMES = {ACCEPTED: "accepted draft", RESAMPLED: "resampled", BONUS: "drawn by the target"}
TITLE_SIZE = 14
NOTE_SIZE = 12
"""Sizes of the text in pixels."""
TITLE_LINE = 20
NAME_LINE = 22
NOTE_LINE = 24
LEGEND_LINE = 22
"""Heights in pixels of a line of the prompt, of the names above the pictures, of the notes below
them, and of the legend.
"""


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
    decodes = []
    for run in runs:
        decode = _decode(run, name)
        if decode is not None:
            decodes.append(decode)
    if not decodes:
        raise TemperaError(
            f"no run kept the replay of prompt {number}: choose one of the first, or decode again "
            "in a new directory with a larger replays=."
        )
    rounds = max(len(decode.ends) for decode in decodes)
    frames = [_frame(text, decodes, turn) for turn in range(rounds + 1)]
    with replacing(path) as temporary:
        frames[0].save(
            temporary,
            format="WEBP",
            save_all=True,
            append_images=frames[1:],
            duration=[MILLISECONDS] * rounds + [LAST_MILLISECONDS],
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
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    columns = replay["columns"]
    blank = blank_columns(replay, picture.shape[1:])
    length = len(replay["place"])
    order = replay.get("order") or range(length)
    starts = [token for token, place in enumerate(replay["place"]) if place == 1]
    return Decode(
        name=run.name,
        picture=image.resize((SIDE, SIDE)),
        grid=(replay["rows"], columns - blank),
        cells=[divmod(cell, columns) for cell in order],
        origins=replay["origin"],
        ends=[*starts[1:], length],
    )


def _frame(text: str, decodes: Sequence[Decode], turn: int) -> Image.Image:
    """All decodes after `turn` rounds; one that has ended stays as it is."""
    title_font = ImageFont.truetype(FONT, TITLE_SIZE)
    note_font = ImageFont.truetype(FONT, NOTE_SIZE)
    width = GAP + len(decodes) * (SIDE + GAP)
    title = textwrap.wrap(text, width // 9, max_lines=2, placeholder="…")
    top = GAP + TITLE_LINE * len(title) + 8
    bottom = top + NAME_LINE + SIDE
    page = Image.new("RGBA", (width, bottom + NOTE_LINE + LEGEND_LINE + GAP), PAPER)
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(title):
        draw.text((GAP, GAP + TITLE_LINE * number), line, INK, title_font)
    for place, decode in enumerate(decodes):
        left = GAP + place * (SIDE + GAP)
        name = textwrap.shorten(decode.name, SIDE // 8, placeholder="…")
        draw.text((left, top), name, INK, note_font)
        page.paste(_partial(decode, turn), (left, top + NAME_LINE))
        rounds = min(turn, len(decode.ends))
        done = decode.ends[rounds - 1] if rounds else 0
        note = f"round {rounds}: {done} of {len(decode.cells)} tokens"
        draw.text((left, bottom + 5), note, INK, note_font)
    _legend(draw, bottom + NOTE_LINE + 4, note_font)
    return page


def _legend(draw: ImageDraw.ImageDraw, y: int, font: ImageFont.FreeTypeFont) -> None:
    """What the frames' colours mean, on a line at this height."""
    x = GAP
    for origin, meaning in NAMES.items():
        draw.rectangle((x, y + 2, x + 11, y + 13), outline=COLOURS[origin], width=3)
        draw.text((x + 17, y), meaning, INK, font)
        x += 17 + int(font.getlength(meaning)) + 16


def _partial(decode: Decode, turn: int) -> Image.Image:
    """The picture after `turn` rounds, with this round's tokens framed."""
    shown = Image.new("RGBA", (SIDE, SIDE), BLANK)
    draw = ImageDraw.Draw(shown)
    ends = [0, *decode.ends]
    last = len(decode.ends)
    done = ends[min(turn, last)]
    new = range(ends[turn - 1], ends[turn]) if 0 < turn <= last else range(0)
    rows, columns = decode.grid
    for token in range(done):
        row, column = decode.cells[token]
        if column >= columns:
            continue
        left = column * SIDE // columns
        upper = row * SIDE // rows
        right = (column + 1) * SIDE // columns
        lower = (row + 1) * SIDE // rows
        shown.paste(decode.picture.crop((left, upper, right, lower)), (left, upper))
        if token in new:
            colour = COLOURS[decode.origins[token]]
            draw.rectangle((left, upper, right - 1, lower - 1), outline=colour, width=3)
    return shown


def main(file: str, runs: str, number: str = "0") -> None:
    """Write the animation of the runs in a directory, and print its path."""
    directories, _ = find_runs([runs])
    finished, _ = collect(directories)
    print(write(Path(file), finished, int(number)))


if __name__ == "__main__":
    main(*sys.argv[1:])
