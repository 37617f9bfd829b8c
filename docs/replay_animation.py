"""A prompt's decode under several runs, side by side, in the time that each took.

    python docs/replay_animation.py FILE.webp RUNS [--prompt NUMBER] [--rounds]

RUNS contains the run directories. Of the prompts whose pictures are whole in every run, the one is
shown whose accepted lengths are nearest to the runs' means; or the one with this number, from 0.
`--rounds` plays one round of every run after the other instead.
README's picture is of `eval/run.py -m method=ar,parallel_block data.limit=24` and
`eval/run.py method=coolsd drafter=parallel floor=1 delta=2 data.limit=24`.
"""

import math
import textwrap
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from PIL import Image, ImageDraw, ImageFont

from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.replay import REPLAYS
from tempera.errors import TemperaError
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import Run, round_seconds
from tempera.reporting.page import blank_columns
from tempera.runtime.files import replacing
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Store

PAPER = "#ffffff"
"""Opaque: no ink reads well both on white and on black."""
INK = "#1c1c20"
SOFT = "#5d5d66"
BLANK = "#e3e3e6"
"""Of tokens that are not there yet."""
GAP = 14
"""Pixels between the parts of a frame."""
SIDE = 216
"""Pixels of a picture's side."""
FRAMES = 120
"""Most frames before the last one."""
MILLISECONDS = 80
"""How long a frame is shown."""
LAST_MILLISECONDS = 3500
"""How long the last frame is shown."""
COLOURS = {ACCEPTED: "#009e73", RESAMPLED: "#d55e00", BONUS: "#0072b2"}
"""Of Okabe and Ito, as in report.html."""
NAMES = {ACCEPTED: "accepted draft", RESAMPLED: "resampled", BONUS: "drawn by the target"}
FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"
NOTE = ImageFont.truetype(FONTS / "DejaVuSans.ttf", 18)
TITLE = ImageFont.truetype(FONTS / "DejaVuSans-Bold.ttf", 20)
CLOCK = ImageFont.truetype(FONTS / "DejaVuSans-Bold.ttf", 32)
"""Large, because a page on a phone halves a frame."""
NOTE_LINE = 24
TITLE_LINE = 28
CLOCK_LINE = 42
"""Heights in pixels of a line of text."""


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
        pace: seconds that a round takes; 1 if rounds are counted.
    """

    name: str
    picture: Image.Image
    grid: tuple[int, int]
    cells: list[tuple[int, int]]
    origins: list[int]
    ends: list[int]
    pace: float

    @property
    def end(self) -> float:
        """When it is finished."""
        return len(self.ends) * self.pace


def write(path: Path, runs: Sequence[Run], number: int | None = None, rounds: bool = False) -> Path:
    """Write the animation and return its path. A cell of the picture appears when the round that
    emits its token ends; the last round's cells have frames of their origins' colours.

    Args:
        path: the file to write, .webp.
        runs: those to show.
        number: of the prompt, from 0, among the first run's; by default the most typical, see
            `_typical`.
        rounds: play rounds, not seconds.

    Raises:
        TemperaError: there is no such prompt, a run kept no replay of it, or was not timed.
    """
    name = _typical(runs) if number is None else _numbered(runs, number)
    paces = [1.0] * len(runs) if rounds else round_seconds(runs)
    decodes = [_decode(run, name, pace) for run, pace in zip(runs, paces, strict=True)]
    end = max(decode.end for decode in decodes)
    count = min(FRAMES, int(end)) if rounds else FRAMES
    text = runs[0].texts[name]
    frames = [_frame(text, decodes, end * place / count, rounds) for place in range(count + 1)]
    with replacing(path) as temporary:
        frames[0].save(
            temporary,
            format="WEBP",
            save_all=True,
            append_images=frames[1:],
            duration=[MILLISECONDS] * count + [LAST_MILLISECONDS],
            loop=0,
            quality=80,
            method=4,
        )
    return path


def _typical(runs: Sequence[Run]) -> str:
    """Of the prompts whose pictures no run counts as broken, the one whose accepted lengths differ
    least from the runs' means, as a share of them.
    """
    lengths = pd.DataFrame({place: run.values["accepted_length"] for place, run in enumerate(runs)})
    differences = (lengths / lengths.mean() - 1).abs().max(axis=1)
    for run in runs:
        if "broken" in run.values:
            differences = differences[run.values["broken"].reindex(differences.index) != 1]
    if differences.empty:
        raise TemperaError("no prompt's picture is whole in every run: give --prompt NUMBER.")
    return str(differences.idxmin()[0])


def _numbered(runs: Sequence[Run], number: int) -> str:
    """The prompt with this number."""
    names = list(runs[0].texts)
    if not 0 <= number < len(names):
        raise TemperaError(f"there is no prompt {number}: give 0 to {len(names) - 1}.")
    return names[number]


def _decode(run: Run, name: str, pace: float | None) -> Decode:
    """A run's decode of a prompt."""
    directory = Path(run.directory)
    replay = Store(directory / REPLAYS, run.made_by).rows().get(name)
    if replay is None:
        raise TemperaError(
            f"{directory} has no replay of this prompt: choose one of the first, or decode again "
            "in a new directory with a larger replays=."
        )
    if pace is None:
        raise TemperaError(f"{directory} was not timed: give --rounds, or run it with speed.")
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
        pace=pace,
    )


