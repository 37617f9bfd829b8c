"""Tables of text from tables of numbers: for Markdown, pages and the console."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from tempera.metrics.table import Metric
from tempera.reporting.collect import Run

FEW = 5
"""Fewer values than this have no interval."""
MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*[]<|"})


@dataclass(frozen=True)
class Section:
    """A table of a report, with what introduces it and what is to know about it."""

    title: str
    table: pd.DataFrame
    text: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def number(value: float | None, form: str) -> str:
    """A value in its format, a dash without one; large numbers are shortened, and zero has no minus
    sign.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    sign = "+" if form.startswith("+") else ""
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:{sign}z{form.removeprefix('+')}}"


def cell(found: Mapping[str, Any], form: str, interval: bool = True) -> str:
    """A metric's value with its interval in brackets, unless that is unknown, infinite, not wanted,
    or of few values.

    Args:
        found: `value`, `low`, `high` and `n`; any may be missing or None.
    """
    value, low, high, n = (found.get(name) for name in ("value", "low", "high", "n"))
    known = np.isfinite(np.array([low, high], float)).all() and (n is None or n >= FEW)
    if not interval or not known:
        return number(value, form)
    return f"{number(value, form)} ({number(low, form)} … {number(high, form)})"


def texts(
    runs: Sequence[Run],
    metrics: Sequence[Metric],
    part: str = "metrics",
    form: str | None = None,
    interval: bool = True,
) -> pd.DataFrame:
    """The runs' metrics as text, under their headings.

    Args:
        metrics: those that no run has are left out.
        part: `metrics` or `differences`.
        form: of all values; each metric's own by default.
    """
    known = [getattr(run, part) for run in runs]
    return pd.DataFrame(
        {
            metric.title if form else metric.heading: [
                cell(one.get(metric.key, {}), form or metric.format, interval) for one in known
            ]
            for metric in metrics
            if any(metric.key in one for one in known)
        }
    )


def escaped(text: str) -> str:
    """The text with Markdown's special characters escaped, on one line."""
    return " ".join(str(text).translate(MARKDOWN).split())


def markdown(frame: pd.DataFrame) -> str:
    """A table of text as Markdown."""
    shown = frame.map(escaped).rename(columns=escaped)
    return str(shown.to_markdown(index=False, tablefmt="pipe", disable_numparse=True))


def page(frame: pd.DataFrame) -> str:
    """A table of text as HTML, intervals below their values."""
    table = str(frame.to_html(index=False, border=0)).replace(" (", "<br>(")
    return f'<div class="wide" tabindex="0">{table}</div>'


def show(frame: pd.DataFrame, title: str = "", console: Console | None = None) -> None:
    """Print a table of text. Columns that are too many for the console follow in tables below, so
    that no value is broken.
    """
    console = console or Console()
    first, *others = frame
    room = console.width - 3 - max(map(len, " ".join([first, *frame[first]]).split()))
    width = {
        name: max(min(len(name), 12), *map(len, [*name.split(), *frame[name]])) for name in others
    }
    if title:
        console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    while others:
        ends = accumulate(width[name] + 3 for name in others)
        count = max(1, sum(end <= room for end in ends))
        part, others = others[:count], others[count:]
        shown = Table(box=box.SIMPLE_HEAD)
        shown.add_column(first, overflow="fold")
        for name in part:
            shown.add_column(fill(name, width[name]), justify="right", no_wrap=True)
        for line in frame[[first, *part]].itertuples(index=False):
            shown.add_row(*line)
        console.print(shown)
