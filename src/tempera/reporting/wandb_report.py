"""A W&B Report of compared runs; only this module needs the network."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tempera.errors import TemperaError
from tempera.reporting.finished_run import Run, labels, metrics_of
from tempera.reporting.paper_tables import paper_values
from tempera.reporting.report import cautions, sections_of
from tempera.reporting.tables import escaped, markdown_of
from tempera.runtime.files import reason
from tempera.runtime.tracking import WandbTracker, wandb_tracker

PICTURES = ("grid", "acceptance")
"""Media that evaluations log (`tempera.reporting.run_report`)."""


def publish(
    runs: Sequence[Run],
    output: Path,
    project: str = "tempera",
    entity: str | None = None,
    baseline: str | None = None,
) -> str:
    """Save a W&B Report of the runs and return its address: plots of what is gained against
    quality, the tables of report.md with the papers' numbers, the pictures, and the run set.

    A W&B run that is logged offline, or not at all, is made from the run's files, under the id that
    its directory keeps. The report's files become an artifact.

    Raises:
        TemperaError: nobody is logged in, W&B is offline, or it refuses.
    """
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        raise TemperaError(
            f"publish=true needs W&B online, but WANDB_MODE={mode}: unset it and run the command "
            f"again; the report is already in {output}."
        )
    if not wandb.login(prompt=False, verify=False):
        raise TemperaError(
            "publish=true needs a W&B account: run `wandb login`, and then the command again; "
            f"the report is already in {output}."
        )
    try:
        destination = {"project": project, "entity": entity or wandb.Api().default_entity}
        ids = [
            _send(run, label, destination) for run, label in zip(runs, labels(runs), strict=True)
        ]
        _store_files(output, destination)
        report = build_report(runs, ids, output.name, destination, baseline)
        report.save()
    except TemperaError:
        raise
    except Exception as problem:  # wandb-workspaces raises bare exceptions
        raise TemperaError(
            f"W&B cannot take the report ({reason(problem)}): the report is in {output}; check the "
            "network, project and entity, and run the command again."
        ) from problem
    return str(report.url)


def build_report(
    runs: Sequence[Run],
    ids: Sequence[str],
    name: str,
    destination: dict[str, Any],
    baseline: str | None = None,
) -> Any:
    """The `wandb_workspaces.reports.v2.Report`, not saved yet.

    Args:
        runs: at least one.
        ids: of their W&B runs.
        name: of the report.
        destination: its `project` and `entity`.
        baseline: what the runs are compared with.
    """
    from wandb_workspaces import expr
    from wandb_workspaces.reports.v2 import interface as v2

    chosen = expr.Metric("ID").isin(list(ids))
    grid = v2.PanelGrid(
        runsets=[v2.Runset(**destination, name=name, filters=[chosen])],
        panels=[*_plots(runs), v2.MediaBrowser(title="pictures", media_keys=list(PICTURES))],
    )
    blocks: list[Any] = [v2.MarkdownBlock(f"> {escaped(caution)}") for caution in cautions(runs)]
    for number, section in enumerate(sections_of(runs, baseline)):
        blocks += [v2.H2(section.title), v2.MarkdownBlock(markdown_of(section))]
        if number == 0:  # below the verdict
            blocks.append(grid)
    methods = ", ".join(dict.fromkeys(run.method for run in runs))
    title = f"{name}: {methods}"[:128]
    return v2.Report(**destination, title=title, blocks=blocks, width="fluid")


def _plots(runs: Sequence[Run]) -> list[Any]:
    """Every measured gain against every measured quality, as in pareto.png."""
    from wandb_workspaces.reports.v2 import interface as v2

    measured = [
        metric for metric in metrics_of(runs) if any(metric.key in run.metrics for run in runs)
    ]
    gains = [metric for metric in measured if metric.in_pareto == "gain"]
    return [
        v2.ScatterPlot(
            title=f"{quality.heading} against {gain.title}",
            x=v2.SummaryMetric(gain.key),
            y=v2.SummaryMetric(quality.key),
        )
        for quality in measured
        if quality.in_pareto == "quality"
        for gain in gains
    ]


def _send(run: Run, label: str, destination: dict[str, Any]) -> str:
    """Send a run's numbers and pictures to its W&B run, and return the id of that."""
    directory = Path(run.directory)
    tracker = _online_tracker(
        directory=directory, job_type="eval", name=label, config=run.settings, **destination
    )
    values = {key: interval["value"] for key, interval in run.metrics.items()}
    tracker.summary({**values, "images": run.images, **paper_values(run)})
    for picture in PICTURES:
        path = directory / f"{picture}.png"
        if path.is_file():
            tracker.image(picture, path, label)
    tracker.finish()
    return str(tracker.run.id)


def _store_files(output: Path, destination: dict[str, Any]) -> None:
    """Store the report's files as an artifact of a run of their own."""
    tracker = _online_tracker(directory=output, job_type="report", **destination)
    tracker.html("report", output / "report.html")
    names = ("report.md", "report.html", "results.csv")
    tracker.artifact("report", "report", [output / name for name in names])
    tracker.finish()


def _online_tracker(**arguments: Any) -> WandbTracker:
    """A tracker of a W&B run that is online.

    Raises:
        TemperaError: W&B cannot be reached.
    """
    tracker = wandb_tracker(mode="online", **arguments)
    if not isinstance(tracker, WandbTracker) or tracker.run.offline:
        raise TemperaError(
            "W&B cannot be reached, so there is no W&B Report: run the command again with a "
            "network; the report's files are written."
        )
    return tracker