def _frame(text: str, decodes: Sequence[Decode], now: float, rounds: bool) -> Image.Image:
    """All decodes at this time, or after so many rounds; one that has ended stays as it is."""
    width = max(GAP + len(decodes) * (SIDE + GAP), _legend(None, 0))
    title = textwrap.wrap(text, width // 13, max_lines=2, placeholder="…")
    names = [textwrap.wrap(decode.name, SIDE // 12) for decode in decodes]
    name_lines = max(map(len, names))
    top = GAP + TITLE_LINE * len(title) + GAP // 2
    upper = top + NOTE_LINE * name_lines + 4
    lower = upper + SIDE + 4
    legend = lower + CLOCK_LINE + 2 * NOTE_LINE + GAP // 2
    page = Image.new("RGB", (width, legend + NOTE_LINE + GAP), PAPER)
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(title):
        draw.text((GAP, GAP + TITLE_LINE * number), line, INK, TITLE)
    for place, (decode, lines) in enumerate(zip(decodes, names, strict=True)):
        left = GAP + place * (SIDE + GAP)
        first = top + NOTE_LINE * (name_lines - len(lines))
        for number, line in enumerate(lines):
            draw.text((left, first + NOTE_LINE * number), line, INK, NOTE)
        turn = min(math.floor(now / decode.pace + 1e-6), len(decode.ends))
        page.paste(_partial(decode, turn), (left, upper))
        done = decode.ends[turn - 1] if turn else 0
        passed = min(now, decode.end)
        clock = f"{turn} rounds" if rounds else f"{passed:.2f} s"
        draw.text((left, lower), clock, INK if now < decode.end else COLOURS[BONUS], CLOCK)
        notes = (f"{done} of {len(decode.cells)} tokens", f"in {turn} rounds")
        for number, note in enumerate(notes):
            draw.text((left, lower + CLOCK_LINE + NOTE_LINE * number), note, SOFT, NOTE)
    _legend(draw, legend)
    return page


def _legend(draw: ImageDraw.ImageDraw | None, y: int) -> int:
    """Write what the frames' colours mean on a line at this height, and return where it ends."""
    x = GAP
    for origin, meaning in NAMES.items():
        if draw:
            draw.rectangle((x, y + 3, x + 16, y + 19), outline=COLOURS[origin], width=4)
            draw.text((x + 22, y), meaning, SOFT, NOTE)
        x += 22 + int(NOTE.getlength(meaning)) + 20
    return x


def _partial(decode: Decode, turn: int) -> Image.Image:
    """The picture after `turn` rounds, with the last round's tokens framed until it is finished."""
    shown = Image.new("RGB", (SIDE, SIDE), BLANK)
    draw = ImageDraw.Draw(shown)
    ends = [0, *decode.ends]
    done = ends[turn]
    new = range(ends[turn - 1], done) if 0 < turn < len(decode.ends) else range(0)
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


def main() -> None:
    """Write the animation of the runs in a directory, and print its path."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("runs")
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--rounds", action="store_true")
    given = parser.parse_args()
    finished, _ = collect(find_runs([given.runs])[0])
    print(write(given.file, finished, given.prompt, given.rounds))


if __name__ == "__main__":
    main()
