"""The Pareto plot: what acceptance and speed cost in quality."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes

from tempera.metrics import table
from tempera.metrics.table import Metric
from tempera.reporting.figures import new_figure, save_figure
from tempera.reporting.run_names import is_plain

FILES: dict[str, Literal["quality", "more"]] = {"pareto": "quality", "pareto_more": "more"}
"""Names of the files, and which metrics their y-axes show."""
COLOURS = ("#3b6ea5", "#d1603d", "#4f9d69", "#8e5ea2", "#c79a2b", "#3aa6a6", "#b3446c", "#7a7a7a")
MARKERS = "os^Dv<>P"


def axes(kind: Literal["gain", "quality", "more"]) -> list[Metric]:
    """The metrics for axes of this kind, in the report's order."""
    return [metric for metric in table.report_order() if metric.in_pareto == kind]


def write(rows: Sequence[Mapping[str, Any]], output: Path) -> list[Path]:
    """Draw pareto.png and pareto_more.png, one of each per model, and return their paths."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    paths = []
    for model in models:
        group = [row for row in rows if row["model"] == model]
        for name, kind in FILES.items():
            shown = [quality for quality in axes(kind) if any(_has(row, quality) for row in group)]
            if shown:
                paths.append(
                    output / (f"{name}.png" if len(models) == 1 else f"{name}_{model}.png")
                )
                _draw(paths[-1], group, shown, model)
    return paths


def _draw(
    path: Path, rows: Sequence[Mapping[str, Any]], qualities: Sequence[Metric], model: str
) -> None:
    gains = [gain for gain in axes("gain") if any(_has(row, gain) for row in rows)]
    families = list(dict.fromkeys(row["family"] for row in rows if not is_plain(row["settings"])))
    figure = new_figure(max(3.6 * len(qualities), 5.0), 3.1 * len(gains) + 0.7)
    panels = figure.subplots(len(gains), len(qualities), squeeze=False)
    for gain, line in zip(gains, panels, strict=True):
        for quality, panel in zip(qualities, line, strict=True):
            _panel(panel, rows, gain, quality, families)
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        handles |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(4, len(handles)),
        frameon=False,
        fontsize=9,
    )
    images = sorted({row["images"] for row in rows})
    counts = f"{images[0]}" if len(images) == 1 else f"{images[0]} to {images[-1]}"
    numbers = ", numbers are δ" if any(row["delta"] is not None for row in rows) else ""
    figure.suptitle(
        f"{model}, {counts} images a run; bars are 95% intervals{numbers}",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    save_figure(path, figure)


def _panel(
    panel: Axes,
    rows: Sequence[Mapping[str, Any]],
    gain: Metric,
    quality: Metric,
    families: Sequence[str],
) -> None:
    """One gain against one quality: a curve per family, in the order of δ, and plain
    autoregression as a horizontal line.
    """
    panel.set(xlabel=gain.title, ylabel=quality.heading)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, linewidth=0.6)
    for row in rows:
        if is_plain(row["settings"]) and _has(row, quality):
            level = row["metrics"][quality.key]
            panel.axhline(
                level["value"], color="black", linewidth=1, linestyle="--", label=row["method"]
            )
            panel.axhspan(level["low"], level["high"], color="black", alpha=0.07, linewidth=0)
    for place, family in enumerate(families):
        points = [
            row
            for row in rows
            if row["family"] == family and _has(row, gain) and _has(row, quality)
        ]
        points.sort(key=lambda row: (row["delta"] or 0, row["seed"] or 0))
        if points:
            _curve(panel, points, gain, quality, place)


def _curve(
    panel: Axes, points: Sequence[Mapping[str, Any]], gain: Metric, quality: Metric, place: int
) -> None:
    """A family's runs with their intervals, each labelled with its δ; `place` selects the colour
    and marker.
    """
    turn, step = divmod(place, len(COLOURS))
    colour, marker = COLOURS[step], MARKERS[(step + 3 * turn) % len(MARKERS)]  # no pair twice
    offset = ((5, 5), (-5, -12), (5, -12), (-5, 5))[place % 4]
    x, y = ([row["metrics"][axis.key]["value"] for row in points] for axis in (gain, quality))
    errors = [_bars(points, axis) for axis in (gain, quality)]
    style: dict[str, Any] = {
        "color": colour,
        "linewidth": 1.3,
        "marker": marker,
        "markersize": 4.5,
        "label": points[0]["family"],
    }
    panel.errorbar(
        x, y, xerr=errors[0], yerr=errors[1], ecolor=colour + "66", elinewidth=1, **style
    )
    side = "left" if offset[0] > 0 else "right"
    for row, at_x, at_y in zip(points, x, y, strict=True):
        if row["delta"] is not None:
            panel.annotate(
                f"{row['delta']:g}",
                (at_x, at_y),
                offset,
                fontsize=8,
                color=colour,
                textcoords="offset points",
                ha=side,
            )


def _bars(points: Sequence[Mapping[str, Any]], axis: Metric) -> list[list[float]]:
    """Lengths of the error bars below and above."""
    intervals = [point["metrics"][axis.key] for point in points]
    return [
        [max(i["value"] - i["low"], 0.0) for i in intervals],
        [max(i["high"] - i["value"], 0.0) for i in intervals],
    ]


def _has(row: Mapping[str, Any], metric: Metric) -> bool:
    interval = row["metrics"].get(metric.key)
    return bool(interval) and all(interval.get(key) is not None for key in ("value", "low", "high"))
