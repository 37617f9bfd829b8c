"""All numbers of the shipped model on README and these pages, from results.json to text.

python docs/results/render.py

writes the tables between `<!-- NAME -->` and `<!-- end -->`, the sentences of quotes.txt, rows.csv,
study.csv, runs.csv, pareto.png and study.png. `collect.py` writes results.json.
"""

import json
import re
import runpy
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUOTES = (HERE / "quotes.txt").read_text(encoding="utf-8").splitlines()
"""Sentences of the pages, with the row and the quantity in place of each number: `r` of the rows,
`s` of the study.
"""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
INTERVAL = ("value", "low", "high")
NUMBER = r"([+−-]?\d+(?:\.\d+)?%?|infinite)"
PLAIN = ("ar", "mar ar")
DRAFT_FREE = (
    "jacobi",
    "sjd",
    "scd",
    "sjd_pac",
    "sjd_pac_full",
    "gsd",
    "gsd_published",
    "entropy",
)
COLUMNS = {  # of each table: heading and cell, by the row's numbers
    "decision": {
        "tokens per round": "{accepted_length:.2f}",
        "speed-up here": "{here:.1f}",
        "on XL": "{xl:.1f}",
        "ideal": "{cheap:.1f}",
        "summed TV bound": "{tv_bound:.1f}",
        "KL bound per token": "{kl_per_token:.3f}",
        "broken, % ↓": "{percent.value:.1f} ({percent.low:.0f} … {percent.high:.0f})",
    },
    "discrete": {
        "tokens per round": "{accepted_length:.2f}",
        "cost of a round, in AR rounds": "{here_cost:.1f}",
        "speed-up here": "{here:.2f}",
        "on XL": "{xl:.1f}",
        "ideal": "{cheap:.1f}",
        "summed TV bound": "{tv_bound:.1f}",
        "KL bound per token": "{kl_per_token:.3f}",
        "broken ↓": "{broken:.1%}",
    },
    "continuous": {
        "tokens per round": "{accepted_length:.2f}",
        "speed-up": "{here:.2f}",
        "FID ↓": "{fid:.1f}",
        "KID ↓": "{kid:.2f}",
        "CLIP score ↑": "{clip_score:.3f}",
        "shapes ↑": "{shape_accuracy:.3f}",
        "colours ↑": "{colour_accuracy:.3f}",
        "broken ↓": "{broken:.1%}",
    },
}
DECISIONS = {  # what a row is for
    "ar": "plain autoregression",
    "parallel_block": "**exact**, with a draft",
    "scd": "**exact**, without a draft",
    "parallel_tree": "exact, more tokens than `parallel_block`",
    "coolsd drafter=parallel floor=1 delta=2": "**relaxed**, fast",
    "coolsd floor=1 delta=2": "**relaxed**, as few broken pictures as `ar`",
    "optimal_rsd schedule=optimal expected_length=3.4": (
        "relaxed, about half the KL bound of the row above"
    ),
    "priced_tree": "relaxed, most tokens per round",
    "coolsd delta=2": "Cool-SD as published",
    "lantern": "LANTERN: for each of the 1,008 codes, the nearest 100 count as similar",
}
ON_XL = ("eagle", "parallel", "lantern", "lanternpp", "parallel_tree", "priced_tree", "sjd")
STUDY = {  # quantities of the study: table, column
    "length": ("overview", "length, evaluation"),
    "tv": ("overview", "summed TV bound"),
    "kl": ("overview", "KL bound per token"),
    "fid": ("losses", "FID ↓"),
    "clip": ("losses", "CLIP score ↑"),
    "attributes": ("losses", "attribute accuracy ↑"),
    "shapes": ("losses", "shape accuracy ↑"),
    "colours": ("losses", "colour accuracy ↑"),
    "broken": ("losses", "broken pictures ↓"),
    "longer": ("differences", "accepted length"),
}
OTHER_BUDGETS = r"delta=(?!2$)"
"""Rows that stand in rows.csv and in the chart, not in the table."""
SPEED_UPS = {"here": "here", "xl": "on LlamaGen-XL", "cheap": "if passes cost the same"}
Results = Mapping[str, Any]
Rows = Mapping[str, SimpleNamespace]


