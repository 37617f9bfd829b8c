from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report_runs import RUNS, made_up_runs

from tempera.decoding.replay import REPLAYS
from tempera.errors import TemperaError
from tempera.reporting import animation
from tempera.reporting.animation import BLANK, SIDE, Decode
from tempera.reporting.collect import ReportRow, collect, find_runs

TWO = (RUNS[0], RUNS[3])


def rows_of(directory: Path) -> list[ReportRow]:
    return collect(find_runs([made_up_runs(directory, TWO)])[0])[0]


@pytest.mark.slow
def test_one_frame_a_round(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    path = animation.write(tmp_path / "replay.webp", rows, 0)
    decode = animation._decode(rows[0], next(iter(rows[0]["texts"])))
    assert decode is not None
    with Image.open(path) as moving:
        assert getattr(moving, "n_frames", 1) == 1 + len(
            decode.cells
        )  # plain autoregression: a token a round
        assert moving.width > 2 * SIDE


def picture() -> Image.Image:
    levels = np.arange(SIDE * SIDE, dtype=np.uint32) % 200
    return Image.fromarray(levels.astype(np.uint8).reshape(SIDE, SIDE)).convert("RGB")


def test_a_cell_appears_in_its_round_and_stays() -> None:
    cells = [(0, 0), (0, 1), (1, 1), (1, 0)]
    decode = Decode("run", picture(), (2, 2), cells, [2, 2, 1, 0], [3, 4])
    half = SIDE // 2
    blank, first, last, after = (
        np.asarray(animation._partial(decode, turn)) for turn in (0, 1, 2, 3)
    )
    assert (blank == BLANK).all()
    assert (first[half:, :half] == BLANK).all()
    assert not (last[half:, :half] == BLANK).all()
    np.testing.assert_array_equal(after, np.asarray(decode.picture))
    framed = [tuple(first[row, column]) for row, column in ((0, 0), (0, half), (half, half))]
    assert framed == [animation.COLOURS[origin] for origin in (2, 2, 1)]
    np.testing.assert_array_equal(last[:half], after[:half])  # the first round's frames are gone


def test_line_ends_have_no_pixels() -> None:
    cells = [(0, 0), (0, 1)]
    decode = Decode("run", picture(), (1, 1), cells, [2, 2], [2])
    np.testing.assert_array_equal(
        np.asarray(animation._partial(decode, 2)), np.asarray(decode.picture)
    )


def test_a_prompt_without_replay(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    for number in (-1, 6):
        with pytest.raises(TemperaError, match=rf"there is no prompt {number}: give 0 to 5"):
            animation.write(tmp_path / "replay.webp", rows, number)
    for row in rows:
        for path in (Path(row["directory"]) / REPLAYS).iterdir():
            path.unlink()
    with pytest.raises(TemperaError, match="no run kept the replay of prompt 0"):
        animation.write(tmp_path / "replay.webp", rows, 0)
    assert not (tmp_path / "replay.webp").exists()
