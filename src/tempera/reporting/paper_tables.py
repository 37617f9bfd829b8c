"""A paper's numbers beside ours. A preset of conf/experiment/ names a table of
`paper_results.yaml`, whose rows are matched with runs.

A run belongs to a row of the paper if it has the row's options. Where the shipped model needs
another value, because its codebook is smaller than the papers', the preset gives it under
`paper.same` as {option: {the paper's value: ours}}.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from tempera.errors import TemperaError, shortened
from tempera.metrics import table

PaperRow = Mapping[str, Any]
DATA = Path(__file__).resolve().with_name("paper_results.yaml")


@dataclass(frozen=True)
class PaperColumn:
    """A quantity that the papers report.

    Attributes:
        title: heading.
        form: format of the values.
        ours: reads our value from a run's row; None if the run did not measure it.
        note: text printed below the table.
    """

    title: str
    form: str
    ours: Callable[[PaperRow], float | None]
    note: str = ""


@dataclass
class PaperComparison:
    """A table with one line per row of the paper; each quantity has two cells, the paper's value
    and ours.
    """

    title: str
    columns: list[PaperColumn]
    lines: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _metric(*names: str, scale: float = 1.0) -> Callable[[PaperRow], float | None]:
    """The first of these metrics that a run has a value for."""

    def value(row: PaperRow) -> float | None:
        known = (row["metrics"].get(name, {}).get("value") for name in names)
        found = next((one for one in known if one is not None), None)
        return None if found is None else scale * found

    return value


def _part(*names: str) -> Callable[[PaperRow], float | None]:
    """Seconds per round that these parts take together."""

    def seconds(row: PaperRow) -> float | None:
        parts = row["time"].get("parts", {})
        if not all(name in parts for name in names):
            return None
        return math.fsum(parts[name]["ms_per_round"] for name in names) / 1000

    return seconds


def _proximity(first_column: bool) -> Callable[[PaperRow], float | None]:
    """Mean size of the proximity set in the first column of the image, or in the others."""

    def mean(row: PaperRow) -> float | None:
        sizes = [
            size
            for place, size in enumerate(row["proximity_by_place"])
            if size is not None and (place % row["grid"][1] == 0) == first_column
        ]
        return math.fsum(sizes) / len(sizes) if sizes else None

    return mean


def _first_acceptance(row: PaperRow) -> float | None:
    return row["acceptance_by_depth"][0] if row["acceptance_by_depth"] else None


def _single(row: PaperRow) -> float | None:
    first = _first_acceptance(row)
    return None if first is None else 1 - first


def _tv_at(distance: int) -> Callable[[PaperRow], float | None]:
    def value(row: PaperRow) -> float | None:
        known = row["tv_by_depth"][distance - 1 : distance]
        return known[0] if known else None

    return value


def _alpha_in(tenth: int) -> Callable[[PaperRow], float | None]:
    def share(row: PaperRow) -> float | None:
        known: float | None = (row["acceptance_by_tenth"] or [None] * 10)[tenth - 1]
        return known

    return share


def _perplexity(row: PaperRow) -> float | None:
    logprob = _metric("logprob_per_token")(row)
    return None if logprob is None else math.exp(-logprob)


_PUBLISHED = "metrics=real computes inception score, ImageReward and HPSv2 under these names."
_BY_VGG = (
    "The paper computes precision and recall from VGG-16 features. So do we if a run has "
    "precision_vgg and recall_vgg; otherwise ours use the features of its FID."
)
SPECIAL = {
    "step": PaperColumn(
        "step compression",
        ".2f",
        _metric("accepted_length"),
        "Step compression is AR's forward passes ÷ the method's.",
    ),
    "speedup": PaperColumn(
        "speed-up", ".2f", _metric("speedup"), "Speed-ups hold for the machine they ran on."
    ),
    "latency_s": PaperColumn(
        "latency, s",
        ".3g",
        _metric("latency"),
        "Latencies hold for the machine they ran on: the paper's GPU, and ours.",
    ),
    "alpha": PaperColumn(
        "α",
        ".2f",
        _metric("acceptance_rate"),
        "α is accepted ÷ tested draft tokens; tokens after a rejected one are not tested.",
    ),
    **{
        f"alpha_{tenth}": PaperColumn(f"α in tenth {tenth}", ".2f", _alpha_in(tenth))
        for tenth in (1, 2, 5, 10)
    },
    "trials": PaperColumn("trials per rejected token", ".2f", _metric("trials_per_rejection")),
    "accept": PaperColumn("acceptance of the first draft", ".3f", _first_acceptance),
    "single": PaperColumn("rounds of a single token", ".2f", _single),
    "tv": PaperColumn("TV(p, q)", ".2f", _metric("tv")),
    **{
        f"tv_{distance}": PaperColumn(f"TV at {distance}", ".3f", _tv_at(distance))
        for distance in (1, 2, 4, 8, 16)
    },
    "clip": PaperColumn("CLIP score ↑", ".4f", _metric("clip_score")),
    "clip_percent": PaperColumn("CLIP score ×100 ↑", ".2f", _metric("clip_score", scale=100)),
    "inception_score": PaperColumn(
        "inception score ↑", ".1f", _metric("inception_score"), _PUBLISHED
    ),
    "image_reward": PaperColumn("ImageReward ↑", ".4f", _metric("image_reward"), _PUBLISHED),
    "hpsv2": PaperColumn("HPSv2 ↑", ".2f", _metric("hpsv2"), _PUBLISHED),
    "precision": PaperColumn("precision ↑", ".4f", _metric("precision_vgg", "precision"), _BY_VGG),
    "recall": PaperColumn("recall ↑", ".4f", _metric("recall_vgg", "recall"), _BY_VGG),
    "perplexity": PaperColumn("perplexity", ".2f", _perplexity),
    "logprob": PaperColumn("log-probability, mean", ".3f", _metric("logprob_per_token")),
    "logprob_deviation": PaperColumn("its deviation", ".3f", _metric("logprob_deviation")),
    "target_forward": PaperColumn("target forward, s", ".2e", _part("target")),
    "draft_forward": PaperColumn("draft forward, s", ".2e", _part("draft")),
    "proximity_set": PaperColumn(
        "proximity set, s", ".2e", _part("verify"), "Ours is the whole verification."
    ),
    "distance": PaperColumn(
        "distance, s", ".2e", _part("verify"), "Ours is the whole verification, not the distance."
    ),
    "whole_round": PaperColumn(
        "whole round, s", ".2e", _part("draft", "target", "verify", "commit")
    ),
    "verify_and_draft": PaperColumn(
        "verification and drafting, s", ".2e", _part("verify", "draft")
    ),
    "commit": PaperColumn("cache update, s", ".2e", _part("commit")),
    "proximity_first": PaperColumn("|A|, first column", ".1f", _proximity(True)),
    "proximity_others": PaperColumn("|A|, other columns", ".1f", _proximity(False)),
}
"""Quantities that are not in the table of metrics, or that the papers show in another way, by their
name in paper_results.yaml.
"""


def column(name: str) -> PaperColumn:
    """The quantity of this name: one of `SPECIAL`, or the metric with this key.

    Raises:
        TemperaError: neither exists.
    """
    if name in SPECIAL:
        return SPECIAL[name]
    metric = table.find(name)
    return PaperColumn(metric.heading, metric.format, _metric(name))


@cache
def results() -> dict[str, Any]:
    """The contents of paper_results.yaml."""
    contents: Any = OmegaConf.to_container(OmegaConf.load(DATA))
    return dict(contents)


def check_preset(paper: Any) -> None:
    """Raise TemperaError unless an evaluation's option `paper` has the name of a table, as `table`,
    and nothing else but our values for the paper's, as `same`.
    """
    parts = paper if isinstance(paper, Mapping) else {"": paper}
    same = parts.get("same") or {}
    if not parts.keys() <= {"table", "same"} or not (
        isinstance(same, Mapping) and all(isinstance(one, Mapping) for one in same.values())
    ):
        raise TemperaError(
            f"`paper={shortened(str(paper))}` is not possible; it names a table of a paper, as in "
            "paper.table=coolsd_table3"
        )
    tables = [name for name in results() if name != "papers"]
    if (name := parts.get("table")) not in tables:
        raise TemperaError(
            f"there is no paper.table={shortened(str(name))}; choose one of {', '.join(tables)}"
        )


def beside(rows: Sequence[PaperRow]) -> list[PaperComparison]:
    """The papers' tables that the runs' presets reproduce; runs without such a preset are ignored.

    Args:
        rows: runs as `tempera.reporting.collect` reads them.
    """
    found = []
    for name in dict.fromkeys(row["paper"]["table"] for row in rows if row.get("paper")):
        runs = [row for row in rows if row.get("paper") and row["paper"]["table"] == name]
        found += _tables(results()[name], runs)
    return found


def _tables(data: Mapping[str, Any], runs: Sequence[PaperRow]) -> list[PaperComparison]:
    """One comparison per model in the paper's table; runs that match no row are appended to the
    last one.
    """
    citation = results()["papers"][data["paper"]]
    models = data.get("models") or {"": []}
    tables, used = [], []
    for model, lines in models.items():
        names = list(
            dict.fromkeys(
                [
                    *(data.get("columns") or []),
                    *(key for line in lines for key in line if key != "run"),
                ]
            )
        )
        comparison = PaperComparison(
            f"{data['title']}{f', {model}' if model else ''}", [column(name) for name in names]
        )
        for line in lines:
            ours = [run for run in runs if fits(run, line["run"])]
            used += ours
            cells = [_cell(column(name), line.get(name), ours) for name in names]
            comparison.lines.append((_label(line["run"]), cells))
        tables.append(comparison)
    last = tables[-1]
    for run in (run for run in runs if all(run is not one for one in used)):
        last.lines.append((_name(run), [_cell(shown, None, [run]) for shown in last.columns]))
    last.notes = [f"Paper: {citation}", *(data.get("notes") or []), *_about(runs)]
    last.notes += list(
        dict.fromkeys(
            shown.note for comparison in tables for shown in comparison.columns if shown.note
        )
    )
    return tables


def fits(run: PaperRow, wanted: Mapping[str, Any]) -> bool:
    """Whether the run has all the options of a paper's row."""
    same = run["paper"].get("same") or {}
    for option, value in wanted.items():
        ours = {str(key): one for key, one in (same.get(option) or {}).items()}.get(
            str(value), value
        )
        if run["settings"].get(option) not in (value, ours):
            return False
    return True


