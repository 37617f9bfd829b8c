"""Many runs side by side: results.csv, report.md, report.html, Pareto plots and a comparison of
pictures.

`tempera.reporting.collect` reads run directories into rows. `write_report` depends only on these
rows and the pictures they point to, so the same rows always give the same files.
"""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.reporting import paper_tables, pareto, report_page, study
from tempera.reporting.baseline import accepted_length, label, of_equal_length
from tempera.reporting.collect import ReportRow
from tempera.reporting.console import number
from tempera.reporting.figures import comparison
from tempera.reporting.run_names import is_plain
from tempera.runtime.files import replacing_all, write_text
from tempera.runtime.image_files import picture_path, read_picture

PICTURES = 8
"""Prompts shown on comparison.png."""
UNREADABLE: NDArray[np.uint8] = np.full((3, 1, 1), 225, np.uint8)
"""Shown in place of a picture whose file is damaged."""


def write_report(
    rows: Sequence[ReportRow],
    output: Path,
    unfinished: Sequence[Path] = (),
    damaged: Sequence[str] = (),
    baseline: str | None = None,
) -> list[Path]:
    """Write results.csv, report.md, report.html, pareto*.png, comparison.png, all or
    none, and return their paths.

    Args:
        rows: runs as `tempera.reporting.collect` reads them.
        output: directory to write to.
        unfinished: run directories that the report names as left out.
        damaged: sentences about runs that are left out because one of their files is damaged.
        baseline: what `collect` compared the runs with.

    Raises:
        TemperaError: `output` cannot be written.
    """
    shared = _shared_prompts(rows)
    pictures, unreadable = _read_pictures(rows, shared)
    cautions = _cautions(rows, unfinished, [*damaged, *unreadable])
    studied = study.tables(rows, baseline)
    with replacing_all(output) as place:
        figures = pareto.write(rows, place)
        if shared:
            figures.append(place / "comparison.png")
            texts = [rows[0]["texts"][name] for name in shared]
            comparison(figures[-1], [label(row) for row in rows], _notes(rows), pictures, texts)
        write_text(place / "results.csv", results_csv(rows))
        markdown = report_markdown(rows, output, figures, cautions, baseline, studied)
        write_text(place / "report.md", markdown)
        page = _cautions(rows, unfinished, damaged)
        report_page.write(place / "report.html", rows, page, baseline or "", studied)
    names = [
        "results.csv",
        "report.md",
        "report.html",
        *(path.name for path in figures),
    ]
    return [output / name for name in names]


def results_csv(rows: Sequence[ReportRow]) -> str:
    """One line per run: settings, then every metric with its interval."""
    settings = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    keys = [metric.key for metric in table.METRICS]
    metrics = [key for key in keys if any(key in row["metrics"] for row in rows)]
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
        described = [
            row["directory"],
            row["name"],
            row["family"],
            *(row["settings"].get(name) for name in settings),
            row["images"],
            row["machine"],
        ]
        writer.writerow(
            described + [f"{value:.6g}" if isinstance(value, float) else value for value in values]
        )
    return text.getvalue()


def report_markdown(
    rows: Sequence[ReportRow],
    output: Path,
    figures: Sequence[Path] = (),
    cautions: Sequence[str] = (),
    baseline: str | None = None,
    studied: Sequence[study.StudyTable] = (),
) -> str:
    """The report as Markdown: results, differences from the baseline, the study's tables, the
    papers' tables, figures, and links to each run's files.
    """
    parts = ["# Evaluation report", ""]
    parts += [line for caution in cautions for line in (f"> {_escaped(caution)}", "")]
    parts += _results(rows)
    parts += _differences(rows, baseline)
    for one in studied:
        parts += [f"## {_escaped(one.title)}", "", _escaped(one.text), ""]
        parts += _table(one.head, one.lines)
    parts += paper_tables.markdown(paper_tables.beside(rows))
    for figure in figures:
        parts += [f"![{figure.stem}]({quote(figure.name)})", ""]
    parts += ["## Runs", "", *(_links(row, output) for row in rows)]
    return "\n".join(parts) + "\n"


def _results(rows: Sequence[ReportRow]) -> list[str]:
    """The table of metrics."""
    shown = [
        metric
        for metric in table.report_order()
        if metric.in_report and any(metric.key in row["metrics"] for row in rows)
    ]
    cells = [
        [
            row["family"],
            _delta(row),
            str(row["images"]),
            *(_span(row["metrics"].get(metric.key), metric.format) for metric in shown),
        ]
        for row in rows
    ]
    return [
        "## Results",
        "",
        "Each value has its 95% bootstrap interval over prompts.",
        "",
        *_table(["run", "δ", "images", *(metric.heading for metric in shown)], cells),
    ]


