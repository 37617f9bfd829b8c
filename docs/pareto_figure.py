"""What relaxation buys and costs: docs/pareto.png, from docs/results/results.json.

python docs/pareto_figure.py

The picture's description holds the points that it shows.
"""

import json
import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
SERIES = {  # label: names of its rows, colour, and in each panel a point and its place beside it
    "uniform": (r"uniform_rsd .*", "#0072B2", [(0, -8, 4), (-1, 6, -14)]),
    "Cool-SD": (r"coolsd delta=.*", "#D55E00", [(0, 8, 0), (-1, -8, 4)]),
    "Cool-SD, floor": (r"coolsd floor=1 .*", "#CC79A7", [(-1, 6, 14), (0, -8, -6)]),
    "KL-optimal": (r"optimal_rsd .*", "#009E73", [(-1, 6, 6), (-1, 6, -14)]),
    "LANTERN++": (r"lanternpp", "#666666", [(-1, 8, -4), (-1, 8, -4)]),
    "LANTERN": (r"lantern", "#000000", [(-1, -6, 6), (-1, -6, 6)]),
}
PANELS = {  # heading and limits of the y-axis
    "attribute_accuracy": ("attribute accuracy ↑", (0.97, 1.0)),
    "kl_per_token": ("KL bound per token ↓", (0.0, 0.1)),
}
FIRST = 2.95
LAST = 5.1
"""Ends of the horizontal axis."""
AR = "plain autoregression"
Points = dict[str, dict[str, list[list[float]]]]


def points() -> Points:
    """Accepted length and value, by panel and label; an infinite bound has no point."""
    rows = json.loads((DOCS / "results" / "results.json").read_text(encoding="utf-8"))["rows"]
    return {
        panel: {
            label: sorted(
                [row["accepted_length"][0], row[panel][0]]
                for name, row in rows.items()
                if re.fullmatch(names, name) and row[panel][0] != float("inf")
            )
            for label, names in {AR: "ar", **{key: one[0] for key, one in SERIES.items()}}.items()
        }
        for panel in PANELS
    }


def draw(axes: Axes, panel: str, shown: dict[str, list[list[float]]]) -> None:
    """One panel: the series with their labels, and plain autoregression as a line."""
    heading, limits = PANELS[panel]
    for label, (_, colour, places) in SERIES.items():
        if line := shown[label]:
            axes.plot(*zip(*line, strict=True), "o-", color=colour, markersize=5)
            point, *place = places[list(PANELS).index(panel)]
            axes.annotate(
                label,
                line[point],
                xytext=place,
                textcoords="offset points",
                ha="right" if place[0] < 0 else "left",
                color=colour,
            )
    plain = shown[AR][0][1]
    axes.axhline(plain, color="grey", linestyle="--", linewidth=1)
    axes.annotate(
        AR, (LAST, plain), xytext=(0, 4), textcoords="offset points", color="grey", ha="right"
    )
    axes.set(
        xlabel="accepted length (tokens per round)",
        ylabel=heading,
        ylim=limits,
        xlim=(FIRST, LAST),
    )
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    found = points()
    for axes, panel in zip(figure.subplots(1, 2), PANELS, strict=True):
        draw(axes, panel, found[panel])
    figure.savefig(DOCS / "pareto.png", dpi=110, metadata={"Description": json.dumps(found)})


if __name__ == "__main__":
    main()
