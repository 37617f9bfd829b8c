"""Many runs side by side: results.csv, tables.csv, report.md, report.html and Pareto plots.

`write_report` depends only on the runs and the pictures they point to, so the same runs always give
the same files.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from tempera.errors import TemperaError
from tempera.metrics.table import Metric, report_order
from tempera.reporting import page, paper_tables, pareto, study
from tempera.reporting.console import main_metrics
from tempera.reporting.finished_run import Run, labels, metrics_of, results
from tempera.reporting.tables import Cell, Section, escaped, long, markdown_of, table
from tempera.reporting.verdict import verdict
from tempera.runtime.files import reason, writable_directory, write_text

GIB = 2**30
COLUMNS = 6
"""Metrics beside the verdict."""
NAMED = 3
"""Prompts that a sentence names."""


def write_report(
    runs: Sequence[Run],
    output: Path,
    unfinished: Sequence[Path] = (),
    damaged: Sequence[str] = (),
    baseline: str | None = None,
) -> list[Path]:
    """Write results.csv, tables.csv, report.md, report.html and pareto*.png, and return their
    paths: in results.csv a row is a run, in tables.csv a cell of the report's tables, or a
    difference that they leave out because its metric needs more images.

    Args:
        runs: compared with a baseline (`tempera.reporting.baseline.compare`).
        output: directory to write to.
        unfinished: run directories that the report names as left out.
        damaged: sentences about runs that are left out because one of their files is damaged.
        baseline: what the runs were compared with.

    Raises:
        TemperaError: `output` cannot be written. What cannot be drawn keeps nothing else from being
            written, and is named at the end.
    """
    sections = sections_of(runs, baseline)
    warnings = cautions(runs, unfinished, damaged, baseline)
    failed: list[TemperaError] = []
    figures: list[Path] = []
    writable_directory(output)
    with _costing_itself_alone(output / "pareto.png", failed):
        figures = pareto.write(runs, output)
    cells = long([*sections, _of_few(runs, baseline)])
    frames = {"results.csv": results(runs).drop(columns="plain"), "tables.csv": cells}
    for name, frame in frames.items():
        write_text(output / name, frame.to_csv(index=False, float_format="%.6g"))
    text = report_markdown(runs, sections, output, figures, warnings)
    write_text(output / "report.md", text)
    with _costing_itself_alone(output / "report.html", failed):
        page.write(output / "report.html", runs, sections, warnings)
    if failed:
        told = "; ".join(str(problem).rstrip(".") for problem in failed)
        raise TemperaError(f"{told}; the rest of the report is in {output}.") from failed[0]
    return [*(output / name for name in (*frames, "report.md", "report.html")), *figures]


@contextmanager
def _costing_itself_alone(path: Path, failed: list[TemperaError]) -> Iterator[None]:
    """What fails inside the `with` block becomes a sentence about the file in `failed`."""
    try:
        yield
    except TemperaError as problem:
        failed.append(problem)
    except Exception as problem:
        told = TemperaError(f"{path} cannot be drawn: {reason(problem)}")
        told.__cause__ = problem
        failed.append(told)


def sections_of(runs: Sequence[Run], baseline: str | None = None) -> list[Section]:
    """The tables that every writer shows, of report.md, report.html and a W&B Report: the
    verdict, differences from the baseline, speed, the study's tables, the papers', and all
    metrics.
    """
    return [
        verdict_section(runs),
        *_differences(runs, baseline),
        *_speed(runs),
        *study.tables(runs, baseline),
        *paper_tables.paper_sections(runs),
        all_metrics(runs),
    ]


def verdict_section(runs: Sequence[Run]) -> Section:
    """What the runs gain and cost, in a sentence and the metrics that matter most."""
    notes = ["Values have 95% intervals over prompts, where there are five or more."]
    section = _metrics("Verdict", runs, main_metrics(report_order(metrics_of(runs)), runs, COLUMNS))
    return replace(section, text=verdict(runs), notes=[*_shared(runs), *notes])


def all_metrics(runs: Sequence[Run]) -> Section:
    """All metrics of the report."""
    return _metrics(
        "All metrics", runs, [one for one in report_order(metrics_of(runs)) if one.in_report]
    )


def _metrics(title: str, runs: Sequence[Run], metrics: Sequence[Metric]) -> Section:
    """The table of some metrics; with the number of images, if it differs."""
    columns: dict[str, list[Cell]] = {}
    if len({run.images for run in runs}) > 1:
        columns = {"images": [{"value": run.images} for run in runs]}
    columns |= {metric.heading: [run.shown(metric) for run in runs] for metric in metrics}
    formats = {"images": ".0f"} | {metric.heading: metric.format for metric in metrics}
    return Section(title, table(labels(runs), columns), formats)


def _shared(runs: Sequence[Run]) -> list[str]:
    """A sentence about what is the same in all runs."""
    named = []
    for name in ("model", "data", "images", "seed", "machine"):
        values = {getattr(run, name) for run in runs} - {None, ""}
        if len(values) == 1:
            named.append(f"{name} {values.pop()}")
    where = "In all runs" if len(runs) > 1 else "This run"
    return [f"{where}: {', '.join(named)}."] if named else []


def _differences(runs: Sequence[Run], baseline: str | None) -> list[Section]:
    """The table of differences from the baseline; none if no run has any."""
    compared = [run for run in runs if run.differences]
    if not compared:
        return []
    text = (
        "Compared prompt by prompt, on the prompts that a run shares with its baseline, with the "
        "same seed. Where nothing differs, one interval in twenty still excludes 0 by chance."
    )
    columns: dict[str, list[Cell]] = {}
    formats = {"length": ".2f", "baseline's length": ".2f", "t": ".1f"}
    if baseline is not None:
        text += (
            " Each run is compared with the baseline run whose accepted length is nearest: compare "
            "quality where the two lengths agree. t is the paired t statistic of the prompts' "
            "accepted lengths."
        )
        lengths = [run.differences.get("accepted_length", {}) for run in compared]
        columns = {
            "baseline": [{"text": run.baseline} for run in compared],
            "length": [{"value": run.value("accepted_length")} for run in compared],
            "baseline's length": [{"value": run.baseline_length} for run in compared],
            "t": [{"value": length.get("t")} for length in lengths],
        }
    for metric in report_order(metrics_of(runs)):
        columns[metric.title] = [run.difference(metric) for run in compared]
        formats[metric.title] = f"+{metric.format}"
    cells = table(labels(runs, compared), columns)
    return [Section(_title(baseline), cells, formats, text, _left_out(runs, compared))]


def _of_few(runs: Sequence[Run], baseline: str | None) -> Section:
    """The differences in metrics that need more images than a run has."""
    compared = [run for run in runs if run.differences]
    columns: dict[str, list[Cell]] = {
        metric.title: [
            run.differences.get(metric.key, {}) if run.images < metric.fewest else {}
            for run in compared
        ]
        for metric in report_order(metrics_of(runs))
    }
    title = f"{_title(baseline)}, with too few images"
    return Section(title, table(labels(runs, compared), columns), {})


def _title(baseline: str | None) -> str:
    """Of the table of differences."""
    return f"Difference from {baseline or 'plain autoregression'}"


def _left_out(runs: Sequence[Run], compared: Sequence[Run]) -> list[str]:
    """Sentences about the prompts of runs that their baselines lack."""
    sentences = []
    for run, label in zip(compared, labels(runs, compared), strict=True):
        names = [name for name, _ in run.values.index.difference(run.gaps.index, sort=False)]
        if names:
            sentences.append(
                f"{label}: {len(names)} of its {len(run.values)} prompts are not among those of "
                f"{run.baseline}, and are left out: {_some(names)}."
            )
    return sentences


def _some(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _speed(runs: Sequence[Run]) -> list[Section]:
    """The table of seconds of an image at batch 1, and memory; none if no run was timed."""
    timed = [run for run in runs if _seconds(run)]
    if not timed:
        return []
    columns: dict[str, list[Cell]] = {
        "seconds per image": [_seconds(run) for run in timed],
        "peak memory, GiB": [_memory(run) for run in timed],
    }
    text = (
        "Seconds are for one image at batch 1, without text encoder and image decoder. Memory is "
        "allocated on a GPU, resident on a CPU; there it is the process's, which runs all rows."
    )
    formats = dict.fromkeys(columns, ".2f")
    return [Section("Time and memory", table(labels(runs, timed), columns), formats, text)]


def _seconds(run: Run) -> Cell:
    """Of the method; plain autoregression's stand beside every method's."""
    return run.metrics.get("latency_ar" if run.plain else "latency", {})


def _memory(run: Run) -> Cell:
    """Its peak."""
    return {} if run.memory is None else {"value": run.memory / GIB}


def report_markdown(
    runs: Sequence[Run],
    sections: Sequence[Section],
    output: Path,
    figures: Sequence[Path] = (),
    warnings: Sequence[str] = (),
) -> str:
    """The report as Markdown: the sections, figures, and a link to each run's page."""
    parts = ["# Evaluation report", *(f"> {escaped(warning)}" for warning in warnings)]
    for section in sections:
        parts += [f"## {escaped(section.title)}", markdown_of(section)]
    parts += [f"![{escaped(figure.stem)}]({quote(figure.name)})" for figure in figures]
    pages = []
    for label, run in zip(labels(runs), runs, strict=True):
        link = Path(os.path.relpath(run.directory, output)).as_posix()
        pages.append(f"- [{escaped(label)}]({quote(link)}/report.html)")
    parts += ["## Runs", "\n".join(pages)]
    return "\n\n".join(filter(None, parts)) + "\n"