class Interval(NamedTuple):
    """A value, which a format shows, its interval, and whether it differs significantly from 0."""

    value: float
    low: float
    high: float
    significant: bool = False

    @classmethod
    def of(cls, stored: Sequence[Any]) -> "Interval":
        """What results.json holds: all of it, or the value alone."""
        if len(stored) > 1:
            return cls(*stored)
        (value,) = stored
        return cls(value, value, value)

    @property
    def loss(self) -> "Interval":
        """How much smaller a difference is than 0."""
        return Interval(-self.value, -self.high, -self.low, self.significant)

    def __format__(self, spec: str) -> str:
        if self.value == float("inf"):
            return "infinite"
        return format(self.value, spec) if any(self[:3]) else "0"


UNKNOWN = Interval(float("inf"), float("inf"), float("inf"))
NONE = Interval(0.0, 0.0, 0.0)
"""A bound of exact methods, and the speed, for sorting, of a run that was not timed."""


def read() -> dict[str, Any]:
    """The content of results.json."""
    results: dict[str, Any] = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    return results


def numbers(results: Results) -> Rows:
    """All numbers of each row: what was measured, and what follows from it."""
    rows = {}
    for row, measured in results["rows"].items():
        values: dict[str, Any] = {key: Interval.of(stored) for key, stored in measured.items()}
        length = values["accepted_length"]
        values["saved"] = 1 - 1 / length.value
        if "tv" in values or "kl_per_token" in values:  # discrete tokens; a rule may have no bound
            bound = values.get("kl_per_token", UNKNOWN).value
            values["exact"] = "yes" if bound < 1e-6 else "no"
            if values["exact"] == "yes":  # sums of rounding errors
                values |= {"tv_bound": NONE, "kl_per_token": NONE}
        if broken := values.get("broken"):
            values["percent"] = Interval(*(100 * end for end in broken[:3]))
        values |= {f"{where}_cost": cost for where, cost in costs(results, row).items()}
        values |= speed_ups(results, row, length)
        rows[row] = SimpleNamespace(**values)
    return rows


def speed_ups(results: Results, row: str, length: Interval) -> dict[str, Interval]:
    """An accepted length over what a round of the row costs: here, on LlamaGen-XL, and there if
    every pass took as long as one over a single token.
    """
    return {
        where: Interval(length.value / cost.value, length.low / cost.high, length.high / cost.low)
        for where, cost in costs(results, row).items()
    }


def costs(results: Results, row: str) -> dict[str, Interval]:
    """What a round of the row costs in AR rounds: here, on LlamaGen-XL, and there if every pass
    took as long as one over a single token.
    """
    kind = results.get("kinds", {}).get(row, row)
    if kind in PLAIN:
        return dict.fromkeys(("here", "xl", "cheap"), Interval(1.0, 1.0, 1.0))
    on_xl = of_sessions(results, results.get("kinds_on_xl", {}).get(kind, kind) + " on XL")
    timed = {
        "here": [Interval.of(cost) for cost in of_sessions(results, kind)],
        "xl": [Interval.of([method / ar]) for ar, method, _ in on_xl],
        "cheap": [Interval.of([1 + draft / ar]) for ar, _, draft in on_xl],
    }
    found = {where: over_sessions(sessions) for where, sessions in timed.items() if sessions}
    return found | ({"cheap": Interval(1.0, 1.0, 1.0)} if kind in DRAFT_FREE else {})


def of_sessions(results: Results, kind: str) -> list[list[float]]:
    """What each session measured of a kind of rounds."""
    return [session[kind] for session in results["sessions"].values() if kind in session]


def over_sessions(timed: Sequence[Interval]) -> Interval:
    """The median over sessions, and the interval that contains all of theirs."""
    return Interval(
        statistics.median(cost.value for cost in timed),
        min(cost.low for cost in timed),
        max(cost.high for cost in timed),
    )


def study_numbers(results: Results) -> dict[str, Any]:
    """All numbers of the study: of each row, of each correlation, and over all relaxations."""
    study = results["study"]
    rows: dict[str, Any] = {}
    for name in study["overview"]:
        values = study_row(study, name)
        speed = speed_ups(results, name.partition(" at ")[0], values["length"])
        rows[name] = SimpleNamespace(**values, **speed)
    relaxed = {name: row for name, row in rows.items() if " at " in name}
    beside_uniform(rows, relaxed)
    rows |= over_relaxations(relaxed)
    for name, line in study["correlations"].items():
        rows[name] = {
            column.removeprefix("loss of "): Interval.of(cell) for column, cell in line.items()
        }
    return rows


