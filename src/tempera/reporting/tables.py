"""Tables of numbers, and the one place where they become text: for the console, Markdown, HTML and
CSV.
"""

import errno
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from textwrap import fill
from typing import Any, TypeGuard

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from typing_extensions import override

FEW = 5
"""Fewer values than this have no interval."""
MARKDOWN = re.compile(r"[\\`*\[\]<|~$]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""Signs within a line that Markdown, with tables and mathematics, takes for its own."""
PARTS = ("value", "low", "high", "n", "significant", "text")
"""Of a cell: a value, its interval, the number of values that it is made of and whether it differs
significantly from 0; or a text.
"""
NUMBERS = dict.fromkeys(("value", "low", "high", "n"), float) | {"significant": object}
Cell = Mapping[str, Any]
"""The parts of a cell that are known."""


@dataclass(frozen=True)
class Section:
    """A table of a report, with what introduces it and what is to know about it.

    Attributes:
        numbers: made by `table`.
        formats: of the values, by the heading of their column.
    """

    title: str
    numbers: pd.DataFrame
    formats: Mapping[str, str]
    text: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


class Output(Console):
    """Rich's console for plain text: brackets and colons are no markup. Where nobody reads it, it
    raises the error that `print` does: rich would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output")


def table(
    names: Sequence[str], columns: Mapping[str, Sequence[Cell]], label: str = "run"
) -> pd.DataFrame:
    """A table of numbers: rows by name, columns by heading and part. Headings without any value or
    text are left out.

    Args:
        names: of the rows.
        columns: by heading, the cell of each row.
        label: heading of the names.
    """
    frames = {
        heading: pd.DataFrame(list(cells), columns=PARTS).astype(NUMBERS)
        for heading, cells in columns.items()
        if any(known(cell.get("value")) or cell.get("text") for cell in cells)
    }
    index = pd.Index(names, name=label, dtype=object)
    if not frames:
        return pd.DataFrame(index=index, columns=pd.MultiIndex.from_product([[], PARTS]))
    return pd.concat(frames, axis=1).set_axis(index)


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number, perhaps an infinite one."""
    return value is not None and not math.isnan(value)


def long(sections: Iterable[Section]) -> pd.DataFrame:
    """The cells of all tables, one a row, with the names of its table, row and column."""
    frames = [
        section.numbers.stack(level=0, future_stack=True)
        .rename_axis(["row", "column"])
        .reset_index()
        .assign(table=section.title)
        for section in sections
        if not section.numbers.empty
    ]
    cells = pd.concat(frames).dropna(subset=["value", "text"], how="all")
    return cells[["table", "row", "column", *PARTS]]


def is_of_few(parts: Cell) -> bool:
    """Whether a cell is made of too few values for an interval."""
    count = parts.get("n")
    return known(count) and count < FEW


def number(value: float | None, form: str) -> str:
    """A value in its format, a dash without one; large numbers are shortened, and zero has no minus
    sign.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    sign = "+" if form.startswith("+") else ""
    if abs(value) >= 1e5:
        return f"{value:.3g}"
    return f"{value:{sign}z{form.removeprefix('+')}}"


def cell(parts: Cell, form: str, interval: bool = True) -> str:
    """A cell as text: its value with its interval in brackets, unless that is unknown, infinite,
    not wanted, or of few values. An asterisk marks what is significant.

    Args:
        parts: some of `PARTS`; any may be missing, None or NaN.
        form: format of the numbers.
        interval: whether the interval is wanted.
    """
    if isinstance(parts.get("text"), str):
        return str(parts["text"])
    mark = "*" if parts.get("significant") is True else ""
    text = number(parts.get("value"), form) + mark
    low = parts.get("low")
    high = parts.get("high")
    bounded = known(low) and known(high) and math.isfinite(low) and math.isfinite(high)
    if not interval or not bounded or is_of_few(parts):
        return text
    return f"{text} ({number(low, form)} … {number(high, form)})"


def texts(section: Section, interval: bool = True) -> pd.DataFrame:
    """The table as text: its first column has the names of the rows."""
    numbers = section.numbers
    shown = {numbers.index.name: numbers.index}
    for heading in numbers.columns.unique(0):
        form = section.formats.get(heading, "")
        cells = numbers[heading].to_dict("records")
        shown[heading] = [cell(parts, form, interval) for parts in cells]
    return pd.DataFrame(shown)


def transposed(section: Section) -> pd.DataFrame:
    """The table as text with rows and columns exchanged: its first column has the headings."""
    label = str(section.numbers.index.name)
    exchanged = texts(section).set_index(label).T.rename_axis(label)
    return exchanged.rename_axis(columns=None).reset_index()


def escaped(text: str) -> str:
    """The text with Markdown's special characters escaped, on one line."""
    return MARKDOWN.sub(r"\\\g<0>", " ".join(str(text).split()))


def markdown(frame: pd.DataFrame) -> str:
    """A table of text as Markdown."""
    shown = frame.map(escaped).rename(columns=escaped)
    return str(shown.to_markdown(index=False, tablefmt="pipe", disable_numparse=True))


def markdown_of(section: Section) -> str:
    """What stands below a section's title, as Markdown: its text, table and notes."""
    notes = [f"> {escaped(note)}" for note in section.notes]
    return "\n\n".join(filter(None, [escaped(section.text), markdown(texts(section)), *notes]))


def html_of(section: Section) -> str:
    """What stands below a section's title, as HTML."""
    notes = "".join(f'<p class="hint">{html.escape(note)}</p>' for note in section.notes)
    text = f'<p class="hint">{html.escape(section.text)}</p>' if section.text else ""
    return f"{text}{page(texts(section))}{notes}"


def page(frame: pd.DataFrame) -> str:
    """A table of text as HTML, intervals below their values."""
    shown = re.sub(r" (\([^()]* … [^()]*\))", r"<br>\1", frame.to_html(index=False, border=0))
    return f'<div class="wide" tabindex="0">{shown}</div>'


def show(frame: pd.DataFrame, title: str = "", console: Console | None = None) -> None:
    """Print a table of text. Columns that are too many for the console follow in tables below, so
    that no value is broken.
    """
    console = console or Output()
    if title:
        console.print(title, style="bold", soft_wrap=True)
    names = frame.columns[0]
    longest_word = max(map(len, " ".join([names, *frame[names]]).split()))
    room = console.width - 3 - longest_word
    for whole in (True, False):  # headings on one line, if then everything fits
        widths = {heading: _width(frame, heading, whole) for heading in frame.columns[1:]}
        groups = list(_fitting(widths, room))
        if len(groups) == 1:
            break
    for headings in groups:
        printed = Table(box=box.SIMPLE_HEAD)
        printed.add_column(names, overflow="fold")
        for heading in headings:
            printed.add_column(fill(heading, widths[heading]), justify="right", no_wrap=True)
        for line in frame[[names, *headings]].itertuples(index=False):
            printed.add_row(*line)
        console.print(printed)


def _width(frame: pd.DataFrame, heading: str, whole: bool) -> int:
    """Characters of a column: of its longest value, and of its heading, which is whole or broken
    between words.
    """
    widest = max(map(len, [*heading.split(), *frame[heading]]))
    return max(widest, len(heading) if whole else min(len(heading), 12))


def _fitting(widths: Mapping[str, int], room: int) -> Iterable[list[str]]:
    """The headings in groups that fit beside each other, at least one in each."""
    remaining = list(widths)
    while remaining:
        ends = accumulate(widths[heading] + 3 for heading in remaining)
        count = max(1, sum(end <= room for end in ends))
        yield remaining[:count]
        remaining = remaining[count:]
