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
    "mentored": ("mentored", "#004D40"),
    "cactus": ("Cactus", "#9AA516"),
    "mixture": ("mixture", "#3949AB"),
    "fly ahead=1": ("FLy", "#212121"),
}
LENGTHS = {"3.1": "o", "3.4": "^"}
"""Tokens per round, and their markers."""
BOUNDS = ("summed TV bound", "KL bound per token")
Points = dict[str, dict[str, list[list[float]]]]


def points() -> Points:
    """Of each relaxation at each length the length that it has in fact, its TV and KL bound, none
    of a rule without bounds, and how many more pictures it breaks than plain autoregression, with
    the interval.
    """
    results = json.loads((DOCS / "results" / "results.json").read_text(encoding="utf-8"))
    study = results["study"]
    return {
        length: {
            row: [
                study["overview"][f"{row} at {length}"]["length, evaluation"],
                *(study["overview"][f"{row} at {length}"].get(name, []) for name in BOUNDS),
                study["losses"][f"{row} at {length}"]["broken pictures ↓"][:3],
            ]
            for row in RELAXATIONS
        }
        for length in LENGTHS
    }


def bound(axes: Axes, shown: Points, which: int) -> None:
    """A bound against the accepted length; those of LANTERN and GSD's KL are infinite."""
    for row, (_, colour) in RELAXATIONS.items():
        found = [shown[length][row] for length in LENGTHS]
        if not found[0][which]:
            continue
        lengths = [length for ((length,), *_) in found]
        bounds = [values[which][0] for values in found]
        axes.plot(lengths, bounds, color=colour, linewidth=1.2)
        for x, y, marker in zip(lengths, bounds, LENGTHS.values(), strict=True):
            axes.plot(x, y, marker, color=colour, markersize=6)
    axes.set(xlabel="tokens per round")


def broken(axes: Axes, shown: Points) -> None:
    """Share of broken pictures minus that of plain autoregression, in percent."""
    for place, (row, (_, colour)) in enumerate(RELAXATIONS.items()):
        for offset, (length, marker) in zip((-0.16, 0.16), LENGTHS.items(), strict=True):
            value, low, high = (100 * number for number in shown[length][row][-1])
            arms = [[value - low], [high - value]]
            y = [place + offset]
            axes.errorbar([value], y, xerr=arms, fmt=marker, color=colour, elinewidth=1.2)
    axes.set_yticks(range(len(RELAXATIONS)), [name for name, _ in RELAXATIONS.values()])
    axes.invert_yaxis()
    axes.axvline(0, color="#737b86", linestyle="--", linewidth=1)
    axes.set(xlabel="broken pictures, %\nmore than with plain autoregression")


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    found = points()
    tv, kl, right = figure.subplots(1, 3)
    bound(tv, found, 1)
    tv.set(ylabel="summed TV bound of an image")
    bound(kl, found, 2)
    kl.set(ylabel="KL bound per token, nats")
    broken(right, found)
    for axes in (tv, kl, right):
        axes.spines[["top", "right"]].set_visible(False)
    for length, marker in LENGTHS.items():
        tv.plot([], [], marker, color="#737b86", label=f"matched to {length}")
    tv.legend(loc="upper left", frameon=False)
    figure.savefig(DOCS / "study.png", dpi=110, metadata={"Description": json.dumps(found)})


if __name__ == "__main__":
    with style.context(DOCS / "pictures.mplstyle"):
        main()
