"""A W&B report from the rows of `tempera.reporting.collect`; only this module needs the network."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tempera.errors import TemperaError
from tempera.reporting import pareto
from tempera.runtime.tracking import wandb_tracker


def publish(
    rows: Sequence[Mapping[str, Any]],
    output: Path,
    project: str = "tempera",
    entity: str | None = None,
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
    try:
        run = wandb_tracker(
            directory=output, project=project, entity=entity, mode="online", job_type="report"
        )
        figures = sorted(output.glob("*.png"))
        for figure in figures:
            run.image(figure.stem, figure)
        texts = [output / name for name in ("report.md", "report.html", "results.csv")]
        run.html("report", output / "report.html")
        run.artifact("report", "report", [*texts, *figures])
        run.finish()
        report = reports.Report(
            project=project,
            **({"entity": entity} if entity else {}),
            title="Speed and quality of speculative decoding",
            description=f"{len(rows)} runs of tempera",
            blocks=blocks(
                reports,
                rows,
                (output / "report.md").read_text(encoding="utf-8"),
                [figure.stem for figure in figures],
                project,
                entity,
            ),
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
    rows: Sequence[Mapping[str, Any]],
    markdown: str,
    figures: Sequence[str],
    project: str,
    entity: str | None,
) -> list[Any]:
    """The report's blocks: tables, figures, and scatter plots over all evaluation runs of the
    project.
    """
    text = "\n".join(
        line
        for line in markdown.split("\n## Runs")[0].splitlines()
        if not line.startswith(("![", "# "))
    )
    qualities = [
        quality.key
        for kind in pareto.FILES.values()
        for quality in pareto.axes(kind)
        if any(quality.key in row["metrics"] for row in rows)
    ]
    scatter = [
        reports.ScatterPlot(x=gain.key, y=quality)
        for gain in pareto.axes("gain")
        for quality in qualities
    ]
    where = {"project": project} | ({"entity": entity} if entity else {})
    pictures, evaluations = (
        reports.Runset(**where, name=kind, filters=f"JobType = '{kind}'")
        for kind in ("report", "eval")
    )
    return [
        reports.MarkdownBlock(text=text),
        reports.PanelGrid(
            runsets=[pictures], panels=[reports.MediaBrowser(media_keys=list(figures))]
        ),
        reports.PanelGrid(runsets=[evaluations], panels=scatter),
    ]


def _reports() -> ModuleType:
    try:
        return importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError:
        raise TemperaError(
            "publish=true needs wandb-workspaces, which is not installed: pip install "
            "wandb-workspaces."
        ) from None
