"""A paper's numbers beside ours. A preset of conf/experiment/ names a table of
`paper_results.yaml`, whose rows are matched with runs.

A run belongs to a row if it has the row's options, where `values` of that file says what stands for
them on its model, and changes nothing else in its method's preset.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any

import numpy as np
import pandas as pd

from tempera.metrics import table
from tempera.reporting.collect import Run
from tempera.reporting.paper_results import find, group, ours, results, wanted
from tempera.reporting.tables import Section, number

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


def quantity(name: str) -> Quantity:
    """The quantity of this name: one of paper_results.yaml, or the metric with this key.

    Raises:
        TemperaError: neither exists.
    """
    known = results()["quantities"]
    if name in known:
        return Quantity(**known[name])
    metric = table.find(name)
    return Quantity(metric.heading, metric.format, metric.key)


def _measured(runs: Sequence[Run]) -> pd.DataFrame:
    """A run's numbers: its metrics, profiles by depth and tenth, milliseconds of a round's parts,
    and the mean size of the proximity set in the first column of the image and in the others.
    """
    rows = []
    for run in runs:
        own: dict[str, float | None] = {"gamma": run.settings.get("gamma")}
        own |= {key: run.value(key) for key in run.metrics}
        for name, profile in (
            ("acceptance", run.acceptance_by_depth),
            ("tenth", run.acceptance_by_tenth),
            ("rounds", run.rounds_by_tokens),
        ):
            own |= {f"{name}_{place}": one for place, one in enumerate(profile, 1)}
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
        for section in _tables(find(name), [run for one, run in named if one == name])
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
    cells: dict[tuple[str, int | str], list[Run]] = {}
    refused, notes = dict[str, None](), dict[str, None]()
    for run in runs:
        places, why = _places(run, data)
        usual = mode(other.images for other in runs if other.model == run.model)
        if run.images != usual and "captions" not in str(groups):
            places, why = [], f"has {run.images} images, and the others {usual}"
        for place in places if places or why else [([*groups][-1], run.name)]:
            same = cells.setdefault(place, [])
            first = next((one for one in same if one.model == run.model), run)
            why = _differing(first, run)
            same += [] if why else [run]
        if why:
            refused[f"Left out: {run.name} in {run.directory} {why}."] = None
    sections = []
    for title, lines in groups.items():
        names = [*(data.get("columns") or []), *(key for line in lines for key in line)]
        shown = {name: quantity(name) for name in dict.fromkeys(names) if name != "run"}
        mine = {place: same for (group_, place), same in cells.items() if group_ == title}
        models = dict.fromkeys(str(run.model) for same in mine.values() for run in same)
        filled = [(_label(line["run"], models), line, mine.pop(row, []))
                  for row, line in enumerate(lines)]  # fmt: skip
        filled += [(str(name), {}, same) for name, same in mine.items()]
        heading = f"Beside the paper: {data['title']}{f', {title}' if title else ''}"
        sections.append(Section(heading, _cells(shown, filled, models)))
        notes |= dict.fromkeys(one.note for one in shown.values() if one.note)
    below = [f"Paper: {results()['papers'][data['paper']]}", *(data.get("notes") or [])]
    sections[-1] = replace(sections[-1], notes=[*below, *_about(runs), *refused, *notes])
    return sections


def _places(run: Run, data: Mapping[str, Any]) -> tuple[list[tuple[str, int | str]], str]:
    """The rows that a run belongs to, by group and number, and why it is in no other that has its
    options: it changes something else, or has other prompts. On a shipped model it belongs to every
    group, which its column says.
    """
    places: list[tuple[str, int | str]] = []
    reasons = []
    for title, lines in (data.get("models") or {}).items():
        its = group(title)
        drafter = its.get("drafter", run.settings.get("drafter"))
        own = (run.model, run.settings.get("drafter")) == (its.get("model"), drafter)
        for row, line in enumerate(lines):
            options = wanted(data, line)
            settings = {name: ours(str(run.model), name, one) for name, one in options.items()}
            if any(run.settings.get(name) != value for name, value in settings.items()):
                continue
            more = [f"{name}={one}" for name, one in run.changes.items() if name not in options]
            if more:
                reasons.append(f"also has {', '.join(more)}")
            elif own and run.data != its["data"]:
                reasons.append(f"has data={run.data}, and {title} data={its['data']}")
            elif own or run.model in SHIPPED:
                places.append((title, row))
    return places, "" if places else min(reasons, key=len, default="")


def _differing(one: Run, other: Run) -> str:
    """In what two runs of a row differ beside their seeds; empty if in nothing."""
    left, right = (each.settings | {"machine": each.machine} for each in (one, other))
    differing = [
        f"{name} ({left.get(name)} and {right.get(name)})"
        for name in {**left, **right}
        if name != "seed" and left.get(name) != right.get(name)
    ]
    return f"differs from {one.directory} in {', '.join(differing)}" if differing else ""


def _cells(
    shown: Mapping[str, Quantity],
    filled: Sequence[tuple[str, Mapping[str, Any], Sequence[Run]]],
    models: Iterable[str],
) -> pd.DataFrame:
    """Per quantity the paper's value, and the mean of each model's runs over seeds."""
    columns: dict[str, list[str]] = {"run": [text for text, _, _ in filled]}
    for name, one in shown.items():
        columns[f"{one.title}: paper"] = [
            number(line.get(name), one.format) for _, line, _ in filled
        ]
        for model in models:
            head = f"{model} (shipped)" if model in SHIPPED else model
            mine = [[run for run in runs if run.model == model] for _, _, runs in filled]
            columns[f"{one.title}: {head}"] = [
                number(one.of(same).mean() if same else None, one.format) for same in mine
            ]
    return pd.DataFrame(columns)


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
