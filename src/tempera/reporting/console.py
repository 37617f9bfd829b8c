"""A run's results on the console."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tempera.metrics import table
from tempera.metrics.quality import ENOUGH

FEW = 5
"""Fewer values than this have no interval."""
FOR_FID = 256
"""Images below which the console shows no FID: it would be mostly bias."""
ROWS = 10
"""Metrics that the console shows by default."""


def print_run(
    result: Mapping[str, Any], verbose: bool = False, console: Console | None = None
) -> None:
    """Print what a run gains and costs in three lines, then its metrics, each with its 95%
    interval and its number of prompts: the ten that matter, or all.

    Args:
        result: the content of metrics.json.
    """
    console = console or Console()
    metrics = result["metrics"]
    for line in headline(metrics, math.prod(result["grid"])):
        console.print(line, highlight=False, soft_wrap=True)
    shown = Table(
        title=result["name"], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    shown.add_column("metric", no_wrap=True)
    for name in ("value", "95% interval", "n"):
        shown.add_column(name, justify="right", no_wrap=True)
    roomy = console.width >= 105
    if roomy:
        shown.add_column("", no_wrap=True, style="dim")
    known = [metric for metric in table.METRICS if metric.key in metrics]
    for metric in known if verbose else _main(known, metrics):
        value, low, high = (metrics[metric.key].get(key) for key in ("value", "low", "high"))
        count = int(metrics[metric.key].get("n") or 0)
        text = span(None if count < FEW else low, high, metric.format)
        cells = [metric.heading, number(value, metric.format), text, str(count)]
        shown.add_row(*cells, *([metric.unit] if roomy else []))
    console.print(shown)
    for note in _notes(result, verbose):
        console.print(note, highlight=False, soft_wrap=True)


def headline(metrics: Mapping[str, Mapping[str, Any]], length: int) -> list[str]:
    """What is gained, what a round costs here, and the accepted length at which nothing is gained.

    Args:
        metrics: of the run.
        length: tokens of an image.
    """
    value = {key: one["value"] for key, one in metrics.items() if one["value"] is not None}
    tokens = value["accepted_length"]
    passes = value.get("target_passes", length / tokens)
    instead = "" if passes == length else f" instead of {length}"
    lines = [
        f"{length / passes:.2f} tokens per target pass: {passes:.0f} passes an image{instead}."
    ]
    if value.get("efficiency") and tokens != 1:
        cost = 1 / value["efficiency"]
        lines += [
            f"Here a round costs {cost:.1f} AR rounds: {value['speedup']:.1f}×.",
            f"Break-even {cost:.1f} tokens.",
        ]
    return lines


def _main(
    known: Sequence[table.Metric], metrics: Mapping[str, Mapping[str, Any]]
) -> list[table.Metric]:
    """The metrics that matter most: those on the axes of the Pareto plots first."""
    axes = ("gain", "quality", "more", None)
    kept = [
        metric
        for metric in known
        if metric.in_report and (metric.key != "fid" or (metrics["fid"]["n"] or 0) >= FOR_FID)
    ]
    first = sorted(kept, key=lambda metric: axes.index(metric.in_pareto))[:ROWS]
    return [metric for metric in kept if metric in first]


def _notes(result: Mapping[str, Any], verbose: bool) -> list[str]:
    notes = []
    images, time = result["images"], result["time"]
    measured = any(table.find(key).section == "quality" for key in result["metrics"])
    if measured and images < ENOUGH:
        notes.append(f"KID, precision and recall need {ENOUGH} images, FID {FOR_FID}.")
    elif measured and images < FOR_FID:
        notes.append(f"FID needs {FOR_FID} images to mean something; this run has {images}.")
    if time:
        parts = ", ".join(f"{part} {one['share']:.0%}" for part, one in time["parts"].items())
        notes.append(f"Time of a round: {parts}.")
    if not verbose:
        notes.append("verbose=true prints all metrics.")
    return notes


def span(low: float | None, high: float | None, form: str) -> str:
    """An interval as text; a dash without one."""
    if low is None or high is None or not math.isfinite(low + high):
        return "–"
    return f"{number(low, form)} … {number(high, form)}"


def number(value: float | None, form: str) -> str:
    """A metric's value in its format, a dash without one; large numbers are shortened, and zero has
    no minus sign.
    """
    if value is None or math.isnan(value):
        return "–"
    sign = "+" if form.startswith("+") else ""
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:{sign}z{form.removeprefix('+')}}"
