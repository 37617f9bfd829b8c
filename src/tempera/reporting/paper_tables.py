"""A paper's numbers beside ours. A preset of conf/experiment/ names a table of
`paper_results.yaml`, whose rows are matched with runs.

A run belongs to a row if it has the row's options, where `values` of that file says what stands for
them on its model, and changes nothing else in its method's preset.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mode
from typing import Any

import numpy as np
import pandas as pd

from tempera.metrics import table as metric_table
from tempera.reporting.collect import Run
from tempera.reporting.paper_results import (
    as_list,
    find,
    ours,
    results,
    settings_of,
    wanted,
)
from tempera.reporting.tables import Cell, Section, table

SHIPPED = ("shapes", "shapes_mar")
"""Models of this package, which stand beside every model of the papers in columns of their own."""
SMALL = (
    " It is tiny and knows only a small world of shapes: compare differences between rows, not "
    "levels."
)


@dataclass(frozen=True)
class Quantity:
    """What the papers report.

    Attributes:
        title: heading.
        format: format of the values.
        value: expression in the columns of `_measured`.
        note: text below the table.
    """

    title: str
    format: str
    value: str
    note: str = ""

    def of(self, runs: Sequence[Run]) -> pd.Series:
        """Our values, NaN where a run did not measure it."""
        frame = _measured(runs)
        names = [*frame, *re.findall(r"\b[a-z_]\w*\b(?!\()", self.value)]
        frame = frame.reindex(columns=list(dict.fromkeys(names)))
        return pd.Series(frame.eval(self.value, engine="python"), frame.index, dtype=float)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        line: the paper's row in paper_results.yaml; empty for runs whose options no row has.
        runs: the runs that fill it.
        name: of the row; by default the paper's options.
    """

    line: Mapping[str, Any]
    runs: Sequence[Run]
    name: str = ""


def quantity(name: str) -> Quantity:
    """The quantity of this name: one of paper_results.yaml, or the metric with this key.

    Raises:
        TemperaError: neither exists.
    """
    known = results()["quantities"]
    if name in known:
        return Quantity(**known[name])
    metric = metric_table.find(name)
    return Quantity(metric.heading, metric.format, metric.key)


def _measured(runs: Sequence[Run]) -> pd.DataFrame:
    """A run's numbers: its metrics, profiles by depth and tenth, milliseconds of a round's parts,
    and the mean size of the proximity set in the first column of the image and in the others.
    """
    rows = []
    for run in runs:
        own: dict[str, float | None] = {"gamma": run.settings.get("gamma")}
        own |= {key: run.value(key) for key in run.metrics}
        own |= {f"{key}_deviation": value for key, value in run.deviations.items()}
        for name, profile in (
            ("acceptance", run.acceptance_by_depth),
            ("tenth", run.acceptance_by_tenth),
            ("rounds", run.rounds_by_tokens),
        ):
            own |= {f"{name}_{place}": one for place, one in enumerate(profile, 1)}
        own["test_ms"] = run.time.get("test_ms")
        parts = run.time.get("parts", {})
        own |= {f"{part}_ms": one["ms_per_round"] for part, one in parts.items()}
        if run.proximity_by_place:
            sizes = np.array(run.proximity_by_place, float).reshape(run.grid)
            own |= {"proximity_first": np.nanmean(sizes[:, 0])}
            own |= {"proximity_others": np.nanmean(sizes[:, 1:])}
        rows.append(own)
    return pd.DataFrame(rows, dtype=float)


def beside(runs: Sequence[Run]) -> list[Section]:
    """The papers' tables that the runs' presets reproduce, one per group of their rows; runs
    without such a preset are ignored.
    """
    named = [(run.paper["table"], run) for run in runs if run.paper]
    return [
        section
        for name in dict.fromkeys(name for name, _ in named)
        for section in _tables(find(name), [run for its_table, run in named if its_table == name])
    ]


def paper_values(run: Run) -> dict[str, float]:
    """The paper's numbers for what a run reproduces, as `paper/GROUP/QUANTITY`, for W&B."""
    if not run.paper:
        return {}
    data = find(run.paper["table"])
    return {
        f"paper/{title}/{name}": value
        for title, row in _places(run, data)[0]
        for name, value in data["models"][title][row].items()
        if name != "run"
    }


def _tables(data: Mapping[str, Any], runs: Sequence[Run]) -> list[Section]:
    """A group's cells are filled by runs on its own model and prompts, and, in columns of their
    own, by those on a shipped model. Runs that match no row follow the rows of the last group, and
    runs that differ from a row's in anything else are left out with the difference named.
    """
    groups: Mapping[str, Any] = data.get("models") or {"": []}
    matched = _matched(data, runs)
    last = [*groups][-1]
    sections = []
    quantity_notes: dict[str, None] = {}
    for title, lines in groups.items():
        names = [*(data.get("columns") or []), *(name for line in lines for name in line)]
        quantities = {name: quantity(name) for name in dict.fromkeys(names) if name != "run"}
        quantity_notes |= dict.fromkeys(
            quantity.note for quantity in quantities.values() if quantity.note
        )
        rows = [Row(line, matched.rows.get((title, row), [])) for row, line in enumerate(lines)]
        if title == last:
            rows += [Row({}, same, name) for name, same in matched.others.items()]
        heading = ", ".join(filter(None, [f"Beside the paper: {data['title']}", title]))
        sections.append(_section(heading, quantities, rows))
    source = f"Paper: {results()['papers'][data['paper']]}"
    notes = [source, *(data.get("notes") or []), *_about(runs), *matched.left_out, *quantity_notes]
    sections[-1] = replace(sections[-1], notes=notes)
    return sections


