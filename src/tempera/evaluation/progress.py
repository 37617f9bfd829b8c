"""What a person sees while an evaluation runs, and the table at its end."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


class Bar:
    """Progress over the tokens of a run, with images done, accepted length and tokens a second of this session.

    Args:
        images: how many in all, and how many of them are there already.
        length: tokens an image.
        shown: False in processes other than the main one.
        title: what is going on.
    """

    def __init__(self, images: int, done: int, length: int, shown: bool = True, title: str = "painting") -> None:
        note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True))
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), note, TimeRemainingColumn(elapsed_when_finished=True))
        self.progress = Progress(*columns, disable=not shown, refresh_per_second=4, expand=True)
        self.images, self.done, self.tokens, self.rounds = images, done, 0, 0
        self.task = self.progress.add_task(title, total=images * length, completed=done * length, note=self._note())

    def advance(self, images: int, tokens: int, rounds: int) -> None:
        """What has come since the last call; rounds are summed over images."""
        self.done, self.tokens, self.rounds = self.done + images, self.tokens + tokens, self.rounds + rounds
        self.progress.update(self.task, advance=tokens, note=self._note())

    def _note(self) -> str:
        note = f"{self.done}/{self.images} images"
        if self.rounds:
            seconds = self.progress.tasks[self.task].elapsed or 0.0
            note += f" · accepted length {self.tokens / self.rounds:.2f}"
            note += f" · {self.tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        return note

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()


NAMES = {
    "accepted_length": ("accepted length", "tokens a round; AR has 1.00", ".2f"),
    "tau": ("τ", "accepted drafted tokens a round", ".2f"),
    "acceptance_rate": ("α", "accepted ÷ tested drafted tokens", ".3f"),
    "residual_trials": ("residual trials", "an image", ".1f"),
    "trials_per_rejection": ("  a rejected token", "", ".2f"),
    "residual_failures": ("residual failures", "an image; the target drew instead", ".2f"),
    "tv": ("TV(p, q)", "draft against target", ".3f"),
    "tv_bound": ("TV bound", "summed over an image", ".2f"),
    "kl_per_token": ("KL per token", "nats, emitted law against target", ".4f"),
    "logprob_per_token": ("log-probability", "nats a token, under the target", ".3f"),
    "logprob_deviation": ("  its deviation", "over all tokens", ".3f"),
    "throughput": ("throughput", "tokens a second, in batches", ".0f"),
    "latency_ar": ("latency, AR", "seconds an image, batch 1", ".3f"),
    "latency": ("latency", "seconds an image, batch 1", ".3f"),
    "speedup": ("speed-up", "paired with AR", ".2f"),
    **{f"speedup_{size}": (f"  at batch {size}", "of an image's share", ".2f") for size in (8, 32, 128, 256)},
    "efficiency": ("speed-up ÷ accepted length", "1 is the limit", ".2f"),
    "fid": ("FID ↓", "", ".2f"),
    "kid": ("KID ↓", "", ".4f"),
    "precision": ("precision ↑", "", ".3f"),
    "recall": ("recall ↑", "", ".3f"),
    "clip_score": ("CLIP score ↑", "cosine", ".4f"),
    "attribute_accuracy": ("attribute accuracy ↑", "shape, colour, background", ".3f"),
    "shape_accuracy": ("  shape ↑", "", ".3f"),
    "colour_accuracy": ("  colour ↑", "", ".3f"),
    "background_accuracy": ("  background ↑", "", ".3f"),
    "size_accuracy": ("  size ↑", "", ".3f"),
    "relation_accuracy": ("  relation ↑", "", ".3f"),
    "pattern_accuracy": ("  pattern ↑", "", ".3f"),
}
"""Metrics in the order they are shown: name, explanation, format."""


def print_results(title: str, metrics: Mapping[str, Mapping[str, Any]], notes: list[str], console: Console | None = None) -> None:
    """Print the table of a run: every metric with its 95% interval and the number of units behind it."""
    console = console or Console()
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    for name in ("value", "95% interval", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    roomy = console.width >= 105
    if roomy:
        table.add_column("", no_wrap=True, style="dim")
    for key, (name, explanation, form) in NAMES.items():
        if key in metrics:
            table.add_row(*row(name, metrics[key], form), *([explanation] if roomy else []))
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def row(name: str, interval: Mapping[str, Any], form: str) -> tuple[str, str, str, str]:
    """Name, value, interval and n as text; – where there is no number."""
    value, low, high = (interval.get(key) for key in ("value", "low", "high"))
    if value is None:
        return name, "–", "–", str(interval.get("n", ""))
    span = f"{number(low, form)} … {number(high, form)}" if low is not None and high is not None else "–"
    return name, number(value, form), span, str(int(interval["n"]))


def number(value: float, form: str) -> str:
    """A metric's value in its format; large numbers short, and no minus before a zero."""
    sign = "+" if form.startswith("+") else ""
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:{sign}z{form.removeprefix('+')}}"
