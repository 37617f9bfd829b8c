"""A run's results on the console."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from tempera.metrics import table
from tempera.metrics.quality import ENOUGH
from tempera.reporting.tables import cell, show

FOR_FID = 256
"""Images below which the console shows no FID: it would be mostly bias."""
ROWS = 10
"""Metrics that the console shows by default."""
Metrics = Mapping[str, Mapping[str, Any]]


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
    known = [metric for metric in table.METRICS if metric.key in metrics]
    lines = []
    for metric in known if verbose else main_metrics(known, metrics):
        value, low, high, n = (
            metrics[metric.key].get(end) for end in ("value", "low", "high", "n")
        )
        text = cell(value, low, high, n, metric.format)
        lines.append([metric.heading, text, str(int(n)), metric.unit])
    shown = pd.DataFrame(lines, columns=["metric", "value (95% interval)", "n", ""])
    for line in headline(metrics, math.prod(result["grid"])):
        console.print(line, highlight=False, soft_wrap=True)
    show(shown if console.width >= 105 else shown.drop(columns=""), result["name"], console)
    for note in _notes(result, verbose):
        console.print(note, highlight=False, soft_wrap=True)


def headline(metrics: Metrics, length: int) -> list[str]:
    """What is gained, what a round costs here, and the accepted length at which nothing is gained.

    Args:
        metrics: of the run.
        length: tokens of an image.
    """
    value = {key: one["value"] for key, one in metrics.items() if one["value"] is not None}
    passes = value.get("target_passes", length / value["accepted_length"])
    if not passes:
        return ["The draft's own images, without the target."]
    instead = "" if passes == length else f" instead of {length}"
    lines = [
        f"{length / passes:.2f} tokens per target pass: {passes:.0f} passes an image{instead}."
    ]
    if value.get("efficiency") and value["accepted_length"] != 1:
        cost = 1 / value["efficiency"]
        lines.append(f"Here a round costs {cost:.1f} AR rounds: {value['speedup']:.1f}×.")
        lines.append(f"Break-even {cost:.1f} tokens.")
    return lines


def main_metrics(known: Sequence[table.Metric], metrics: Metrics) -> list[table.Metric]:
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
    if measured and images < FOR_FID:
        notes.append(f"KID, precision and recall need {ENOUGH} images, FID {FOR_FID}.")
    if time:
        parts = ", ".join(f"{part} {one['share']:.0%}" for part, one in time["parts"].items())
        notes.append(f"Time of a round: {parts}.")
    if not verbose:
        notes.append("verbose=true prints all metrics.")
    return notes
