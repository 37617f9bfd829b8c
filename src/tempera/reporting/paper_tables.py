"""A paper's numbers beside ours. A preset of conf/experiment/ names a table of
`paper_results.yaml`, whose rows are matched with runs.

A run belongs to a row if it has the row's options, where `values` of that file says what stands for
them on its model, and changes nothing else in its method's preset.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tempera.errors import TemperaError, shortened
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
        own = {key: run.value(key) for key in run.metrics}
        profiles = {
            "acceptance": run.acceptance_by_depth,
            "tenth": run.acceptance_by_tenth,
            "tv": run.tv_by_depth,
        }
        own |= {
            f"{name}_{place}": np.nan if one is None else one
            for name, profile in profiles.items()
            for place, one in enumerate(profile, 1)
        }
        parts = run.time.get("parts", {})
        own |= {f"{part}_ms": one["ms_per_round"] for part, one in parts.items()}
        if run.proximity_by_place:
            sizes = pd.DataFrame(np.array(run.proximity_by_place, float).reshape(run.grid))
            own |= {"proximity_first": np.nanmean(sizes[0])}
            own |= {"proximity_others": float(sizes.drop(columns=0).stack().mean())}
        rows.append(own)
    return pd.DataFrame(rows, dtype=float)


def check_preset(paper: Any) -> None:
    """Raise TemperaError unless an evaluation's option `paper` has the name of a table as `table`,
    and nothing else.
    """
    if not isinstance(paper, Mapping) or not paper.keys() <= {"table"}:
        raise TemperaError(
            f"`paper={shortened(str(paper))}` is not possible; it names a table of a paper, as in "
            "paper.table=coolsd_table3.",
            option="paper",
        )
    find(paper.get("table"))


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


def _tables(data: Mapping[str, Any], runs: Sequence[Run]) -> list[Section]:
    """A group's cells are filled by runs on its own model and prompts, and, in columns of their
    own, by those on a shipped model. Runs that match no row follow the rows of the last group, and
    runs that differ from a row's in anything else are left out with the difference named.
    """
    groups = data.get("models") or {"": []}
    lines = [line for rows in groups.values() for line in rows]
    kept, refused = _alike(runs, lines, data)
    last = [*groups][-1]
    sections, notes = [], dict[str, None]()
    placed: list[Run] = []
    for title, rows in groups.items():
        names = [*(data.get("columns") or []), *(key for line in rows for key in line)]
        shown = {name: quantity(name) for name in dict.fromkeys(names) if name != "run"}
        here = [run for run in kept if _belongs(run, title, refused)]
        filled = []
        for line in rows:
            fitting = [run for run in here if _more(run, wanted(data, line)) == {}]
            placed += fitting
            text = _label(line["run"], dict.fromkeys(str(run.model) for run in here))
            filled.append((text, line, _one_kind(fitting, refused)))
        if title == last:
            out = " ".join(refused)
            others = [run for run in kept if all(run is not one for one in placed)]
            others = [run for run in others if _where(run) not in out]
            for name in dict.fromkeys(run.name for run in others):
                same = [run for run in others if run.name == name]
                filled.append((name, {}, _one_kind(same, refused)))
            here = [*here, *others]
        heading = f"{data['title']}{f', {title}' if title else ''}"
        sections.append((heading, _cells(shown, filled, dict.fromkeys(r.model for r in here))))
        notes |= dict.fromkeys(one.note for one in shown.values() if one.note)
    below = [f"Paper: {results()['papers'][data['paper']]}", *(data.get("notes") or [])]
    below += [*_about(runs), *(f"Left out: {one}." for one in dict.fromkeys(refused)), *notes]
    return [
        Section(f"Beside the paper: {title}", cells, notes=below if place == len(sections) else ())
        for place, (title, cells) in enumerate(sections, 1)
    ]


def _cells(
    shown: Mapping[str, Quantity],
    filled: Sequence[tuple[str, Mapping[str, Any], Sequence[Run]]],
    models: Mapping[str | None, None],
) -> pd.DataFrame:
    """Per quantity the paper's value, and the mean of each model's runs over seeds."""
    columns: dict[str, list[str]] = {"run": [text for text, _, _ in filled]}
    for name, one in shown.items():
        columns[f"{one.title}: paper"] = [
            number(line.get(name), one.format) for _, line, _ in filled
        ]
        for model in models:
            head = f"{model} (shipped)" if model in SHIPPED else str(model)
            columns[f"{one.title}: {head}"] = [
                number(one.of(mine).mean() if mine else None, one.format)
                for _, _, runs in filled
                for mine in [[run for run in runs if run.model == model]]
            ]
    return pd.DataFrame(columns)


def _more(run: Run, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run changes beside a row's options; None if it does not have these options."""
    for option, value in options.items():
        if run.settings.get(option) != ours(str(run.model), option, value):
            return None
    return {name: one for name, one in run.changes.items() if name not in options}


def _belongs(run: Run, title: str, refused: list[str]) -> bool:
    """Whether a run can fill a group: on a shipped model it can, which its column says."""
    if run.model in SHIPPED or not title:
        return True
    its = group(title)
    if run.model != its.get("model"):
        return False
    if run.settings.get("drafter") != its.get("drafter", run.settings.get("drafter")):
        return False
    if run.data != its["data"]:
        refused.append(f"{_where(run)} has data={run.data}, and {title} data={its['data']}")
        return False
    return True


def _alike(
    runs: Sequence[Run], lines: Sequence[Mapping[str, Any]], data: Mapping[str, Any]
) -> tuple[list[Run], list[str]]:
    """The runs without those whose number of images is not that of most on their model, unless a
    row gives it, or that change something else beside a row's options; and what they differ in.
    """
    kept, refused = [], []
    for run in runs:
        peers = Counter(other.images for other in runs if other.model == run.model)
        usual = peers.most_common(1)[0][0]
        near = [more for line in lines if (more := _more(run, wanted(data, line))) is not None]
        if run.images != usual and "captions" not in str(lines):
            refused.append(f"{_where(run)} has {run.images} images, and the others {usual}")
        elif near and all(near):
            refused.append(f"{_where(run)} also has {_options(min(near, key=len))}")
        else:
            kept.append(run)
    return kept, refused


def _one_kind(runs: Sequence[Run], refused: list[str]) -> list[Run]:
    """The runs that differ from the first one on their model in nothing but their seeds."""
    first: dict[str | None, Run] = {}
    kept = []
    for run in runs:
        one = first.setdefault(run.model, run)
        left, right = (each.settings | {"machine": each.machine} for each in (one, run))
        differing = [
            f"{name} ({left.get(name)} and {right.get(name)})"
            for name in {**left, **right}
            if name != "seed" and left.get(name) != right.get(name)
        ]
        if differing:
            refused.append(f"{_where(run)} differs from {one.directory} in {', '.join(differing)}")
        else:
            kept.append(run)
    return kept


def _where(run: Run) -> str:
    return f"{run.name} in {run.directory}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _label(shown: Mapping[str, Any], models: Mapping[str, None]) -> str:
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
