"""Many runs side by side: results.csv, report.md, a Pareto plot and a comparison of pictures.

`collect` reads run directories into rows; `write_report` is a pure function of the rows and of the
pictures they point to: the same rows always write the same files.
"""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tempera.errors import TemperaError
from tempera.metrics import bootstrap
from tempera.metrics.table import BATCHES, NAMES
from tempera.reporting import paper_tables, pareto
from tempera.reporting.console import number
from tempera.reporting.figures import comparison
from tempera.reporting.run_names import family_label, is_plain
from tempera.runtime.files import read_json, write_text
from tempera.runtime.image_files import picture_path, read_picture

ReportRow = dict[str, Any]
HIDDEN = ("target", "draft", "verification", "branching", "rule", "drafter", "diagnostics")
"""Settings that identify a run but do not describe it to a reader."""
SHOWN = (
    "accepted_length",
    "acceptance_rate",
    "trials_per_rejection",
    "speedup",
    *(f"speedup_{size}" for size in BATCHES),
    "efficiency",
    "fid",
    "kid",
    "precision",
    "recall",
    "clip_score",
    "attribute_accuracy",
    "kl_per_token",
)
"""Columns of the report's table."""
PAIRED = ("clip_score", "shape", "colour", "background", "logprob_per_token")
"""What is compared with plain autoregression prompt by prompt."""
PICTURES = 8
"""Prompts shown on comparison.png."""


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Run directories at or below the paths: finished and unfinished ones.

    Raises:
        TemperaError: a path is not a directory, or there is no finished run.
    """
    places = [Path(path) for path in paths]
    for path in places:
        if not path.is_dir():
            raise TemperaError(
                f"{path} is not a directory: give run directories of eval/run.py, or a directory "
                "that holds some."
            )
    runs = sorted({found.parent for path in places for found in path.rglob("run.json")})
    finished = [run for run in runs if (run / "metrics.json").is_file()]
    if not finished:
        shown = ", ".join(map(str, places))
        raise TemperaError(
            f"there is no finished run in {shown}: run eval/run.py first, or give another "
            "directory."
        )
    return finished, [run for run in runs if run not in finished]


def collect(directories: Sequence[Path]) -> list[ReportRow]:
    """One row a run, sorted: what it is called, its settings, its metrics with intervals, and its
    distance from plain autoregression.

    Raises:
        TemperaError: a run's files are damaged.
    """
    contents = [read_json(directory / "metrics.json") for directory in directories]
    rows = [
        _row(directory, content) for directory, content in zip(directories, contents, strict=True)
    ]
    for row, family in zip(rows, _families([row["settings"] for row in rows]), strict=True):
        row["family"] = family
    for row in rows:
        plain = [other for other in rows if is_plain(other["settings"]) and _comparable(other, row)]
        row["versus_ar"] = _paired(row, plain[0]) if plain and not is_plain(row["settings"]) else {}
    return sorted(rows, key=_order)


def _row(directory: Path, content: Mapping[str, Any]) -> ReportRow:
    try:
        settings = content["settings"]
        return {
            "directory": str(directory),
            "name": content["name"],
            "method": settings["method"],
            "model": settings.get("model", ""),
            "delta": settings.get("delta"),
            "seed": settings.get("seed"),
            "settings": {name: value for name, value in settings.items() if name not in HIDDEN},
            "images": content["images"],
            "machine": content["about"].get("machine", ""),
            "metrics": content["metrics"],
            "acceptance_by_depth": content.get("acceptance_by_depth", []),
            "acceptance_by_tenth": content.get("acceptance_by_tenth", []),
            "tv_by_depth": content.get("tv_by_depth", []),
            "time": content.get("time", {}),
            "paper": content["about"].get("paper"),
        }
    except (KeyError, TypeError, AttributeError) as problem:
        raise TemperaError(
            f"{directory / 'metrics.json'} is not a result of eval/run.py ({problem}): run it "
            "again."
        ) from None


def _order(row: ReportRow) -> tuple[Any, ...]:
    return (
        row["model"],
        not is_plain(row["settings"]),
        row["method"] != "eagle",
        row["family"],
        row["delta"] or 0,
        row["seed"] or 0,
        row["directory"],
    )


def _families(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The curve that each run lies on: the method, its unusual settings, and what else differs
    within the method but δ and seed.
    """
    names = []
    for one in settings:
        siblings = [other for other in settings if other.get("method") == one.get("method")]
        varying = [
            key
            for key in one
            if key not in ("delta", "seed", "model")
            and any(other.get(key) != one[key] for other in siblings)
        ]
        label = family_label(one)
        told = {
            key: str(one[key]).lower() if isinstance(one[key], bool) else str(one[key])
            for key in varying
            if one[key] is not None
        }
        extra = [
            f"{key}={value}"
            for key, value in told.items()
            if f"{key}=" not in label and value not in label.split()
        ]
        names.append(" ".join([label, *extra]))
    return names


