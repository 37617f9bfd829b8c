"""Many runs side by side: results.csv, report.md, report.html and Pareto plots.

`write_report` depends only on the runs and the pictures they point to, so the same runs always give
the same files.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from tempera.metrics import table
from tempera.reporting import page, paper_tables, pareto, study
from tempera.reporting.collect import Run, results
from tempera.reporting.console import FOR_FID
from tempera.reporting.tables import Section, escaped, markdown, number, texts
from tempera.runtime.files import writable_directory, write_text


def write_report(
    runs: Sequence[Run],
    output: Path,
    unfinished: Sequence[Path] = (),
    damaged: Sequence[str] = (),
    baseline: str | None = None,
) -> list[Path]:
    """Write results.csv, report.md, report.html and pareto*.png, all or none, and return their
    paths.

    Args:
        runs: compared with a baseline (`tempera.reporting.baseline.compare`).
        output: directory to write to.
        unfinished: run directories that the report names as left out.
        damaged: sentences about runs that are left out because one of their files is damaged.
        baseline: what the runs were compared with.

    Raises:
        TemperaError: `output` cannot be written.
    """
    frame = results(runs)
    sections = sections_of(runs, baseline)
    warnings = cautions(runs, unfinished, damaged)
    figures = pareto.write(runs, writable_directory(output))
    text = frame.drop(columns="plain").to_csv(index=False, float_format="%.6g")
    write_text(output / "results.csv", text)
    text = report_markdown(runs, sections, output, figures, warnings)
    write_text(output / "report.md", text)
    page.write(output / "report.html", runs, sections, warnings)
    names = ["results.csv", "report.md", "report.html", *(path.name for path in figures)]
    return [output / name for name in names]


def sections_of(runs: Sequence[Run], baseline: str | None = None) -> list[Section]:
    """The tables of a report: results, differences from the baseline, the study's tables, and the
    papers' tables.
    """
    return [
        Section("Results", results_table(runs), "Each value has its 95% interval over prompts."),
        *_differences(runs, baseline),
        *study.tables(runs, baseline),
        *paper_tables.beside(runs),
    ]


def results_table(runs: Sequence[Run], few: bool = False) -> pd.DataFrame:
    """The runs' metrics as text.

    Args:
        few: only those on the axes of pareto.png, without intervals, for the console.
    """
    shown = [
        metric
        for metric in table.report_order()
        if metric.in_report and (not few or metric.in_pareto)
    ]
    named = pd.DataFrame({
        "run": [run.name for run in runs], "images": [str(run.images) for run in runs]
    })  # fmt: skip
    cells = texts(runs, shown, interval=not few)
    fid = table.find("fid").heading
    if fid in cells:
        cells.loc[[run.images < FOR_FID for run in runs], fid] = "–"
    return pd.concat([named, cells.loc[:, cells.ne("–").any()]], axis=1)


def _differences(runs: Sequence[Run], baseline: str | None) -> list[Section]:
    """The table of differences from the baseline; none if no run has any."""
    compared = [run for run in runs if run.differences]
    if not compared:
        return []
    text = (
        "Compared prompt by prompt, on the same prompts and seeds. Where nothing differs, one "
        "interval in twenty still excludes 0 by chance."
    )
    named = pd.DataFrame({"run": [run.name for run in compared]})
    if baseline is not None:
        text += (
            " Each run is compared with the baseline run whose accepted length is nearest: compare "
            "quality where the two lengths agree. t is the paired t statistic of the prompts' "
            "accepted lengths."
        )
        named["baseline"] = [str(run.baseline) for run in compared]
        named["accepted lengths"] = [
            f"{run.value('accepted_length'):.2f} and {run.baseline_length:.2f}" for run in compared
        ]
        ts = (run.differences.get("accepted_length", {}).get("t") for run in compared)
        named["t"] = [number(t, ".1f") for t in ts]
    shown = texts(compared, table.report_order(), "differences", "+.4f")
    title = f"Difference from {baseline or 'plain autoregression'}"
    return [Section(title, pd.concat([named, shown], axis=1), text)]


def report_markdown(
    runs: Sequence[Run],
    sections: Sequence[Section],
    output: Path,
    figures: Sequence[Path] = (),
    warnings: Sequence[str] = (),
) -> str:
    """The report as Markdown: the sections, figures, and a link to each run's page."""
    parts = ["# Evaluation report", *(f"> {escaped(one)}" for one in warnings)]
    for one in sections:
        parts += [f"## {escaped(one.title)}", escaped(one.text), markdown(one.table)]
        parts += [f"> {escaped(note)}" for note in one.notes]
    parts += [f"![{figure.stem}]({quote(figure.name)})" for figure in figures]
    links = [(run.name, Path(os.path.relpath(run.directory, output))) for run in runs]
    pages = [f"- [{escaped(name)}]({quote(link.as_posix())}/report.html)" for name, link in links]
    parts += ["## Runs", "\n".join(pages)]
    return "\n\n".join(filter(None, parts)) + "\n"


def cautions(
    runs: Sequence[Run], unfinished: Sequence[Path] = (), damaged: Sequence[str] = ()
) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    if len({run.images for run in runs}) > 1:
        found.append(
            "The runs differ in their number of images, on which FID and recall depend: compare "
            "only runs with the same number of images."
        )
    if len({run.machine for run in runs if "speedup" in run.metrics}) > 1:
        found.append("Speed was measured on different machines.")
    if not any(run.plain for run in runs):
        found.append(
            "No run here is plain autoregression (method=ar), the baseline to compare quality with."
        )
    if unfinished:
        found.append(f"Left out because unfinished: {', '.join(map(str, unfinished))}.")
    return [*found, *(f"Left out because damaged: {problem}" for problem in damaged)]
