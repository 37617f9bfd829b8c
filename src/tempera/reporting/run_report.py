"""What a finished run shows: its pictures and maps, report.html, the console, and the tracker."""

from collections.abc import Sequence
from pathlib import Path

from tempera.reporting import page
from tempera.reporting.collect import read_run
from tempera.reporting.console import print_run
from tempera.reporting.finished_run import Run
from tempera.reporting.paper_tables import paper_values
from tempera.reporting.report import sections_of
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Row, read_table
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import Tracker

LOGGED = 64
"""Pictures in the tracker's table."""


def write(directory: Path, tracker: Tracker, verbose: bool | None = False) -> None:
    """Write grid.png, acceptance.png and report.html; print the results, and log them.

    Args:
        directory: of a finished run.
        tracker: gets what is shown.
        verbose: print all metrics; None prints nothing.
    """
    rows = read_table(directory / "results.parquet", most=LOGGED)
    run = read_run(directory)
    only = picture_path(directory, rows[0]["id"]) if run.images == 1 else None
    grid = directory / "grid.png"
    report = directory / "report.html"
    title = " · ".join(_title_parts(run))
    with side_service(f"{grid} cannot be drawn ({{why}}): the results are in {directory}."):
        _draw_grid(run, title, rows[: page.SHOWN])
    acceptance_map = directory / "acceptance.png"
    with side_service(
        f"{acceptance_map} cannot be drawn ({{why}}): the results are in {directory}."
    ):
        from tempera.reporting import figures  # matplotlib takes a second to import

        if run.acceptance_by_place:
            figures.acceptance(acceptance_map, title, run)
    with side_service(f"{report} cannot be written ({{why}}): the results are in {directory}."):
        page.write(report, [run], sections_of([run]))
    if verbose is not None:
        print_run(run, verbose)
        for name, path in (("pictures", only or grid), ("report", report)):
            if path.exists():
                print(f"{name}: {path}")
    with side_service(f"nothing was tracked ({{why}}): the results are in {directory}."):
        _track(run, rows, tracker)


def _draw_grid(run: Run, title: str, rows: Sequence[Row]) -> None:
    """Draw the pictures of these rows of results.parquet."""
    from tempera.reporting import figures  # matplotlib takes a second to import

    directory = Path(run.directory)
    pictures = [read_picture(picture_path(directory, row["id"]), run.made_by) for row in rows]
    texts = [row["text"] for row in rows]
    broken = [row.get("broken") == 1 for row in rows]
    figures.grid(directory / "grid.png", title, pictures, texts, broken)


def _title_parts(run: Run) -> list[str]:
    """The run's name and settings, its accepted length, and its speed-up if that was measured."""
    parts = [run.name]
    for name in ("model", "guidance", "seed"):
        if name in run.settings:
            parts.append(f"{name} {run.settings[name]}")
    if "accepted_length" in run.metrics:
        parts.append(f"accepted length {run.value('accepted_length'):.2f}")
    if "speedup" in run.metrics:
        parts.append(f"speed-up {run.value('speedup'):.2f}×")
    return parts


def _track(run: Run, rows: Sequence[Row], tracker: Tracker) -> None:
    """Send a finished run's numbers, pictures and files to the tracker, and the paper's numbers."""
    directory = Path(run.directory)
    values = {}
    ends = {}
    for key, interval in run.metrics.items():
        values[key] = interval["value"]
        ends[f"{key}_low"] = interval["low"]
        ends[f"{key}_high"] = interval["high"]
    tracker.log({key: value for key, value in values.items() if value is not None})
    tracker.summary({**values, **ends, "images": run.images, **paper_values(run)})
    files = ("metrics.json", "results.parquet", "report.html", "grid.png", "acceptance.png")
    existing = [directory / file for file in files if (directory / file).is_file()]
    for picture in ("grid", "acceptance"):
        if (path := directory / f"{picture}.png") in existing:
            tracker.image(picture, path, run.name)
    if (path := directory / "report.html") in existing:
        tracker.html("report", path)
    columns = [key for key in ("id", "text", "accepted_length", "tau", "logprob") if key in rows[0]]
    lines = []
    for row in rows:
        cells = [row[key] for key in columns]
        lines.append([*cells, picture_path(directory, row["id"])])
    tracker.table("images", [*columns, "image"], lines)
    tracker.artifact(f"{run.model}-{run.name}", "evaluation", existing)
