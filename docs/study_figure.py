"""The study at equal accepted lengths: docs/study.png, from docs/results/results.json.

python docs/study_figure.py

The picture's description holds the points that it shows.
"""

import json
from pathlib import Path

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RELAXATIONS = {  # of a row: what the picture calls it, and its colour
    "uniform_rsd": ("uniform", "#0072B2"),
    "coolsd": ("Cool-SD, published", "#D55E00"),
    "coolsd floor=1": ("Cool-SD, floor", "#CC79A7"),
    "coolsd schedule=linear": ("Cool-SD, linear", "#E69F00"),
    "coolsd nu=0.35": ("Cool-SD, ν = 0.35", "#8C6BB1"),
    "coolsd depth=7": ("Cool-SD, chains of 7", "#F28E7F"),
    "coolsd schedule=calibrated": ("TV-optimal schedule", "#56B4E9"),
    "optimal_rsd": ("one price", "#66C2A4"),
    "optimal_rsd schedule=optimal": ("KL-optimal", "#009E73"),
    "lanternpp tree=chain": ("LANTERN++", "#A6761D"),
    "lantern tree=chain": ("LANTERN", "#B2182B"),
    "gsd drafter=eagle tree=chain": ("GSD", "#737b86"),
}
LENGTHS = {"3.8": "o", "4.2": "^"}
"""Tokens per round, and their markers."""
INFINITE = 0.105
"""Where the left panel shows infinite KL bounds."""
Points = dict[str, dict[str, list[list[float]]]]


def points() -> Points:
    """Of each relaxation at each length its TV and KL bound, and what it loses in shape accuracy
    against plain autoregression, with the interval.
    """
    results = json.loads((DOCS / "results" / "results.json").read_text(encoding="utf-8"))
    study = results["study"]
    return {
        length: {
            row: [
                study["overview"][f"{row} at {length}"]["summed TV bound"],
                study["overview"][f"{row} at {length}"]["KL bound per token"],
                study["losses"][f"{row} at {length}"]["shape accuracy ↑"][:3],
            ]
            for row in RELAXATIONS
        }
        for length in LENGTHS
    }


def divergences(axes: Axes, shown: Points) -> None:
    """KL bound against TV bound."""
    for length, marker in LENGTHS.items():
        for row, ((tv,), (kl,), _) in shown[length].items():
            colour = RELAXATIONS[row][1]
            axes.plot(tv, min(kl, INFINITE), marker, color=colour, markersize=7)
    axes.axhline(INFINITE, color="#737b86", linestyle=":", linewidth=1)
    ticks = [0.02, 0.04, 0.06, 0.08]
    axes.set_yticks([*ticks, INFINITE], [*map(str, ticks), "infinite"])
    axes.set(
        xlabel="summed TV bound of an image", ylabel="KL bound per token, nats", ylim=(0.015, 0.11)
    )


def losses(axes: Axes, shown: Points) -> None:
    """Shape accuracy minus that of plain autoregression, in percent."""
    for place, (_, colour) in enumerate(RELAXATIONS.values()):
        for offset, (length, marker) in zip((-0.16, 0.16), LENGTHS.items(), strict=True):
            interval = list(shown[length].values())[place][2]
            value, low, high = (100 * number for number in interval)
            arms = [[value - low], [high - value]]
            y = [place + offset]
            axes.errorbar([value], y, xerr=arms, fmt=marker, color=colour, elinewidth=1.2)
    names = [name for name, _ in RELAXATIONS.values()]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="#737b86", linestyle="--", linewidth=1)
    axes.set(xlabel="shape accuracy, % (plain autoregression is 0)")


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    found = points()
    left, right = figure.subplots(1, 2)
    divergences(left, found)
    losses(right, found)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    for length, marker in LENGTHS.items():
        label = f"{length} tokens per round"
        left.plot([], [], marker, color="#737b86", label=label)
    left.legend(loc="lower right", frameon=False)
    figure.savefig(DOCS / "study.png", dpi=110, metadata={"Description": json.dumps(found)})


if __name__ == "__main__":
    with style.context(DOCS / "pictures.mplstyle"):
        main()