@dataclass
class Matched:
    """The runs that fill a paper's table.

    Attributes:
        rows: runs of each row, by the title of its group and its number in the group.
        others: runs whose options no row has, by their name.
        left_out: sentences about runs that differ from all others of their row.
    """

    rows: dict[tuple[str, int], list[Run]] = field(default_factory=dict)
    others: dict[str, list[Run]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, run: Run, same: list[Run]) -> None:
        """Add a run to a row, if it differs in the seed alone from those on its model there."""
        first = next((other for other in same if other.model == run.model), run)
        difference = _differing(first, run)
        if difference:
            self.leave_out(run, difference)
        else:
            same.append(run)

    def leave_out(self, run: Run, reason: str) -> None:
        """Say once why a run is left out."""
        sentence = f"Left out: {run.name} in {run.directory} {reason}."
        if sentence not in self.left_out:
            self.left_out.append(sentence)


def _matched(data: Mapping[str, Any], runs: Sequence[Run]) -> Matched:
    """The runs of each row of a paper's table."""
    captions = "captions" in str(data.get("models"))
    found = Matched()
    for run in runs:
        usual = mode(other.images for other in runs if other.model == run.model)
        places, reason = _places(run, data)
        if run.images != usual and not captions:
            found.leave_out(run, f"has {run.images} images, and the others {usual}")
        elif reason:
            found.leave_out(run, reason)
        elif places:
            for place in places:
                found.add(run, found.rows.setdefault(place, []))
        else:
            found.add(run, found.others.setdefault(run.name, []))
    return found


def _places(run: Run, data: Mapping[str, Any]) -> tuple[list[tuple[str, int]], str]:
    """The rows that a run belongs to, by group and number, and why it is in no other that has its
    options: it changes something else, or lacks a setting of the group; any seed will do. On a
    shipped model it belongs to every group, which its column says.
    """
    places: list[tuple[str, int]] = []
    reasons = []
    for title, lines in (data.get("models") or {}).items():
        for row, line in enumerate(lines):
            options = wanted(data, line)
            if not all(_has(run, name, value) for name, value in options.items()):
                continue
            settings = settings_of(title, str(run.model), run.method)
            missing = [
                f"has {name}={_value(run, name)}, and {title} {name}={value}"
                for name, value in settings.items()
                if name not in (*options, "seed") and not _has(run, name, value)
            ]
            more = [
                f"{name}={value}"
                for name, value in run.changes.items()
                if name not in options and name not in settings
            ]
            if more:
                reasons.append(f"also has {', '.join(more)}")
            elif missing:
                reasons.append(missing[0])
            elif settings or run.model in SHIPPED:
                places.append((title, row))
    return places, "" if places else min(reasons, key=len, default="")


def _value(run: Run, option: str) -> Any:
    return run.data if option == "data" else run.settings.get(option)


def _has(run: Run, option: str, value: Any) -> bool:
    """Whether a run has the paper's value of an option, one of its values, or what stands for it on
    the run's model.
    """
    return _value(run, option) in [ours(str(run.model), option, part) for part in as_list(value)]


def _differing(run: Run, other: Run) -> str:
    """In what two runs of a row differ beside their seeds; empty if in nothing."""
    left = run.settings | {"machine": run.machine}
    right = other.settings | {"machine": other.machine}
    differing = [
        f"{name} ({left.get(name)} and {right.get(name)})"
        for name in {**left, **right}
        if name != "seed" and left.get(name) != right.get(name)
    ]
    return f"differs from {run.directory} in {', '.join(differing)}" if differing else ""


def _section(title: str, quantities: Mapping[str, Quantity], rows: Sequence[Row]) -> Section:
    """Per quantity the paper's value, and the mean of each model's runs over seeds."""
    models = dict.fromkeys(str(run.model) for row in rows for run in row.runs)
    columns: dict[str, list[Cell]] = {}
    formats: dict[str, str] = {}
    for name, shown in quantities.items():
        heading = f"{shown.title}: paper"
        columns[heading] = [{"value": row.line.get(name)} for row in rows]
        formats[heading] = shown.format
        for model in models:
            heading = f"{shown.title}: {model}{' (shipped)' if model in SHIPPED else ''}"
            columns[heading] = [{"value": _mean(shown, row.runs, model)} for row in rows]
            formats[heading] = shown.format
    names = [row.name or _label(row.line["run"], models) for row in rows]
    return Section(title, table(names, columns), formats)


def _mean(shown: Quantity, runs: Sequence[Run], model: str) -> float | None:
    """The mean of a quantity over the runs on a model; None without any."""
    same = [run for run in runs if run.model == model]
    return float(shown.of(same).mean()) if same else None


def _label(shown: Mapping[str, Any], models: Iterable[str]) -> str:
    """A row's options; in brackets the values that stand for the paper's on these models."""
    parts = []
    for name, value in shown.items():
        own = {str(ours(model, name, value)) for model in models} - {str(value)}
        here = f" (here {' or '.join(sorted(own))})" if own else ""
        parts.append(f"{value}" if name == "method" else f"{name}={value}{here}")
    return " ".join(parts)


def _about(runs: Sequence[Run]) -> list[str]:
    notes = []
    for model in dict.fromkeys(str(run.model) for run in runs):
        mine = [run for run in runs if run.model == model]
        images = "–".join(map(str, sorted({run.images for run in mine})))
        machines = ", ".join(sorted({run.machine for run in mine}))
        small = SMALL if model in SHIPPED else ""
        notes.append(f"{model}: {images} images a run, {machines}.{small}")
    return notes
