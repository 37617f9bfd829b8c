"""The Pareto plots: what speed, or acceptance, costs in quality."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tempera.metrics import table
from tempera.metrics.table import Metric
from tempera.reporting.finished_run import Run, results, with_schedule
from tempera.reporting.tables import FEW
from tempera.runtime.files import replacing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Of Okabe and Ito, who chose them so that nobody takes one for another."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
"""Both start again after the last one; as their numbers have no common divisor, 42 curves look
different.
"""
WIDTH = 330
HEIGHT = 240
ENDS = ("", "_low", "_high")
"""Endings of a value's column and of those of its interval's ends."""
POINT = ("name", "curve", "point", "order", "images", "plain")
"""What a point of the chart has beside its values."""


def axes(kind: Literal["gain", "quality"]) -> list[Metric]:
    """The metrics for horizontal or vertical axes, in the report's order."""
    return [metric for metric in table.report_order() if metric.in_pareto == kind]


def write(runs: Sequence[Run], output: Path) -> list[Path]:
    """Draw pareto.png, one per model, and return the paths. Its panels share one gain: the speed-up
    where every run was timed, else the accepted length.
    """
    paths = []
    all_models = pd.concat([results(runs), curves(runs)], axis=1)
    several = all_models["model"].nunique() != 1
    for model, frame in all_models.groupby("model", sort=False, dropna=False):
        panels = _panels(frame, _gain(frame))
        if not panels:
            continue
        name = re.sub(r"[^\w.-]+", "-", str(model))
        path = output / (f"pareto_{name}.png" if several else "pareto.png")
        images = "–".join(map(str, sorted({frame["images"].min(), frame["images"].max()})))
        title = f"{model}, images per run: {images}. Bars are 95% intervals, bare numbers δ, the "
        _draw(panels, f"{title}dashed line is plain autoregression.", path)
        paths.append(path)
    return paths


def _draw(panels: Sequence[Any], title: str, path: Path) -> None:
    """The panels, two or three side by side, with one legend below."""
    import altair as alt  # takes a second

    heading = alt.TitleParams(title, fontSize=12, fontWeight="normal")
    columns = 2 if len(panels) in (2, 4) else 3
    figure = alt.concat(*panels, columns=columns, title=heading)
    figure = figure.resolve_scale(color="shared", shape="shared")
    legend = {"orient": "bottom", "columns": 3, "labelLimit": 400}
    with replacing(path) as temporary:
        figure.configure_legend(**legend).save(temporary, format="png", scale_factor=2)


def _gain(frame: pd.DataFrame) -> Metric:
    """The last gain, in the report's order, that all runs beside plain autoregression have."""
    drafted = frame[~frame["plain"].astype(bool)]
    gains = axes("gain")
    complete = [gain for gain in gains if gain.key in drafted and drafted[gain.key].notna().all()]
    return [*gains[:1], *complete][-1]


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The name of the curve that each run lies on, the label of its point, and the points' order.

    The runs of a curve are equal but for one number: δ if theirs differ, or an option such as a
    rule's α. Its name leaves the number out.
    """
    runs = [with_schedule(run, runs) for run in runs]
    changed = [name for run in runs for name in run.changes]
    options = list(dict.fromkeys(["delta", *changed]))
    numbers = _numbers(runs, options)
    rows = []
    for run in runs:
        option = _varied(run, options, numbers)
        value = run.number(option)
        point = "" if value is None else f"{value:g}"
        if point and option != "delta":
            point = f"{option}={point}"
        rows.append((run.without(option), point, value or 0.0))
    return pd.DataFrame(rows, columns=["curve", "point", "order"])


Numbers = dict[tuple[str, str], set[float]]
"""The numbers that an option takes in runs that are equal but for it, by the option and the name
that the runs share.
"""


def _numbers(runs: Sequence[Run], options: Sequence[str]) -> Numbers:
    numbers: Numbers = {}
    for run in runs:
        for option in options:
            value = run.number(option)
            if value is not None:
                numbers.setdefault((option, run.without(option)), set()).add(value)
    return numbers


def _varied(run: Run, options: Sequence[str], numbers: Numbers) -> str:
    """The option in which a run differs from others: the one that was found for its length, the
    first that other runs have another number of, or δ.
    """
    if run.matched:
        return run.matched.option
    for option in options:
        taken = numbers.get((option, run.without(option)), set())
        if run.number(option) is not None and len(taken) > 1:
            return option
    return "delta"


def _panels(frame: pd.DataFrame, gain: Metric) -> list[Any]:
    """One gain against all qualities that some run beside plain autoregression has with it, and no
    run has too few images for.
    """
    names = list(frame.loc[~frame["plain"].astype(bool), "curve"].unique())
    panels = []
    for quality in axes("quality"):
        data = points(frame, gain, quality)
        if frame["images"].min() >= quality.fewest and not data["plain"].all():
            panels.append(chart(data, gain.heading, quality.heading, names))
    return panels


def points(frame: pd.DataFrame, gain: Metric, quality: Metric) -> pd.DataFrame:
    """The runs that have both metrics, as `chart` takes them: a value of few has no interval."""
    names = {name: name for name in POINT}
    for end in (*ENDS, "_n"):
        names[gain.key + end] = f"x{end}"
        names[quality.key + end] = f"y{end}"
    data = frame.reindex(columns=list(names)).rename(columns=names).astype({"plain": bool})
    for axis in ("x", "y"):
        for end in ENDS[1:]:
            data[axis + end] = data[axis + end].mask(data[f"{axis}_n"] < FEW, data[axis])
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
    drafted = source.transform_filter("!datum.plain")
    curves = drafted.encode(color=colour)
    points = curves.encode(x=horizontal[""], y=vertical[""])
    across = curves.encode(x=horizontal["_low"], x2="x_high:Q", y=vertical[""])
    along = curves.encode(x=horizontal[""], y=vertical["_low"], y2="y_high:Q")
    layers: list[Any] = []
    if isinstance(data, str) or data["plain"].any():  # Vega warns of empty layers
        tip = [run, tips[-1]]
        layers.append(plain.encode(y=vertical[""], tooltip=tip, color=alt.value("#888")))
    layers += [
        across.mark_rule(strokeWidth=1.5),
        along.mark_rule(strokeWidth=1.5),
        points.encode(order="order:Q").mark_line(opacity=0.7, strokeWidth=1.5),
        points.encode(shape=shape, tooltip=tips).mark_point(filled=True, size=70, opacity=1),
        drafted.encode(x=horizontal[""], y=vertical[""], text="point:N").mark_text(
            dx=8, dy=-8, align="left", fontSize=12
        ),
    ]
    return alt.layer(*layers).properties(width=width, height=height)
