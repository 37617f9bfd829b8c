"""The Pareto plots: what acceptance and speed cost in quality."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from tempera.metrics import table
from tempera.metrics.table import Metric
from tempera.reporting.collect import Run, results

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Of Okabe and Ito, who chose them so that nobody takes one for another."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
"""Both start again after the last one; as their numbers have no common divisor, 42 curves look
different.
"""
WIDTH, HEIGHT = 330, 260
ENDS = ("", "_low", "_high")
POINT = ("name", "curve", "point", "order", "images", "plain")
"""What a point of the chart has beside its values."""


def axes(kind: Literal["gain", "quality"]) -> list[Metric]:
    """The metrics for horizontal or vertical axes, in the report's order."""
    return [metric for metric in table.report_order() if metric.in_pareto == kind]


def write(runs: Sequence[Run], output: Path) -> list[Path]:
    """Draw pareto.png, one per model, and return the paths."""
    paths = []
    every = pd.concat([results(runs), curves(runs)], axis=1)
    for model, frame in every.groupby("model", sort=False, dropna=False):
        images = "–".join(map(str, sorted({frame["images"].min(), frame["images"].max()})))
        title = f"{model}, {images} images a run; bars are 95% intervals, bare numbers are δ"
        panels = [alt.hconcat(*line) for gain in axes("gain") if (line := _line(frame, gain))]
        if panels:
            ending = "" if every["model"].nunique() == 1 else f"_{model}"
            paths.append(output / f"pareto{ending}.png")
            alt.vconcat(*panels, title=title).save(paths[-1], scale_factor=2)
    return paths


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The name of the curve that each run lies on, the label of its point, and the points' order.

    The runs of a curve are equal but for one number: δ if theirs differ, or an option such as a
    rule's α. Its name leaves the number out.
    """
    options = list(dict.fromkeys(["delta", *(name for run in runs for name in run.changes)]))
    lines = []
    for run in runs:
        found = [run.matched.option] if run.matched else [
            name for name in options
            if len({other.number(name) for other in runs if _alike(run, other, name)}) > 1
        ]  # fmt: skip
        option = (found or ["delta"])[0]
        number = run.number(option)
        label = "" if number is None else f"{number:g}"
        if label and option != "delta":
            label = f"{option}={label}"
        lines.append((run.without(option), label, number or 0.0))
    return pd.DataFrame(lines, columns=["curve", "point", "order"])


def _alike(run: Run, other: Run, option: str) -> bool:
    """Whether two runs with numbers for the option differ in nothing else of their names."""
    known = run.number(option) is not None and other.number(option) is not None
    return known and run.without(option) == other.without(option)


def _line(frame: pd.DataFrame, gain: Metric) -> list[Any]:
    """One gain against all qualities that some run beside plain autoregression has with it."""
    names = list(frame.loc[~frame["plain"].astype(bool), "curve"].unique())
    both = [(quality, points(frame, gain, quality)) for quality in axes("quality")]
    return [
        chart(data, gain.heading, quality.heading, names)
        for quality, data in both
        if not data["plain"].all()
    ]


def points(frame: pd.DataFrame, gain: Metric, quality: Metric) -> pd.DataFrame:
    """The runs that have both metrics, as `chart` takes them."""
    names = {f"{axis}{end}": f"{key}{end}" for axis, key in (("x", gain.key), ("y", quality.key))
             for end in ENDS}  # fmt: skip
    data = frame.reindex(columns=[*POINT, *names.values()])
    data = data.set_axis([*POINT, *names], axis=1).astype({"plain": bool})
    return data.replace([np.inf, -np.inf], np.nan).dropna(subset=["x", "y"])


def chart(
    data: pd.DataFrame | alt.NamedData,
    x: str,
    y: str,
    names: Sequence[str],
    width: int | Literal["container"] = WIDTH,
    height: int = HEIGHT,
) -> Any:
    """One gain against one quality: curves with labelled points, and plain autoregression as a
    dashed line.

    Args:
        data: of `points`.
        x, y: titles of the axes.
        names: of the curves, in their order.
    """
    run = alt.Tooltip("name:N", title="run")
    tips: list[Any] = [run, "images:Q", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y)]
    colour = alt.Color(
        "curve:N", title=None, sort=None, scale=alt.Scale(domain=names, range=COLOURS)
    )
    shape = alt.Shape("curve:N", title=None, sort=None, scale=alt.Scale(domain=names, range=SHAPES))
    vertical, horizontal = (
        {end: alt.Y(f"y{end}:Q", title=y, scale=alt.Scale(zero=False)) for end in ENDS},
        {end: alt.X(f"x{end}:Q", title=x, scale=alt.Scale(zero=False)) for end in ENDS},
    )
    plain = alt.Chart(data).transform_filter("datum.plain").mark_rule(strokeDash=[5, 4])
    base = alt.Chart(data).transform_filter("!datum.plain").encode(color=colour)
    at = base.encode(x=horizontal[""], y=vertical[""])
    layers = [
        plain.encode(y=vertical[""], tooltip=[run, tips[-1]], color=alt.value("#888")),
        base.encode(x=horizontal["_low"], x2="x_high:Q", y=vertical[""]).mark_rule(strokeWidth=1.5),
        base.encode(x=horizontal[""], y=vertical["_low"], y2="y_high:Q").mark_rule(strokeWidth=1.5),
        at.encode(order="order:Q").mark_line(opacity=0.7, strokeWidth=1.5),
        at.encode(shape=shape, tooltip=tips).mark_point(filled=True, size=70, opacity=1),
        at.encode(text="point:N").mark_text(dx=8, dy=-8, align="left", fontSize=10),
    ]
    return alt.layer(*layers).properties(width=width, height=height)
