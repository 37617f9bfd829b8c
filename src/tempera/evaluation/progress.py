"""Progress bars of an evaluation and of a sweep of evaluations."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class Bar:
    """Progress over the tokens of a run, with the number of finished images, and the accepted
    length and tokens per second since this process started.

    Args:
        images: number of images.
        done: how many of them already exist.
        length: tokens per image.
        shown: False in processes other than the main one.
        title: the activity that the bar names.
    """

    def __init__(
        self, images: int, done: int, length: int, shown: bool = True, title: str = "generating"
    ) -> None:
        note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            note,
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.progress = Progress(
            *columns, disable=not shown or _in_a_sweep(), refresh_per_second=4, expand=True
        )
        self.images, self.done, self.tokens, self.rounds = images, float(done), 0.0, 0.0
        self.task = self.progress.add_task(
            title, total=images * length, completed=done * length, note=self._note()
        )

    def finish(self) -> None:
        """Show that all images exist, whichever process made them."""
        self.done = self.images
        self.progress.update(
            self.task, completed=self.progress.tasks[self.task].total, note=self._note()
        )

    def advance(self, images: float, tokens: float, rounds: float) -> None:
        """Count what was done since the last call; rounds are summed over images. With several
        processes, one counts for all of them.
        """
        self.done += images
        self.tokens += tokens
        self.rounds += rounds
        self.progress.update(self.task, advance=tokens, note=self._note())

    def _note(self) -> str:
        note = f"{self.done:.0f}/{self.images} images"
        if self.rounds:
            seconds = self.progress.tasks[self.task].elapsed or 0.0
            note += f" · accepted length {self.tokens / self.rounds:.2f}"
            note += f" · {self.tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        return note

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()


@contextmanager
def only_line() -> Iterator[None]:
    """Hide the bars of runs inside, whether in this process or in one that it starts."""
    os.environ["TEMPERA_PROGRESS"] = "sweep"
    try:
        yield
    finally:
        del os.environ["TEMPERA_PROGRESS"]


def _in_a_sweep() -> bool:
    return os.environ.get("TEMPERA_PROGRESS") == "sweep"


TIMED = 4
"""Timing one prompt takes about as long as generating this many images, because plain
autoregression and the method decode it in turn, and not in a batch.
"""


class SweepProgress:
    """One line for the runs of a sweep: finished runs, finished images, and the time left,
    predicted from the work done since the start. It reads the run directories, so any process may
    write them.

    Args:
        jobs: each run's directory, number of images (None: all prompts of a file) and number of
            timed prompts.
        every: seconds between updates.
    """

    def __init__(self, jobs: Sequence[tuple[Path, int | None, int]], every: float = 2.0) -> None:
        self.jobs, self.every, self._rows = jobs, every, _RowCounter()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self.progress = Progress(*columns, refresh_per_second=1)
        self.task = self.progress.add_task("sweep", total=1.0, note="")
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._began, self._share = time.monotonic(), self.share()

    def share(self) -> float:
        """The share of the sweep's work that is done, from 0 to 1. A run of unknown size counts as
        one of mean size, and only once it is finished.
        """
        done, sizes = [], []
        for directory, images, timed in self.jobs:
            size = None if images is None else images + TIMED * timed
            if (directory / "metrics.json").is_file():
                part = 1.0
            else:
                found = self._rows(directory, "records") + TIMED * self._rows(
                    directory, "timings/*"
                )
                part = min(found / size, 0.99) if size else 0.0
            done.append(part)
            sizes.append(size)
        known = [size for size in sizes if size]
        mean = sum(known) / len(known) if known else 1.0
        weights = [size or mean for size in sizes]
        return sum(part * weight for part, weight in zip(done, weights, strict=True)) / sum(weights)

    def note(self, seconds: float) -> str:
        """The text beside the bar, `seconds` after the start."""
        runs = sum((directory / "metrics.json").is_file() for directory, _, _ in self.jobs)
        images = sum(self._rows(directory, "records") for directory, _, _ in self.jobs)
        note = f"{runs}/{len(self.jobs)} runs · {images} images"
        share = self.share()
        if self._share < share < 1:
            left = seconds * (1 - share) / (share - self._share)
            note += f" · {left / 60:.0f} min left" if left >= 90 else f" · {left:.0f} s left"
        return note

    def _watch(self) -> None:
        while not self._stop.wait(self.every):
            self._look()

    def _look(self) -> None:
        note = self.note(time.monotonic() - self._began)
        self.progress.update(self.task, completed=self.share(), note=note)

    def __enter__(self) -> "SweepProgress":
        self.progress.start()
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._watcher.join()
        self._look()
        self.progress.stop()


class _RowCounter:
    """Counts the rows of row stores; a part file is read again only if it was replaced."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int]] = {}

    def __call__(self, directory: Path, stores: str) -> int:
        """Rows in a run directory's row stores; a part file that is being replaced counts 0."""
        return sum(self._of(part) for part in directory.glob(f"{stores}/*.parquet"))

    def _of(self, part: Path) -> int:
        try:
            written = part.stat().st_mtime_ns
            before, rows = self._known.get(part, (None, 0))
            if before != written:
                rows = pq.ParquetFile(part).metadata.num_rows
                self._known[part] = written, rows
        except (pa.ArrowException, OSError):
            return 0
        return rows
