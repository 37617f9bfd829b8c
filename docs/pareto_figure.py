"""What relaxation buys and costs: docs/pareto.png, from docs/results/results.json.

python docs/pareto_figure.py

The picture's description holds the points that it shows.
"""

import json
import re
from math import inf
from pathlib import Path
from typing import NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent


class Series(NamedTuple):
    """Rows of one kind: a pattern of their names, their colour, and how their points are drawn."""

    rows: str
    colour: str
    marker: str = "o-"


TREE = "^"
SERIES = {
    "uniform": Series(r"uniform_rsd delta=.*", "#0072B2"),
    "uniform, parallel draft": Series(r"uniform_rsd drafter=parallel .*", "#56B4E9"),
    "Cool-SD": Series(r"coolsd delta=.*", "#D55E00"),
    "Cool-SD, floor": Series(r"coolsd floor=1 .*", "#CC79A7"),
    "floor, parallel draft": Series(r"coolsd drafter=parallel floor=1 .*", "#E69F00"),
    "KL-optimal": Series(r"optimal_rsd (?!drafter=).*", "#009E73"),
    "KL-optimal, tree": Series(r"priced_tree", "#009E73", TREE),
    "LANTERN++, tree": Series(r"lanternpp", "#A6761D", TREE),
    "LANTERN, tree": Series(r"lantern", "#B2182B", TREE),
    "exact": Series(r"eagle|parallel_block", "#737b86", "o"),
    "exact, tree": Series(r"parallel_tree", "#737b86", TREE),
}
PANELS = {  # heading and upper limit of the y-axis
    "broken": ("broken pictures, % ↓", 60.0, 100),
    "kl_per_token": ("KL bound per token, nats ↓", 0.07, 1),
}
FIRST = 2.8
LAST = 5.1
"""Ends of the horizontal axis."""
AR = "plain autoregression"
Points = dict[str, dict[str, list[list[list[float]]]]]


def points() -> Points:
    """Accepted length and value, each with its interval, by panel and label; an infinite bound has
    no point.
    """
    rows = json.loads((DOCS / "results" / "results.json").read_text(encoding="utf-8"))["rows"]
    names = {AR: "ar", **{label: series.rows for label, series in SERIES.items()}}
    return {
        panel: {
            label: sorted(
                [row["accepted_length"], row[panel]]
                for name, row in rows.items()
                if re.fullmatch(pattern, name) and row.get(panel, [inf])[0] != inf
            )
            for label, pattern in names.items()
        }
        for panel in PANELS
    }


def draw(axes: Axes, panel: str, shown: dict[str, list[list[list[float]]]]) -> None:
    """One panel: the series with their intervals, and plain autoregression as a band."""
    heading, highest, unit = PANELS[panel]
    for label, series in SERIES.items():
        lengths = [length for length, _ in shown[label]]
        values = [[unit * number for number in value] for _, value in shown[label]]
        axes.errorbar(
            [value for value, _, _ in lengths],
            [value for value, _, _ in values],
            xerr=arms(lengths),
            yerr=arms(values),
            fmt=series.marker,
            markersize=7 if series.marker == TREE else 5,
            color=series.colour,
            elinewidth=0.8,
            label=label,
        )
    ((_, plain),) = shown[AR]
    value, low, high = (unit * number for number in plain)
    axes.axhspan(low, high, color="#737b86", alpha=0.2, linewidth=0)
    axes.axhline(value, color="#737b86", linestyle="--", linewidth=1, label=AR)
    axes.set(
        xlabel="accepted length (tokens per round)",
        ylabel=heading,
        ylim=(-0.02 * highest, highest),
        xlim=(FIRST, LAST),
    )
    axes.spines[["top", "right"]].set_visible(False)


def arms(intervals: list[list[float]]) -> list[list[float]]:
    """The lengths of the arms of error bars, down and up."""
    down = [value - low for value, low, _ in intervals]
    up = [high - value for value, _, high in intervals]
    return [down, up]


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    found = points()
    for axes, panel in zip(figure.subplots(1, 2), PANELS, strict=True):
        draw(axes, panel, found[panel])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(DOCS / "pareto.png", dpi=110, metadata={"Description": json.dumps(found)})


if __name__ == "__main__":
    with style.context(DOCS / "pictures.mplstyle"):
        main()
