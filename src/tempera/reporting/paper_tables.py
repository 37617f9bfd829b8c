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

import pandas as pd

from tempera.metrics import table as metric_table
from tempera.reporting.finished_run import Run
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
    quantities = results()["quantities"]
    if name in quantities:
        return Quantity(**quantities[name])
    metric = metric_table.find(name)
    return Quantity(metric.heading, metric.format, metric.key)


def _measured(runs: Sequence[Run]) -> pd.DataFrame:
    """The numbers of `_numbers`: a row a run, a column a quantity, NaN where a run lacks it."""
    return pd.DataFrame([_numbers(run) for run in runs], dtype=float)


def _numbers(run: Run) -> dict[str, float | None]:
    """A run's γ, metrics, profiles by depth and by tokens of a round, and milliseconds of a
    round's parts.
    """
    numbers: dict[str, float | None] = {"gamma": run.settings.get("gamma")}
    for key in run.metrics:
        numbers[key] = run.value(key)
    for key, deviation in run.deviations.items():
        numbers[f"{key}_deviation"] = deviation
    profiles = {"acceptance": run.acceptance_by_depth, "rounds": run.rounds_by_tokens}
    for name, profile in profiles.items():
        for index, value in enumerate(profile, start=1):
            numbers[f"{name}_{index}"] = value
    for part, time in run.time.get("parts", {}).items():
        numbers[f"{part}_ms"] = time["ms_per_round"]
    return numbers


def paper_sections(runs: Sequence[Run]) -> list[Section]:
    """The papers' tables that the runs' presets reproduce, one per group of their rows; runs
    without such a preset are ignored.
    """
    runs_of_table: dict[str, list[Run]] = {}
    for run in runs:
        if run.paper:
            runs_of_table.setdefault(run.paper["table"], []).append(run)
    sections = []
    for name, reproducing in runs_of_table.items():
        sections += _sections_of_table(find(name), reproducing)
    return sections


def paper_values(run: Run) -> dict[str, float]:
    """The paper's numbers for what a run reproduces, as `paper/GROUP/QUANTITY`, for W&B."""
    if not run.paper:
        return {}
    data = find(run.paper["table"])
    targets, _ = _matching_rows(run, data)
    values = {}
    for title, row in targets:
        for name, value in data["models"][title][row].items():
            if name != "run":
                values[f"paper/{title}/{name}"] = value
    return values


def _sections_of_table(data: Mapping[str, Any], runs: Sequence[Run]) -> list[Section]:
    """A group's cells are filled by runs on its own model and prompts, and, in columns of their
    own, by those on a shipped model. Runs that match no row follow the rows of the last group, and
    runs that differ from a row's in anything else are left out with the difference named.
    """
    groups: Mapping[str, Any] = data.get("models") or {"": []}
    matched = _matched(data, runs)
    last_group = [*groups][-1]
    sections = []
    quantity_notes: dict[str, None] = {}
    for title, lines in groups.items():
        names = dict.fromkeys(data.get("columns") or [])
        for line in lines:
            names |= dict.fromkeys(line)
        quantities = {name: quantity(name) for name in names if name != "run"}
        notes_here = [quantity.note for quantity in quantities.values() if quantity.note]
        quantity_notes |= dict.fromkeys(notes_here)
        rows = [Row(line, matched.rows.get((title, row), [])) for row, line in enumerate(lines)]
        if title == last_group:
            rows += [Row({}, others, name) for name, others in matched.others.items()]
        heading = ", ".join(filter(None, [f"Compared with the paper: {data['title']}", title]))
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

    def add(self, run: Run, row: list[Run]) -> None:
        """Add a run to a row, if it differs in the seed alone from those on its model there."""
        first = next((other for other in row if other.model == run.model), run)
        difference = _difference(first, run)
        if difference:
            self.leave_out(run, difference)
        else:
            row.append(run)

    def leave_out(self, run: Run, reason: str) -> None:
        """Say once why a run is left out."""
        sentence = f"Left out: {run.name} in {run.directory} {reason}."
        if sentence not in self.left_out:
            self.left_out.append(sentence)