def _label(wanted: Mapping[str, Any]) -> str:
    method = [str(wanted["method"])] if "method" in wanted else []
    return " ".join(
        [*method, *(f"{name}={value}" for name, value in wanted.items() if name != "method")]
    )


def _name(run: PaperRow) -> str:
    delta = run["delta"]
    return f"{run['family']}{'' if delta is None else f' delta={delta:g}'}"


def _cell(column: PaperColumn, paper: float | None, runs: Sequence[PaperRow]) -> tuple[str, str]:
    """The paper's value and ours (the mean over runs with different seeds); a dash if missing."""
    values = [value for value in map(column.ours, runs) if value is not None]
    ours = sum(values) / len(values) if values else None
    return _number(paper, column.form), _number(ours, column.form)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _about(runs: Sequence[PaperRow]) -> list[str]:
    models, machines = (sorted({str(run[key]) for run in runs}) for key in ("model", "machine"))
    images = sorted({run["images"] for run in runs})
    notes = [
        f"Ours: model {', '.join(models)}, {'–'.join(map(str, images))} images a run, "
        f"{', '.join(machines)}."
    ]
    if any(model.startswith("shapes") for model in models):
        notes.append(
            "The shipped models and their evaluators are tiny and know only a small world of "
            "shapes: compare differences between rows, not levels."
        )
    return notes


