"""A run's results on the console."""

from collections.abc import Sequence

import pandas as pd

from tempera.metrics import table
from tempera.reporting.finished_run import Run, metrics_of
from tempera.reporting.tables import Cell, Output, cell, known, show

ROWS = 10
"""Metrics that the console shows by default."""


def print_run(run: Run, verbose: bool = False) -> None:
    """Print what a run gains and costs in two lines, then its metrics, each with its 95%
    interval and its number of prompts: the ten that matter and those that were asked for by name
    (`torchmetrics=`, `scores=`), or all.
    """
    console = Output()
    metrics = [metric for metric in metrics_of([run]) if metric.key in run.metrics]
    lines = []
    main = main_metrics(metrics, [run], ROWS)
    for metric in metrics:
        if not verbose and metric not in main and not metric.imported:
            continue
        interval = run.metrics[metric.key]
        text = cell(interval, metric.format)
        lines.append([metric.heading, text, str(interval.get("n")), metric.unit])
    shown = pd.DataFrame(lines, columns=["metric", "value (95% interval)", "n", ""])
    for line in headline(run):
        console.print(line, highlight=False, soft_wrap=True)
    show(shown if console.width >= 105 else shown.drop(columns=""), run.name, console)
    for note in _notes(run, verbose):
        console.print(note, highlight=False, soft_wrap=True)


def headline(run: Run) -> list[str]:
    """What is gained, and what a round costs here: nothing is gained at an accepted length of as
    many AR rounds. The target scores a whole round in one pass.
    """
    if "accepted_length" not in run.metrics:  # pictures of other code
        return []
    if run.value("target_passes") == 0:
        return ["The draft's own images, without the target."]
    length = run.length
    tokens = run.value("accepted_length")
    rounds = f"{length / tokens:.0f} rounds per image"
    if tokens != 1:
        rounds += f" instead of {length:.0f}"
    lines = [f"{tokens:.2f} tokens per round: {rounds}."]
    efficiency = run.value("efficiency")
    if efficiency > 0 and tokens != 1:
        cost = f"{1 / efficiency:.2f}"
        speed = f"{run.value('speedup'):.2f}"
        slower = ", slower than plain autoregression" if run.value("speedup") < 1 else ""
        lines.append(
            f"A round takes {cost} times as long as an AR round here: {speed}× the speed{slower}."
        )
    return lines


def main_metrics(
    metrics: Sequence[table.Metric], runs: Sequence[Run], most: int
) -> list[table.Metric]:
    """The metrics of some run that matter most: those on the axes of the Pareto plots, then other
    ones of quality. They keep their order.
    """
    candidates = [
        metric
        for metric in metrics
        if metric.in_report and any(known(run.shown(metric).get("value")) for run in runs)
    ]
    first = sorted(candidates, key=_rank)[:most]
    return [metric for metric in candidates if metric in first]


def _rank(metric: table.Metric) -> tuple[int, bool]:
    axes = ("gain", "quality", None)
    asked = "quality" if metric.imported else metric.in_pareto
    return axes.index(asked), metric.section != "quality"


def _notes(run: Run, verbose: bool) -> list[str]:
    """What stands below the table: metrics that are missing, and where the time of a round goes."""
    notes = []
    for metric in metrics_of([run]):
        if metric.key in run.metrics and run.images < metric.fewest:
            notes.append(f"{metric.title} needs {metric.fewest} images.")
    if run.time:
        shares = [f"{part} {time['share']:.0%}" for part, time in run.time["parts"].items()]
        notes.append(f"Time of a round: {', '.join(shares)}.")
        notes.append(_precision_of_timing(run.metrics["efficiency"]))
    if run.crowd:
        notes.append(f"Other processes were running ({run.crowd}), so the speed may be wrong.")
    if not verbose:
        notes.append("verbose=true prints all metrics.")
    return notes


def _precision_of_timing(efficiency: Cell) -> str:
    """On how many images the speed was timed, and how well it is known."""
    low, high = 1 / efficiency["high"], 1 / efficiency["low"]
    return (
        f"Timed: {efficiency['n']} images; a round takes {low:.2f} to {high:.2f} AR rounds (95% "
        "interval)."
    )