def _matched(data: Mapping[str, Any], runs: Sequence[Run]) -> Matched:
    """The runs of each row of a paper's table."""
    captions = "captions" in str(data.get("models"))
    matched = Matched()
    for run in runs:
        usual = mode(other.images for other in runs if other.model == run.model)
        targets, reason = _matching_rows(run, data)
        if run.images != usual and not captions:
            matched.leave_out(run, f"has {run.images} images, but the others have {usual}")
        elif reason:
            matched.leave_out(run, reason)
        elif targets:
            for target in targets:
                matched.add(run, matched.rows.setdefault(target, []))
        else:
            matched.add(run, matched.others.setdefault(run.name, []))
    return matched


def _matching_rows(run: Run, data: Mapping[str, Any]) -> tuple[list[tuple[str, int]], str]:
    """The rows that a run belongs to, by group and number, and why it is in no other that has its
    options: it changes something else, or lacks a setting of the group; any seed will do. On a
    shipped model it belongs to every group, which its column says.
    """
    targets: list[tuple[str, int]] = []
    reasons = []
    for title, lines in (data.get("models") or {}).items():
        for row, line in enumerate(lines):
            options = wanted(data, line)
            if not all(_has(run, name, value) for name, value in options.items()):
                continue
            settings = settings_of(title, str(run.model), run.method)
            missing = [
                f"has {name}={_value(run, name)}, but {title} has {name}={value}"
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
                targets.append((title, row))
    return targets, "" if targets else min(reasons, key=len, default="")


def _value(run: Run, option: str) -> Any:
    return run.data if option == "data" else run.settings.get(option)


def _has(run: Run, option: str, value: Any) -> bool:
    """Whether a run has the paper's value of an option, one of its values, or what stands for it on
    the run's model.
    """
    return _value(run, option) in [ours(str(run.model), option, part) for part in as_list(value)]


def _difference(run: Run, other: Run) -> str:
    """In what two runs of a row differ beside their seeds; empty if in nothing."""
    settings = run.settings | {"machine": run.machine}
    others = other.settings | {"machine": other.machine}
    names = dict.fromkeys([*settings, *others])
    differing = [
        f"{name} ({settings.get(name)} and {others.get(name)})"
        for name in names
        if name != "seed" and settings.get(name) != others.get(name)
    ]
    return f"differs from {run.directory} in {', '.join(differing)}" if differing else ""


def _section(title: str, quantities: Mapping[str, Quantity], rows: Sequence[Row]) -> Section:
    """Per quantity the paper's value, and the mean of each model's runs over seeds."""
    models = dict.fromkeys(str(run.model) for row in rows for run in row.runs)
    columns: dict[str, list[Cell]] = {}
    formats: dict[str, str] = {}
    for name, measure in quantities.items():
        heading = f"{measure.title}: paper"
        columns[heading] = [{"value": row.line.get(name)} for row in rows]
        formats[heading] = measure.format
        for model in models:
            shipped = " (shipped)" if model in SHIPPED else ""
            heading = f"{measure.title}: {model}{shipped}"
            means = [_mean(measure, row.runs, model) for row in rows]
            columns[heading] = [{"value": mean} for mean in means]
            formats[heading] = measure.format
    names = [row.name or _label(row.line["run"], models) for row in rows]
    return Section(title, table(names, columns), formats)


def _mean(measure: Quantity, runs: Sequence[Run], model: str) -> float | None:
    """The mean of a quantity over the runs on a model; None without any."""
    on_model = [run for run in runs if run.model == model]
    return float(measure.of(on_model).mean()) if on_model else None


def _label(options: Mapping[str, Any], models: Iterable[str]) -> str:
    """A row's options; in brackets the values that stand for the paper's on these models."""
    parts = []
    for name, value in options.items():
        if name == "method":
            parts.append(str(value))
            continue
        replaced = {str(ours(model, name, value)) for model in models} - {str(value)}
        bracket = f" (here {' or '.join(sorted(replaced))})" if replaced else ""
        parts.append(f"{name}={value}{bracket}")
    return " ".join(parts)


def _about(runs: Sequence[Run]) -> list[str]:
    """A sentence per model: its numbers of images, its machines, and whether it is tiny."""
    notes = []
    for model in dict.fromkeys(str(run.model) for run in runs):
        on_model = [run for run in runs if run.model == model]
        images = "–".join(map(str, sorted({run.images for run in on_model})))
        machines = ", ".join(sorted({run.machine for run in on_model}))
        small = SMALL if model in SHIPPED else ""
        notes.append(f"{model}: {images} images per run, {machines}.{small}")
    return notes
