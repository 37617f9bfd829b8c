"""The progress line of a sweep, from what its runs have written."""

from pathlib import Path

import pytest

from tempera.evaluation import progress
from tempera.evaluation.progress import Bar, SweepProgress, only_line
from tempera.runtime.row_store import Store


def written(directory: Path, images: int = 0, timed: int = 0, finished: bool = False) -> Path:
    """A run directory with this much in it."""
    directory.mkdir(exist_ok=True)
    if images:
        Store(directory / "records").add([{"id": f"i{n}"} for n in range(images)])
    if timed:
        Store(directory / "timings" / "cpu").add([{"id": f"t{n}"} for n in range(timed)])
    if finished:
        (directory / "metrics.json").write_text("{}")
    return directory


def test_images_and_timed_prompts_are_shares_of_the_work(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a"), written(tmp_path / "b")
    line = SweepProgress([(one, 8, 2), (other, 16, 0)])
    assert line.share() == 0
    assert line.note(10.0) == "0/2 runs · 0 images"
    written(one, images=8)
    assert line.share() == pytest.approx(8 / 32)  # a timed prompt counts as 4 images
    assert line.note(10.0) == "0/2 runs · 8 images · 30 s left"
    written(one, timed=2, finished=True)
    assert line.share() == pytest.approx(16 / 32)
    assert line.note(120.0) == "1/2 runs · 8 images · 2 min left"
    written(other, images=16)
    assert line.share() < 1  # not scored yet
    written(other, finished=True)
    assert line.share() == 1
    assert line.note(130.0) == "2/2 runs · 24 images"


def test_the_time_left_counts_from_the_start_of_this_sweep(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", images=8, finished=True), written(tmp_path / "b")
    line = SweepProgress([(one, 8, 0), (other, 8, 0)])
    written(other, images=4)
    assert line.note(10.0) == "1/2 runs · 12 images · 10 s left"


def test_runs_of_unknown_size_count_when_they_are_finished(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", images=5), written(tmp_path / "b", images=5)
    line = SweepProgress([(one, None, 8), (other, 10, 0)])
    assert line.share() == pytest.approx(0.25)
    written(one, finished=True)
    assert line.share() == pytest.approx(0.75)


def test_it_watches_while_the_runs_write(tmp_path: Path) -> None:
    one = written(tmp_path / "a")
    with SweepProgress([(one, 4, 0)], every=0.01) as line:
        written(one, images=4, finished=True)
    assert line.progress.tasks[0].completed == 1
    assert line.progress.tasks[0].fields["note"] == "1/1 runs · 4 images"


def test_a_part_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = written(tmp_path / "a", images=4), []
    opened = progress.pq.ParquetFile
    monkeypatch.setattr(progress.pq, "ParquetFile", lambda part: read.append(part) or opened(part))
    line = SweepProgress([(one, 8, 0)])
    line.note(1.0)
    assert len(read) == 1
    other = written(tmp_path / "b", images=6)
    (part,), (longer,) = ((place / "records").glob("*.parquet") for place in (one, other))
    longer.replace(part)
    assert line.share() == pytest.approx(6 / 8)
    assert len(read) == 2


def test_a_damaged_part_does_not_stop_the_sweep(tmp_path: Path) -> None:
    one = written(tmp_path / "a", images=4)
    (one / "records" / "x.parquet").write_bytes(b"half")
    assert SweepProgress([(one, 8, 0)]).share() == pytest.approx(0.5)


def test_a_run_of_a_sweep_has_no_bar_of_its_own() -> None:
    with only_line():
        assert Bar(1, 0, 1).progress.disable
    assert not Bar(1, 0, 1).progress.disable