def _differences(rows: Sequence[ReportRow], baseline: str | None) -> list[str]:
    """The table of differences from the baseline; empty if no run has any."""
    compared = [row for row in rows if row["differences"]]
    if not compared:
        return []
    shown = [
        metric
        for metric in table.report_order()
        if any(metric.key in row["differences"] for row in compared)
    ]
    text = (
        "Compared prompt by prompt, on the same prompts and seeds. Where nothing differs, one "
        "interval in twenty still excludes 0 by chance."
    )
    if baseline is not None:
        text += (
            " Each run is compared with the baseline run whose accepted length is nearest: ≈ if "
            "the two lengths agree to 2%, ≠ if not. t is the paired t statistic of the prompts' "
            "accepted lengths."
        )
    pair = _pair if baseline is not None else (lambda _: [])
    cells = [
        [
            row["family"],
            _delta(row),
            *pair(row),
            *(_span(row["differences"].get(metric.key), "+.4f") for metric in shown),
        ]
        for row in compared
    ]
    head = ["run", "δ", *([] if baseline is None else ["baseline", "accepted lengths", "t"])]
    return [
        f"## Difference from {_escaped(baseline or 'plain autoregression')}",
        "",
        text,
        "",
        *_table([*head, *(metric.title for metric in shown)], cells),
    ]


def _pair(row: ReportRow) -> list[str]:
    """The row's baseline run, both accepted lengths, and t of their difference."""
    sign = "≈" if of_equal_length(row) else "≠"
    t = row["differences"].get("accepted_length", {}).get("t", float("nan"))
    return [
        row["baseline"],
        f"{accepted_length(row):.2f} {sign} {row['baseline_length']:.2f}",
        f"{t:.1f}" if np.isfinite(t) else "–",
    ]


def _links(row: ReportRow, output: Path) -> str:
    """A line of links to a run's files."""
    directory = Path(row["directory"])
    link = quote(Path(os.path.relpath(directory, output)).as_posix())
    delta = "" if row["delta"] is None else f", δ = {_delta(row)}"
    files = {"pictures": "grid.png", "acceptance map": "acceptance_map.png"}
    files |= {"all metrics": "metrics.json"}
    if (directory / "accepted.png").is_file():
        files["accepted tokens"] = "accepted.png"
    links = ", ".join(f"[{title}]({link}/{file})" for title, file in files.items())
    return f"- {_escaped(row['family'])}{delta}: {links}"


def _cautions(
    rows: Sequence[ReportRow], unfinished: Sequence[Path], damaged: Sequence[str]
) -> list[str]:
    """What a reader must know before comparing."""
    cautions = []
    if len({row["images"] for row in rows}) > 1:
        cautions.append(
            "The runs differ in their number of images, on which FID and recall depend: compare "
            "only runs with the same number of images."
        )
    if len({row["machine"] for row in rows if "speedup" in row["metrics"]}) > 1:
        cautions.append("Speed was measured on different machines.")
    if not any(is_plain(row["settings"]) for row in rows):
        cautions.append(
            "No run here is plain autoregression (method=ar), the baseline to compare quality with."
        )
    if unfinished:
        names = ", ".join(map(str, unfinished))
        cautions.append(f"Left out because unfinished: {names}.")
    return [*cautions, *(f"Left out because damaged: {problem}" for problem in damaged)]


def _delta(row: ReportRow) -> str:
    return "" if row["delta"] is None else f"{row['delta']:g}"


def _span(interval: Mapping[str, Any] | None, form: str) -> str:
    """A value and its interval. An infinite value, such as a mean log-probability of -inf, has no
    interval.
    """
    if not interval or interval.get("value") is None:
        return "–"
    value, low, high = interval["value"], interval.get("low"), interval.get("high")
    if low is None or high is None or not np.isfinite([low, high]).all():
        return number(value, form)
    return f"{number(value, form)} ({number(low, form)} … {number(high, form)})"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(map(_escaped, line)) + " |" for line in cells), ""]


def _escaped(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    for sign in "\\`*[]<|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _shared_prompts(rows: Sequence[ReportRow]) -> list[str]:
    """Ids of the first prompts that all runs have."""
    everywhere = set[str].intersection(*(set(row["texts"]) for row in rows))
    return [name for name in rows[0]["texts"] if name in everywhere][:PICTURES]


def _read_pictures(
    rows: Sequence[ReportRow], prompts: Sequence[str]
) -> tuple[list[list[NDArray[np.uint8]]], list[str]]:
    """Every run's pictures of the prompts, and a sentence about each unreadable picture."""
    pictures, problems = [], []
    for row in rows:
        line = []
        for name in prompts:
            try:
                line.append(read_picture(picture_path(Path(row["directory"]), name)))
            except TemperaError as problem:
                line.append(UNREADABLE)
                problems.append(str(problem))
        pictures.append(line)
    return pictures, problems


def _notes(rows: Sequence[ReportRow]) -> list[str]:
    """Acceptance and speed of each run, for comparison.png."""
    notes = []
    for row in rows:
        known = {key: interval.get("value") for key, interval in row["metrics"].items()}
        parts = []
        if known.get("accepted_length") is not None:
            parts.append(f"{known['accepted_length']:.2f} tokens per round")
        if known.get("speedup") is not None and not is_plain(row["settings"]):
            parts.append(f"{known['speedup']:.2f}× AR's speed")
        notes.append(", ".join(parts))
    return notes
