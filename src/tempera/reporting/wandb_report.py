"""A report as a W&B run; only this module needs the network."""

from collections.abc import Sequence
from pathlib import Path

from tempera.errors import TemperaError
from tempera.reporting.collect import Run, results
from tempera.runtime.tracking import WandbTracker, wandb_tracker


def publish(
    runs: Sequence[Run], output: Path, project: str = "tempera", entity: str | None = None
) -> str:
    """Log the report's table and page as a W&B run of the type `report`, and return its
    address.

    Raises:
        TemperaError: nobody is logged in, or W&B refuses.
    """
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise TemperaError(
            "publish=true needs a W&B account: run `wandb login` first (the report's files are "
            "already written)."
        )
    tracker = wandb_tracker(
        directory=output, project=project, entity=entity, mode="online", job_type="report"
    )
    frame = results(runs)
    tracker.table("runs", [*frame], frame.astype(object).to_numpy().tolist())
    tracker.html("report", output / "report.html")
    files = ("report.md", "report.html", "results.csv")
    tracker.artifact("report", "report", [output / file for file in files])
    tracker.finish()
    return str(tracker.run.url) if isinstance(tracker, WandbTracker) else ""