def markdown(tables: Sequence[PaperComparison]) -> list[str]:
    """The lines of the report's section; none without tables."""
    lines = ["## Beside the paper", ""] if tables else []
    for comparison in tables:
        head = [
            "run",
            *(
                f"{column.title}: {whose}"
                for column in comparison.columns
                for whose in ("paper", "ours")
            ),
        ]
        cells = [
            [label, *(cell for pair in pairs for cell in pair)] for label, pairs in comparison.lines
        ]
        lines += [
            f"### {comparison.title}",
            "",
            "| " + " | ".join(head) + " |",
            "|" + " --- |" * len(head),
        ]
        lines += [
            *("| " + " | ".join(line) + " |" for line in cells),
            "",
            *(f"> {note}\n" for note in comparison.notes),
        ]
    return lines


def show(tables: Sequence[PaperComparison], console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console()
    for comparison in tables:
        printed = Table(
            title=comparison.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
        )
        printed.add_column("run")
        for column in comparison.columns:
            printed.add_column(f"{column.title}\npaper", justify="right")
            printed.add_column("\nours", justify="right", style="bold")
        for label, pairs in comparison.lines:
            printed.add_row(label, *(cell for pair in pairs for cell in pair))
        console.print(printed)
        for note in comparison.notes:
            console.print(note, highlight=False, soft_wrap=True)
