"""A paper's numbers beside ours. A preset of conf/experiment/ names a table of
`paper_results.yaml`, whose rows are matched with runs.

A run belongs to a row if it has the row's options, where `values` of that file says what stands for
them on its model, and changes nothing else in its method's preset.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tempera.errors import TemperaError, shortened
from tempera.metrics import table
from tempera.reporting.baseline import label
from tempera.reporting.paper_results import find, group, ours, results, wanted

PaperRow = Mapping[str, Any]
SHIPPED = ("shapes", "shapes_mar")
"""Models of this package, which stand beside every model of the papers in columns of their own."""
SMALL = (
    " It is tiny and knows only a small world of shapes: compare differences between rows, not "
    "levels."
)


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
    """A table with one line per row of the paper; each quantity has the paper's value and one of
    each model that ran.
    """

    title: str
    columns: list[PaperColumn]
    models: list[str]
    lines: list[tuple[str, list[list[str]]]] = field(default_factory=list)
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


def beside(rows: Sequence[PaperRow]) -> list[PaperComparison]:
    """The papers' tables that the runs' presets reproduce; runs without such a preset are ignored.

    Args:
        rows: runs as `tempera.reporting.collect` reads them.
    """
    found = []
    for name in dict.fromkeys(row["paper"]["table"] for row in rows if row.get("paper")):
        runs = [row for row in rows if row.get("paper") and row["paper"]["table"] == name]
        found += _tables(find(name), runs)
    return found


def _tables(data: Mapping[str, Any], runs: Sequence[PaperRow]) -> list[PaperComparison]:
    """One comparison per group of the paper's rows. A group's cells are filled by runs on its own
    model and prompts, and, in columns of their own, by those on a shipped model. Runs that match no
    row follow the rows of the last group, and runs that differ from a row's in anything else are
    left out with the difference named.
    """
    lines = [line for group in (data.get("models") or {}).values() for line in group]
    runs, refused = _alike(runs, "captions" not in str(lines))
    kept = []
    for run in runs:
        near = [more for line in lines if (more := _more(run, wanted(data, line))) is not None]
        if near and all(near):
            refused.append(f"{_where(run)} also has {_options(min(near, key=len))}")
        else:
            kept.append(run)
    tables = []
    used: list[PaperRow] = []
    for title, rows in (data.get("models") or {"": []}).items():
        names = [*(data.get("columns") or []), *(key for line in rows for key in line)]
        columns = [column(name) for name in dict.fromkeys(names) if name != "run"]
        here = [run for run in kept if _belongs(run, title, refused)]
        models = list(dict.fromkeys(str(run["model"]) for run in here))
        comparison = PaperComparison(
            f"{data['title']}{f', {title}' if title else ''}", columns, models
        )
        for line in rows:
            options = wanted(data, line)
            fitting = [run for run in here if _more(run, options) == {}]
            used += fitting
            text = _label(line["run"], models)
            paper = [line.get(name) for name in dict.fromkeys(names) if name != "run"]
            comparison.lines.append((text, _cells(comparison, paper, fitting, refused)))
        tables.append(comparison)
    last = tables[-1]
    out = " ".join(refused)
    others = [run for run in kept if all(run is not one for one in used) and _where(run) not in out]
    last.models += [
        one for one in dict.fromkeys(run["model"] for run in others) if one not in last.models
    ]
    for name in dict.fromkeys(map(label, others)):
        same = [run for run in others if label(run) == name]
        last.lines.append((name, _cells(last, [None] * len(last.columns), same, refused)))
    for _, pairs in last.lines:
        pairs[:] = [[*pair, *["–"] * (1 + len(last.models) - len(pair))] for pair in pairs]
    last.notes = [f"Paper: {results()['papers'][data['paper']]}", *(data.get("notes") or [])]
    last.notes += [*_about(runs), *(f"Left out: {one}." for one in dict.fromkeys(refused))]
    last.notes += list(
        dict.fromkeys(one.note for table in tables for one in table.columns if one.note)
    )
    return tables


def _more(run: PaperRow, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run changes beside a row's options; None if it does not have these options."""
    for option, value in options.items():
        if run["settings"].get(option) != ours(run["model"], option, value):
            return None
    return {name: one for name, one in run["changes"].items() if name not in options}