def _comparable(left: ReportRow, right: ReportRow) -> bool:
    """Same model, sampling and seed, so that the same prompt has the same random draws."""
    return all(left["settings"].get(name) == right["settings"].get(name) for name in pareto.CONTEXT)


def _paired(row: ReportRow, plain: ReportRow) -> dict[str, dict[str, float]]:
    """Mean difference to plain autoregression over the prompts that both runs share."""
    ours, theirs = _per_prompt(row["directory"]), _per_prompt(plain["directory"])
    shared = sorted(ours.keys() & theirs.keys())
    result = {}
    for name in PAIRED:
        differences = np.array(
            [ours[key].get(name, np.nan) - theirs[key].get(name, np.nan) for key in shared],
            np.float64,
        )
        differences = differences[~np.isnan(differences)]
        if len(differences):
            result[name] = bootstrap.mean(differences).as_dict()
    return result


def _per_prompt(directory: str) -> dict[str, dict[str, float]]:
    """Numbers of each prompt from results.parquet; attributes averaged over the things in the
    scene.
    """
    try:
        rows = pq.read_table(Path(directory) / "results.parquet").to_pylist()
    except OSError as problem:
        raise TemperaError(
            f"{directory}/results.parquet cannot be read ({problem}): run eval/run.py with this "
            "directory again."
        ) from None
    numbers = {}
    for row in rows:
        logprob = (
            row["logprob"] / len(row["tokens"]) if "logprob" in row else None
        )  # continuous tokens have densities
        told = {"logprob_per_token": [logprob], "clip_score": [row.get("clip_score")]}
        told |= {
            name: [row.get(f"{name}1"), row.get(f"{name}2")] for name in ("shape", "colour")
        } | {"background": [row.get("background")]}
        means = {
            name: [value for value in values if value is not None] for name, values in told.items()
        }
        numbers[row["id"]] = {
            name: float(np.mean(values)) for name, values in means.items() if values
        }
    return numbers


def write_report(
    rows: Sequence[ReportRow], output: Path, unfinished: Sequence[Path] = ()
) -> list[Path]:
    """Write results.csv, report.md, pareto*.png and comparison.png; returns their paths."""
    write_text(output / "results.csv", results_csv(rows))
    plots = pareto.write(rows, output)
    pictures = _compare_pictures(rows, output)
    write_text(output / "report.md", report_markdown(rows, output, [*plots, *pictures], unfinished))
    return [output / "results.csv", output / "report.md", *plots, *pictures]


def results_csv(rows: Sequence[ReportRow]) -> str:
    """A line a run: settings, then every metric with its interval."""
    settings = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    metrics = [name for name in NAMES if any(name in row["metrics"] for row in rows)]
    ends = [f"{name}{end}" for name in metrics for end in ("", "_low", "_high", "_n")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["directory", "name", "family", *settings, "images", "machine", *ends])
    for row in rows:
        values = [
            row["metrics"].get(name, {}).get(key)
            for name in metrics
            for key in ("value", "low", "high", "n")
        ]
        writer.writerow(
            [
                row["directory"],
                row["name"],
                row["family"],
                *(row["settings"].get(name) for name in settings),
                row["images"],
                row["machine"],
            ]
            + [f"{value:.6g}" if isinstance(value, float) else value for value in values]
        )
    return text.getvalue()