def beside_uniform(rows: Rows, relaxed: Rows) -> None:
    """How much larger and smaller each bound is than the uniform relaxation's at the length that
    the row has in fact, by the parabola through exact decoding and the uniform relaxation's rows.
    """
    uniform = [row for name, row in rows.items() if name.startswith(("eagle", "uniform_rsd at"))]
    lengths = [row.length.value for row in uniform]
    for key in ("tv", "kl"):
        parabola = np.polyfit(lengths, [getattr(row, key).value for row in uniform], 2)
        for row in relaxed.values():
            if not hasattr(row, key):  # a rule without bounds
                continue
            more = getattr(row, key).value / np.polyval(parabola, row.length.value) - 1
            setattr(row, f"{key}_more", more)
            setattr(row, f"{key}_less", -more)


def study_row(study: Results, name: str) -> dict[str, Any]:
    """The quantities of `STUDY` of one row, and as `…_beside` their differences from the uniform
    schedule at the same length; without those that were not measured.
    """
    values: dict[str, Any] = {}
    for key, (table, column) in STUDY.items():
        for ending, part in (("", table), ("_beside", "differences")):
            cell = study[part].get(name, {}).get(column)
            if cell is not None:
                values[key + ending] = Interval.of(cell)
    return values


def over_relaxations(relaxed: Rows) -> Rows:
    """The largest losses of all relaxations but LANTERN, the usual half widths of their intervals,
    the largest miss of a length, and what the half width of a difference in length is worth on the
    uniform schedule.
    """
    mild = [row for name, row in relaxed.items() if "lantern " not in name]
    most = {
        "length": max(
            abs(row.length.value - float(name.rpartition(" at ")[2]))
            for name, row in relaxed.items()
        )
    }
    width = {}
    for key in ("broken", "clip", "attributes", "shapes", "colours"):
        changes = [getattr(row, key) for row in mild]
        losses = changes if key == "broken" else [change.loss for change in changes]
        most[key] = max(loss.high for loss in losses)
        width[key] = statistics.median((loss.high - loss.low) / 2 for loss in losses)
    longer = [row.longer for row in relaxed.values() if hasattr(row, "longer")]
    step = statistics.median((change.high - change.low) / 2 for change in longer)
    low, high = (row for name, row in relaxed.items() if name.startswith("uniform_rsd at"))
    worth = {
        key: step
        * (getattr(high, key).value - getattr(low, key).value)
        / (high.length.value - low.length.value)
        for key in ("tv", "kl")
    }
    return {
        "most": SimpleNamespace(**most),
        "width": SimpleNamespace(length=step, **width),
        "worth": SimpleNamespace(**worth),
    }