def cautions(
    runs: Sequence[Run],
    unfinished: Sequence[Path] = (),
    damaged: Sequence[str] = (),
    baseline: str | None = None,
) -> list[str]:
    """What a reader must know before comparing."""
    sentences = []
    if len({run.images for run in runs}) > 1:
        sentences.append(
            "The runs differ in their number of images, on which FID and recall depend: compare "
            "only runs with the same number of images."
        )
    sentences += _other_prompts(runs)
    sentences += _measured_otherwise(runs)
    if len({run.machine for run in runs if "speedup" in run.metrics}) > 1:
        sentences.append("Speed was measured on different machines.")
    crowded = [one for one, run in zip(labels(runs), runs, strict=True) if run.crowd]
    if crowded:
        sentences.append(
            "Other processes were running while speed was measured, so it may be wrong: "
            f"{', '.join(crowded)}."
        )
    sentences += _uncompared(runs, baseline)
    for label, run in zip(labels(runs), runs, strict=True):
        if run.begun:
            sentences.append(
                f"{label}: the results are of {run.images} prompts; a later start with "
                f"{run.begun} is unfinished."
            )
    if unfinished:
        sentences.append(f"Left out because unfinished: {', '.join(map(str, unfinished))}.")
    sentences += [f"Left out because damaged: {problem}" for problem in damaged]
    return sentences


