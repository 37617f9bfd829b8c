"""What a finished run shows: its pictures and maps, report.html, the console, and the tracker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempera.reporting import figures, page
from tempera.reporting.collect import read_run
from tempera.reporting.console import print_run
from tempera.reporting.report import sections_of
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Row, read_table
from tempera.runtime.tracking import Tracker

SHOWN = 24
"""Pictures on grid.png, those of the first prompts, so that all runs show the same."""
LOGGED = 64
"""Pictures in the tracker's table."""


def write(
    directory: Path, result: Mapping[str, Any], tracker: Tracker, verbose: bool = False
) -> None:
    """Write grid.png, acceptance_map.png, accepted.png (if anything was drafted), proximity_map.png
    (if the rule has proximity sets) and report.html; print the results, and log them.

    Args:
        directory: of a finished run.
        result: the content of its metrics.json.
        tracker: finished at the end.
        verbose: print all metrics.
    """
    rows = read_table(directory / "results.parquet", most=LOGGED)
    _draw(directory, result, rows[:SHOWN])
    runs = [read_run(directory)]
    page.write(directory / "report.html", runs, sections_of(runs))
    only = picture_path(directory, rows[0]["id"]) if result["images"] == 1 else None
    print_run(result, verbose)
    print(f"pictures: {only or directory / 'grid.png'}")
    print(f"report: {directory / 'report.html'}")
    _track(directory, result, rows, tracker)


def _draw(directory: Path, result: Mapping[str, Any], rows: Sequence[Row]) -> None:
    title, grid = _title(result), result["grid"]
    pictures = [read_picture(picture_path(directory, row["id"])) for row in rows]
    figures.grid(directory / "grid.png", title, pictures, [row["text"] for row in rows])
    figures.acceptance_map(directory / "acceptance_map.png", title, result)
    if result["proximity_by_place"]:
        sizes = result["proximity_by_place"]
        figures.proximity_map(directory / "proximity_map.png", title, sizes, grid)
    if result["acceptance_by_depth"]:
        figures.accepted(directory / "accepted.png", title, pictures, rows, grid)


def _title(result: Mapping[str, Any]) -> str:
    """Heading of the figures."""
    settings, metrics = result["settings"], result["metrics"]
    own = [f"{name} {settings[name]}" for name in ("model", "guidance", "seed") if name in settings]
    speed = [f"speed-up {metrics['speedup']['value']:.2f}×"] if "speedup" in metrics else []
    length = f"accepted length {metrics['accepted_length']['value']:.2f}"
    return " · ".join([result["name"], *own, length, *speed])


def _track(
    directory: Path, result: Mapping[str, Any], rows: Sequence[Row], tracker: Tracker
) -> None:
    """Send a finished run's numbers, pictures and files to the tracker."""
    name, metrics = result["name"], result["metrics"]
    values = {key: one["value"] for key, one in metrics.items()}
    spans = {f"{key}_{end}": one[end] for key, one in metrics.items() for end in ("low", "high")}
    tracker.log({key: value for key, value in values.items() if value is not None})
    tracker.summary({**values, **spans, "images": result["images"]})
    for picture in ("grid", "acceptance_map"):
        tracker.image(picture, directory / f"{picture}.png", name)
    tracker.html("report", directory / "report.html")
    columns = [key for key in ("id", "text", "accepted_length", "tau", "logprob") if key in rows[0]]
    shown = [[*(row[key] for key in columns), picture_path(directory, row["id"])] for row in rows]
    tracker.table("images", [*columns, "image"], shown)
    files = ("metrics.json", "results.parquet", "report.html", "grid.png", "acceptance_map.png")
    kept = [directory / file for file in files]
    tracker.artifact(f"{result['settings'].get('model', '')}-{name}", "evaluation", kept)
    tracker.finish()
