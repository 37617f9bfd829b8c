"""A W&B report; only this module needs the network."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tempera.errors import TemperaError
from tempera.reporting import pareto
from tempera.reporting.collect import Run, results
from tempera.runtime.tracking import wandb_tracker


def publish(
    runs: Sequence[Run], output: Path, project: str = "tempera", entity: str | None = None
) -> str:
    """Log the report's tables and figures as a W&B run, save a W&B report that shows them, and
    return its URL.

    Raises:
        TemperaError: wandb-workspaces is not installed, nobody is logged in, or W&B refuses.
    """
    reports = _reports()
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise TemperaError(
            "publish=true needs a W&B account: run `wandb login` first (the report's files are "
            "already written)."
        )
    figures = sorted(output.glob("*.png"))
    markdown = output / "report.md"
    try:
        run = wandb_tracker(
            directory=output, project=project, entity=entity, mode="online", job_type="report"
        )
        for figure in figures:
            run.image(figure.stem, figure)
        frame = results(runs)
        run.table("runs", [*frame], frame.astype(object).to_numpy().tolist())
        run.html("report", output / "report.html")
        files = [markdown, output / "report.html", output / "results.csv", *figures]
        run.artifact("report", "report", files)
        run.finish()
        text, names = markdown.read_text(encoding="utf-8"), [figure.stem for figure in figures]
        report = reports.Report(
            project=project,
            **({"entity": entity} if entity else {}),
            title="Speed and quality of speculative decoding",
            description=f"{len(runs)} runs of tempera",
            blocks=blocks(reports, runs, text, names, project, entity),
            width="fluid",
        )
        report.save()
    except Exception as problem:  # wandb-workspaces raises bare ones
        raise TemperaError(
            f"W&B refused the report ({' '.join(str(problem).split())[:120]}): check the account "
            f"and project={project}."
        ) from problem
    return str(report.url)


def blocks(
    reports: Any,
    runs: Sequence[Run],
    markdown: str,
    figures: Sequence[str],
    project: str,
    entity: str | None,
) -> list[Any]:
    """The report's blocks: tables, figures, and scatter plots over all evaluation runs of the
    project.
    """
    lines = markdown.split("\n## Runs")[0].splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("![", "# ")))
    scatter = [
        reports.ScatterPlot(x=gain.key, y=quality.key)
        for gain in pareto.axes("gain")
        for kind in pareto.FILES.values()
        for quality in pareto.axes(kind)
        if any(quality.key in run.metrics for run in runs)
    ]
    where = {"project": project} | ({"entity": entity} if entity else {})
    pictures, evaluations = (
        reports.Runset(**where, name=kind, filters=f"JobType = '{kind}'")
        for kind in ("report", "eval")
    )
    shown = reports.MediaBrowser(media_keys=list(figures))
    return [
        reports.MarkdownBlock(text=text),
        reports.PanelGrid(runsets=[pictures], panels=[shown]),
        reports.PanelGrid(runsets=[evaluations], panels=scatter),
    ]


def _reports() -> Any:
    try:
        return importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError:
        raise TemperaError(
            "publish=true needs wandb-workspaces, which is not installed: pip install "
            "wandb-workspaces."
        ) from None
