"""Progress bars of an evaluation."""

from types import TracebackType

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
        self.progress = Progress(*columns, disable=not shown, refresh_per_second=4, expand=True)
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