def lines(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, with true minus signs."""
    heads = list(heads)
    body = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    body.insert(1, "|" + "|".join(["---"] * len(heads)) + "|")
    return re.sub(r"(?<!\w)-(?=\d)", "−", "\n".join(body))


def table(name: str, rows: Rows) -> str:
    """A table of the rows; "–" where nothing was measured."""
    if name == "decision":
        names = list(DECISIONS)
    else:
        names = [row for row in rows if row.startswith("mar ") == (name == "continuous")]
    shown = []
    if name == "discrete":
        names = [row for row in names if not re.search(OTHER_BUDGETS, row)]
        names.sort(key=lambda row: -getattr(rows[row], "here", NONE).value)
    for row in names:
        cells = []
        for template in COLUMNS[name].values():
            try:
                cells.append(template.format(**vars(rows[row])))
            except KeyError:
                cells.append("–")
        if set(cells) != {"–"}:
            about = [DECISIONS[row]] if name == "decision" else []
            shown.append([*about, f"`{row.removeprefix('mar ')}`", *cells])
    heads = ["purpose", "run"] if name == "decision" else ["run"]
    return lines([*heads, *COLUMNS[name]], shown)


def csv_files(results: Results) -> dict[str, str]:
    """Every number beside the pages: of the rows, of the study, and where they come from."""
    rows = [
        (row, key, *number[:3])
        for row, values in numbers(results).items()
        for key, number in vars(values).items()
        if isinstance(number, Interval)
    ]
    study = [
        (table, row, column, *(cell if isinstance(cell, list) else (cell,)))
        for table, lines_of in results["study"].items()
        for row, line in lines_of.items()
        for column, cell in line.items()
    ]
    study += [
        ("speed-up", run, heading, *getattr(values, where)[:3])
        for run, values in study_numbers(results).items()
        for where, heading in SPEED_UPS.items()
        if hasattr(values, where)
    ]
    timed = {name: session["run"] for name, session in results["sessions"].items()}
    runs = [(row, *about) for row, about in (results["runs"] | timed).items()]
    return {
        "rows.csv": as_csv(("run", "quantity", *INTERVAL), rows),
        "study.csv": as_csv(("table", "run", "quantity", *INTERVAL, "significant"), study),
        "runs.csv": as_csv(("numbers", "command", "commit", "machine", "date"), runs),
    }


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Missing cells at a row's end stay empty."""
    table = pd.DataFrame([dict(zip(heads, row, strict=False)) for row in rows], columns=heads)
    return table.astype(object).to_csv(index=False, lineterminator="\n")


def xl_table(results: Results) -> str:
    """Times of LlamaGen-XL's rounds, the medians of all sessions."""
    shown = []
    for kind in ON_XL:
        timed = of_sessions(results, f"{kind} on XL")
        medians = [f"{statistics.median(part):.0f}" for part in zip(*timed, strict=True)]
        shown.append([f"`{kind}`", *(medians or ["–"] * 3)])
    return lines(["round of", "AR, ms", "the method, ms", "of which drafting, ms"], shown)


def everything(results: Results) -> dict[str, Mapping[str, Any]]:
    """What sentences quote: of rows, of the study, and mean shares of broken pictures."""
    rows = numbers(results)
    return {"r": rows, "s": study_numbers(results), "b": broken(rows)}


def broken(rows: Rows) -> dict[str, float]:
    """The mean share of broken pictures of the exact rows of discrete tokens, and of the relaxed
    ones but LANTERN. `jacobi` has the pictures of `ar`.
    """
    shares: dict[str, list[float]] = {"exact": [], "relaxed": []}
    for name, row in rows.items():
        if hasattr(row, "exact") and name not in ("jacobi", "lantern"):
            shares["exact" if row.exact == "yes" else "relaxed"].append(row.broken.value)
    return {kind: statistics.mean(values) for kind, values in shares.items()}


def quotes(
    text: str, values: Mapping[str, Any], templates: Sequence[str]
) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Where a page quotes these sentences, and the numbers that should stand there."""
    for template in templates:
        pattern = ""
        quoted = []
        for words, field, spec, _ in Formatter().parse(template):
            pattern += r"\s+".join(map(re.escape, re.split(r"\s+", words)))
            if field is not None:
                pattern += NUMBER
                number = f"{{{field}:{spec}}}".format(**values)
                quoted.append(number.replace("-", "−"))
        for quote in re.finditer(pattern, text):
            yield quote, quoted


def render(text: str, results: Results) -> str:
    """A page with its tables and its quoted numbers as in the results."""
    values = everything(results)
    tables = {name: table(name, values["r"]) for name in COLUMNS}
    tables["real"] = xl_table(results)
    for name, shown in tables.items():
        between = rf"(?s)(<!-- {name} -->\n+)\|.*?(\n+<!-- end -->)"
        text = re.sub(between, lambda marks, shown=shown: marks[1] + shown + marks[2], text)
    edits = []
    for quote, quoted in quotes(text, values, QUOTES):
        for place, number in enumerate(quoted, start=1):
            edits.append((*quote.span(place), number))
    for first, end, number in sorted(edits, reverse=True):
        text = text[:first] + number + text[end:]
    return text


if __name__ == "__main__":
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        page.write_text(render(content, read()), encoding="utf-8")
    for name, content in csv_files(read()).items():
        (HERE / name).write_text(content, encoding="utf-8")
    for figure in ("pareto_figure.py", "study_figure.py"):
        runpy.run_path(str(ROOT / "docs" / figure), run_name="__main__")