def _other_prompts(runs: Sequence[Run]) -> list[str]:
    """A sentence if the runs differ in their prompts."""
    prompts = [set(run.values.index) for run in runs]
    common = len(set.intersection(*prompts))
    every = len(set.union(*prompts))
    if common == every:
        return []
    return [
        f"The runs have different prompts: of {every} (an id with its text), {common} are in all "
        "runs. A difference is taken over the prompts that both runs have."
    ]


def _measured_otherwise(runs: Sequence[Run]) -> list[str]:
    """Sentences about the metrics that were not measured alike in all runs."""
    groups_by_key: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        for key in run.metrics:
            scorer = tuple(run.scorers.get(key, ()))
            groups_by_key.setdefault(key, {}).setdefault(scorer, []).append(label)
    titles_by_fault: dict[tuple[str, str], list[str]] = {}
    for metric in report_order(metrics_of(runs)):
        groups = groups_by_key.get(metric.key, {})
        if len(groups) > 1:
            networks = {scorer[:1] for scorer in groups}
            what = "with different networks or settings"
            if len(networks) == 1:
                what = "against different real pictures"
            sides = " and in ".join(f"({', '.join(names)})" for names in groups.values())
            titles_by_fault.setdefault((what, sides), []).append(metric.title)
    return [
        f"{', '.join(titles)}: measured {what} in {sides}. They are not subtracted; compare only "
        "runs that were measured alike."
        for (what, sides), titles in titles_by_fault.items()
    ]


def _uncompared(runs: Sequence[Run], baseline: str | None) -> list[str]:
    """Sentences about the runs that have no differences, and why."""
    drafted = [run for run in runs if not run.plain]
    if baseline is None and len(drafted) == len(runs):
        named = shlex.quote(f"baseline={labels(runs)[0]}")
        return [
            "No run here is plain autoregression, so there are no differences: add method=ar to "
            f"the sweep, or name another run in the report's options, such as {named}."
        ]
    labels_by_reason: dict[str, list[str]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        if run.uncompared:
            labels_by_reason.setdefault(run.uncompared, []).append(label)
    return [
        f"{', '.join(names)}: not compared with the baseline, which has {reason}."
        for reason, names in labels_by_reason.items()
    ]