def report_markdown(
    rows: Sequence[ReportRow],
    output: Path,
    figures: Sequence[Path],
    unfinished: Sequence[Path] = (),
) -> str:
    """The report: a table, differences to plain autoregression, the figures, and where each run's
    pictures are.
    """
    shown = [name for name in SHOWN if any(name in row["metrics"] for row in rows)]
    parts = ["# Evaluation report", "", *_cautions(rows, unfinished)]
    parts += [
        "## Results",
        "",
        "Each value with its 95% bootstrap interval; prompts are the units.",
        "",
    ]
    parts += _table(
        ["run", "δ", "images", *(NAMES[name][0].strip() for name in shown)],
        [_cells(row, shown) for row in rows],
    )
    paired = [row for row in rows if row["versus_ar"]]
    if paired:
        names = [name for name in PAIRED if any(name in row["versus_ar"] for row in paired)]
        titles = {"clip_score": "CLIP score", "logprob_per_token": "log-probability a token"}
        parts += ["## Difference to plain autoregression", ""]
        parts += [
            "On the same prompts and seeds, prompt by prompt; where nothing differs, one "
            "interval in twenty lacks 0 by chance.",
            "",
        ]
        cells = [
            [
                row["family"],
                _delta(row),
                *(_span(row["versus_ar"].get(name), "+.4f") for name in names),
            ]
            for row in paired
        ]
        parts += _table(["run", "δ", *(titles.get(name, name) for name in names)], cells)
    parts += paper_tables.markdown(paper_tables.beside(rows))
    for figure in figures:
        parts += [f"![{figure.stem}]({figure.name})", ""]
    parts += ["## Runs", ""]
    for row in rows:
        link = Path(os.path.relpath(row["directory"], output)).as_posix()
        parts.append(
            f"- {row['family']}{', δ = ' + _delta(row) if row['delta'] is not None else ''}: "
            f"[pictures]({link}/grid.png), "
            f"[acceptance map]({link}/acceptance_map.png), [all metrics]({link}/metrics.json)"
            + (
                f", [accepted tokens]({link}/accepted.png)"
                if (Path(row["directory"]) / "accepted.png").is_file()
                else ""
            )
        )
    return "\n".join(parts) + "\n"


def _cautions(rows: Sequence[ReportRow], unfinished: Sequence[Path]) -> list[str]:
    """What a reader must know before comparing."""
    cautions = []
    if len({row["images"] for row in rows}) > 1:
        cautions.append(
            "The runs differ in their number of images, on which FID and recall depend: compare "
            "those of equal size only."
        )
    if len({row["machine"] for row in rows if "speedup" in row["metrics"]}) > 1:
        cautions.append("Speed was measured on different machines.")
    if not any(is_plain(row["settings"]) for row in rows):
        cautions.append(
            "There is no run of plain autoregression here (method=ar, of continuous tokens mar) "
            "to compare quality with."
        )
    if unfinished:
        cautions.append(f"Left out because unfinished: {', '.join(map(str, unfinished))}.")
    return [line for caution in cautions for line in (f"> {caution}", "")]


def _cells(row: ReportRow, shown: Sequence[str]) -> list[str]:
    return [
        row["family"],
        _delta(row),
        str(row["images"]),
        *(_span(row["metrics"].get(name), NAMES[name][2]) for name in shown),
    ]


def _delta(row: ReportRow) -> str:
    return "" if row["delta"] is None else f"{row['delta']:g}"


def _span(interval: Mapping[str, Any] | None, form: str) -> str:
    if not interval or interval.get("value") is None:
        return "–"
    value, low, high = interval["value"], interval.get("low"), interval.get("high")
    if (
        low is None or high is None or not np.isfinite([low, high]).all()
    ):  # the mean of log-probabilities may be -inf: it has no interval
        return number(value, form)
    return f"{number(value, form)} ({number(low, form)} … {number(high, form)})"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(line) + " |" for line in cells), ""]


def _compare_pictures(rows: Sequence[ReportRow], output: Path) -> list[Path]:
    """comparison.png: a row of pictures a run, the same prompts in the same columns; nothing when
    the runs share no prompts.
    """
    texts = [
        {
            row["id"]: row["text"]
            for row in pq.read_table(
                Path(row["directory"]) / "results.parquet", columns=["id", "text"]
            ).to_pylist()
        }
        for row in rows
    ]
    shared = [name for name in texts[0] if all(name in other for other in texts)][:PICTURES]
    if not shared:
        return []
    labels = [
        f"{row['family']}{'' if row['delta'] is None else f' δ={_delta(row)}'}" for row in rows
    ]
    notes = [_note(row) for row in rows]
    pictures = [
        [read_picture(picture_path(Path(row["directory"]), name)) for name in shared]
        for row in rows
    ]
    comparison(
        output / "comparison.png", labels, notes, pictures, [texts[0][name] for name in shared]
    )
    return [output / "comparison.png"]


def _note(row: ReportRow) -> str:
    metrics = row["metrics"]
    speedup = (
        f", {metrics['speedup']['value']:.2f}× AR's speed"
        if "speedup" in metrics and not is_plain(row["settings"])
        else ""
    )
    return f"{metrics['accepted_length']['value']:.2f} tokens a round{speedup}"