def _belongs(run: PaperRow, title: str, refused: list[str]) -> bool:
    """Whether a run can fill a group: on a shipped model it can, which its column says."""
    if run["model"] in SHIPPED or not title:
        return True
    its = group(title)
    if run["model"] != its.get("model"):
        return False
    if run["settings"].get("drafter") != its.get("drafter", run["settings"].get("drafter")):
        return False
    if run["data"] != its["data"]:
        refused.append(f"{_where(run)} has data={run['data']}, and {title} data={its['data']}")
        return False
    return True


def _alike(runs: Sequence[PaperRow], counts: bool) -> tuple[list[PaperRow], list[str]]:
    """The runs without those whose prompts, or number of images if it `counts`, are not those of
    most runs on their model; and what these differ in.
    """
    kept, refused = [], []
    for run in runs:
        peers = [other for other in runs if other["model"] == run["model"]]
        usual = Counter(other["images"] for other in peers).most_common(1)[0][0]
        if counts and run["images"] != usual:
            refused.append(f"{_where(run)} has {run['images']} images, and the others {usual}")
        else:
            kept.append(run)
    return kept, refused


def _cells(
    comparison: PaperComparison,
    paper: Sequence[float | None],
    runs: Sequence[PaperRow],
    refused: list[str],
) -> list[list[str]]:
    """Per quantity the paper's value, and the mean of each model's runs over seeds; a dash if
    missing. A run that differs from another one in more than its seed is left out.
    """
    chosen: dict[str, list[PaperRow]] = {}
    for run in runs:
        first = chosen.setdefault(str(run["model"]), [run])[0]
        if differing := _differing(first, run):
            refused.append(f"{_where(run)} differs from {first['directory']} in {differing}")
        elif run is not first:
            chosen[str(run["model"])].append(run)
    found = []
    for shown, value in zip(comparison.columns, paper, strict=True):
        line = [_number(value, shown.form)]
        for model in comparison.models:
            values = [one for run in chosen.get(model, []) if (one := shown.ours(run)) is not None]
            line.append(_number(math.fsum(values) / len(values) if values else None, shown.form))
        found.append(line)
    return found


def _differing(one: PaperRow, other: PaperRow) -> str:
    """The settings in which two runs differ, apart from their seeds, with both values."""
    left, right = (run["settings"] | {"machine": run["machine"]} for run in (one, other))
    names = [name for name in {**left, **right} if name != "seed"]
    return ", ".join(
        f"{name} ({left.get(name)} and {right.get(name)})"
        for name in names
        if left.get(name) != right.get(name)
    )


def _where(run: PaperRow) -> str:
    return f"{label(run)} in {run['directory']}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _label(shown: Mapping[str, Any], models: Sequence[str]) -> str:
    """A row's options; in brackets the values that stand for the paper's on these models."""
    parts = []
    for name, value in shown.items():
        own = {str(ours(model, name, value)) for model in models} - {str(value)}
        here = f" (here {' or '.join(sorted(own))})" if own else ""
        parts.append(f"{value}" if name == "method" else f"{name}={value}{here}")
    return " ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _about(runs: Sequence[PaperRow]) -> list[str]:
    notes = []
    for model in dict.fromkeys(str(run["model"]) for run in runs):
        mine = [run for run in runs if run["model"] == model]
        images = sorted({run["images"] for run in mine})
        machines = ", ".join(sorted({str(run["machine"]) for run in mine}))
        notes.append(
            f"{model}: {'–'.join(map(str, images))} images a run, {machines}."
            + (SMALL if model in SHIPPED else "")
        )
    return notes


def model_head(model: str) -> str:
    """The head of a model's columns, which marks a shipped one."""
    return f"{model} (shipped)" if model in SHIPPED else model


def markdown(tables: Sequence[PaperComparison]) -> list[str]:
    """The lines of the report's section; none without tables."""
    lines = ["## Beside the paper", ""] if tables else []
    for comparison in tables:
        head = [
            "run",
            *(
                f"{column.title}: {whose}"
                for column in comparison.columns
                for whose in ("paper", *map(model_head, comparison.models))
            ),
        ]
        cells = [
            [name, *(cell for pair in pairs for cell in pair)] for name, pairs in comparison.lines
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
            for model in comparison.models:
                printed.add_column(f"\n{model_head(model)}", justify="right", style="bold")
        for name, pairs in comparison.lines:
            printed.add_row(name, *(cell for pair in pairs for cell in pair))
        console.print(printed)
        for note in comparison.notes:
            console.print(note, highlight=False, soft_wrap=True)
