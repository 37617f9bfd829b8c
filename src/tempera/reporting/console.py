"""A run's results on the console."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tempera.metrics import table


def print_results(
    title: str,
    metrics: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    console: Console | None = None,
) -> None:
    """Print a run's metrics as a table, each with its 95% interval and its number of prompts, then
    the notes.
    """
    console = console or Console()
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    shown.add_column("metric", no_wrap=True)
    for name in ("value", "95% interval", "n"):
        shown.add_column(name, justify="right", no_wrap=True)
    roomy = console.width >= 105
    if roomy:
        shown.add_column("", no_wrap=True, style="dim")
    for metric in table.METRICS:
        if metric.key in metrics:
            cells = row(metric.heading, metrics[metric.key], metric.format)
            shown.add_row(*cells, *([metric.unit] if roomy else []))
    console.print(shown)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def row(name: str, interval: Mapping[str, Any], form: str) -> tuple[str, str, str, str]:
    """Name, value, interval and n as text; a dash for a missing number."""
    value, low, high = (interval.get(key) for key in ("value", "low", "high"))
    if value is None:
        return name, "–", "–", str(interval.get("n", ""))
    span = (
        f"{number(low, form)} … {number(high, form)}"
        if low is not None and high is not None
        else "–"
    )
    return name, number(value, form), span, str(int(interval["n"]))


def number(value: float, form: str) -> str:
    """A metric's value in its format; large numbers are shortened, and zero has no minus sign."""
    sign = "+" if form.startswith("+") else ""
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:{sign}z{form.removeprefix('+')}}"
