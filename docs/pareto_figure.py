"""What relaxation buys and costs: docs/pareto.png, from docs/results/results.json.

python docs/pareto_figure.py

The picture's description holds the points that it shows.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
LENGTHS = (2.95, 5.1)
"""Ends of the horizontal axis."""


class Place(NamedTuple):
    """Where a series is labelled: `right` and `up` are points beside its point number `point`."""

    point: int
    right: int
    up: int


class Series(NamedTuple):
    """A line of the figure: the rows whose names match `rows`, and where each panel labels it."""

    rows: str
    colour: str
    accuracy: Place
    kl: Place


SERIES = {
    "uniform": Series(r"uniform_rsd .*", "#0072B2", Place(0, -8, 4), Place(-1, 6, -14)),
    "Cool-SD": Series(r"coolsd delta=.*", "#D55E00", Place(0, 8, 0), Place(-1, -8, 4)),
    "Cool-SD, floor": Series(r"coolsd floor=1 .*", "#CC79A7", Place(-1, 6, 14), Place(0, -8, -6)),
    "KL-optimal": Series(r"optimal_rsd .*", "#009E73", Place(-1, 6, 6), Place(-1, 6, -14)),
    "LANTERN++": Series(r"lanternpp", "#666666", Place(-1, 8, -4), Place(-1, 8, -4)),
    "LANTERN": Series(r"lantern", "#000000", Place(-1, -6, 6), Place(-1, -6, 6)),
}
AR = "plain autoregression"


class Panel(NamedTuple):
    """Heading and limits of a panel's vertical axis."""

    heading: str
    limits: tuple[float, float]


PANELS = {
    "attribute_accuracy": Panel("attribute accuracy ↑", (0.97, 1.0)),
    "kl_per_token": Panel("KL bound per token ↓", (0.0, 0.1)),
}
"""By the metric that a panel shows."""
Points = list[list[float]]
"""Accepted lengths and values, in the order of the lengths."""


def points() -> dict[str, dict[str, Points]]:
    """What the figure shows, by metric and label."""
    results = json.loads((DOCS / "results" / "results.json").read_text(encoding="utf-8"))
    names = {AR: "ar"} | {label: series.rows for label, series in SERIES.items()}
    shown: dict[str, dict[str, Points]] = {}
    for metric in PANELS:
        shown[metric] = {}
        for label, pattern in names.items():
            shown[metric][label] = line(results["rows"], metric, pattern)
    return shown


def line(rows: dict[str, Any], metric: str, pattern: str) -> Points:
    """The points of the rows whose names match; an infinite bound has none."""
    matching = [row for name, row in rows.items() if re.fullmatch(pattern, name)]
    return sorted(
        [row["accepted_length"][0], row[metric][0]]
        for row in matching
        if row[metric][0] != float("inf")
    )


def draw(axes: Axes, metric: str, shown: dict[str, Points]) -> None:
    """One panel: the series with their labels, and plain autoregression as a line."""
    for label, series in SERIES.items():
        if not shown[label]:
            continue
        lengths, values = zip(*shown[label], strict=True)
        axes.plot(lengths, values, "o-", color=series.colour, markersize=5)
        place = series.accuracy if metric == "attribute_accuracy" else series.kl
        axes.annotate(
            label,
            shown[label][place.point],
            xytext=(place.right, place.up),
            textcoords="offset points",
            ha="right" if place.right < 0 else "left",
            color=series.colour,
        )
    plain = shown[AR][0][1]
    axes.axhline(plain, color="grey", linestyle="--", linewidth=1)
    axes.annotate(
        AR, (LENGTHS[1], plain), xytext=(0, 4), textcoords="offset points", color="grey", ha="right"
    )
    axes.set(
        xlabel="accepted length (tokens per round)",
        ylabel=PANELS[metric].heading,
        ylim=PANELS[metric].limits,
        xlim=LENGTHS,
    )
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    shown = points()
    for axes, metric in zip(figure.subplots(1, 2), PANELS, strict=True):
        draw(axes, metric, shown[metric])
    figure.savefig(DOCS / "pareto.png", dpi=110, metadata={"Description": json.dumps(shown)})


if __name__ == "__main__":
    main()
