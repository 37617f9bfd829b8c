"""The Pareto plots: what acceptance and speed cost in quality."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
WIDTH = 330
HEIGHT = 240
COLUMNS = 3
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
        lines = [panels for gain in axes("gain") if (panels := _panels(frame, gain))]
        if lines:
            ending = "" if every["model"].nunique() == 1 else f"_{model}"
            paths.append(output / f"pareto{ending}.png")
            images = "–".join(map(str, sorted({frame["images"].min(), frame["images"].max()})))
            title = f"{model}, {images} images a run; bars are 95% intervals, bare numbers are δ"
            _draw(lines, title, paths[-1])
    return paths


def _draw(lines: Sequence[Sequence[Any]], title: str, path: Path) -> None:
    """Lines of panels, at most `COLUMNS` side by side, with one legend below."""
    import altair as alt  # takes a second

    parts = [alt.concat(*panels, columns=COLUMNS) for panels in lines]
    figure = alt.vconcat(*parts, title=title).resolve_scale(color="shared", shape="shared")
    legend = {"orient": "bottom", "columns": COLUMNS, "labelLimit": 400}
    figure.configure_legend(**legend).save(path, scale_factor=2)


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The name of the curve that each run lies on, the label of its point, and the points' order.

    The runs of a curve are equal but for one number: δ if theirs differ, or an option such as a
    rule's α. Its name leaves the number out.
    """
    options = list(dict.fromkeys(["delta", *(name for run in runs for name in run.changes)]))
    numbers: dict[tuple[str, str], set[float]] = {}  # of an option, among runs that else are equal
    for run in runs:
        for option in options:
            value = run.number(option)
            if value is not None:
                numbers.setdefault((option, run.without(option)), set()).add(value)
    rows = []
    for run in runs:
        option = _varied(run, options, numbers)
        value = run.number(option)
        point = "" if value is None else f"{value:g}"
        if point and option != "delta":
            point = f"{option}={point}"
        rows.append((run.without(option), point, value or 0.0))
    return pd.DataFrame(rows, columns=["curve", "point", "order"])


def _varied(run: Run, options: Sequence[str], numbers: Mapping[tuple[str, str], set[float]]) -> str:
    """The option in which a run differs from others: the one that was found for its length, the
    first that other runs have another number of, or δ.
    """
    if run.matched:
        return run.matched.option
    for option in options:
        same = numbers.get((option, run.without(option)), set())
        if run.number(option) is not None and len(same) > 1:
            return option
    return "delta"


def _panels(frame: pd.DataFrame, gain: Metric) -> list[Any]:
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
    names = {
        f"{axis}{end}": f"{key}{end}"
        for axis, key in (("x", gain.key), ("y", quality.key))
        for end in ENDS
    }
    data = frame.reindex(columns=[*POINT, *names.values()])
    data = data.set_axis([*POINT, *names], axis=1).astype({"plain": bool})
    return data.replace([np.inf, -np.inf], np.nan).dropna(subset=["x", "y"])


def chart(
    data: pd.DataFrame | str,
    x: str,
    y: str,
    names: Sequence[str],
    width: int | Literal["container"] = WIDTH,
    height: int = HEIGHT,
) -> Any:
    """One gain against one quality: curves with labelled points, and plain autoregression as a
    dashed line.

    Args:
        data: of `points`, or the name of a data set that is given later.
        x, y: titles of the axes.
        names: of the curves, in their order.
    """
    import altair as alt  # takes a second

    run = alt.Tooltip("name:N", title="run")
    tips: list[Any] = [run, "images:Q", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y)]
    colour = alt.Color(
        "curve:N", title=None, sort=None, scale=alt.Scale(domain=names, range=COLOURS)
    )
    shape = alt.Shape("curve:N", title=None, sort=None, scale=alt.Scale(domain=names, range=SHAPES))
    vertical = {end: alt.Y(f"y{end}:Q", title=y, scale=alt.Scale(zero=False)) for end in ENDS}
    horizontal = {end: alt.X(f"x{end}:Q", title=x, scale=alt.Scale(zero=False)) for end in ENDS}
    source = alt.Chart(alt.NamedData(data) if isinstance(data, str) else data)
    plain = source.transform_filter("datum.plain").mark_rule(strokeDash=[5, 4])
    curves = source.transform_filter("!datum.plain").encode(color=colour)
    points = curves.encode(x=horizontal[""], y=vertical[""])
    across = curves.encode(x=horizontal["_low"], x2="x_high:Q", y=vertical[""])
    along = curves.encode(x=horizontal[""], y=vertical["_low"], y2="y_high:Q")
    layers = [
        plain.encode(y=vertical[""], tooltip=[run, tips[-1]], color=alt.value("#888")),
        across.mark_rule(strokeWidth=1.5),
        along.mark_rule(strokeWidth=1.5),
        points.encode(order="order:Q").mark_line(opacity=0.7, strokeWidth=1.5),
        points.encode(shape=shape, tooltip=tips).mark_point(filled=True, size=70, opacity=1),
        points.encode(text="point:N").mark_text(dx=8, dy=-8, align="left", fontSize=10),
    ]
    return alt.layer(*layers).properties(width=width, height=height)
