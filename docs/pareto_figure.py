"""What relaxation buys and costs: docs/pareto.png, from the table of docs/results/discrete.md.

python docs/pareto_figure.py
"""

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
SERIES = {  # by the run's options without δ: label, colour, and points above or below the label
    "method=uniform_rsd": ("uniform", "#0072B2", -14),
    "method=coolsd": ("Cool-SD", "#D55E00", -14),
    "method=coolsd floor=1": ("Cool-SD, floor", "#CC79A7", 6),
    "method=optimal_rsd price=1": ("KL-optimal", "#009E73", 6),
    "method=lanternpp": ("LANTERN++", "#666666", -4),
    "method=lantern": ("LANTERN", "#000000", 6),
}
PANELS = {"attribute accuracy ↑": (0.97, 1.0), "KL bound per token ↓": (0.0, 0.1)}
Row = dict[str, str]


def table() -> list[Row]:
    """The rows of the page's first table, by heading."""
    lines = (DOCS / "results" / "discrete.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [dict(zip(cells[0], row, strict=True)) for row in cells if row[0].startswith("`method=")
            and len(row) == len(cells[0])]  # fmt: skip


def number(cell: str) -> float | None:
    """The value of a cell; None for "infinite" and "–"."""
    found = re.match(r"-?[\d.]+", cell)
    return float(found[0]) if found else None


def draw(axes: Axes, rows: list[Row], column: str) -> None:
    """One panel: the series, labelled where they end, and plain autoregression as a line."""
    for name, (label, colour, height) in SERIES.items():
        points = []
        for row in rows:
            options = row["run"].strip("`")
            length, value = number(row["accepted length"]), number(row[column])
            if re.sub(r" delta=\S+", "", options) == name and None not in (length, value):
                points.append((length, value))
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=5)
            left = label.startswith("Cool-SD") and column.startswith("KL")
            axes.annotate(
                label,
                points[-1],
                xytext=(-8, 4) if left else (6, height),
                textcoords="offset points",
                ha="right" if left else "left",
                color=colour,
            )
    plain = number(rows[0][column]) or 0.0
    axes.axhline(plain, color="grey", linestyle="--", linewidth=1)
    axes.annotate("plain autoregression", (4.5, plain), xytext=(0, 4),
                  textcoords="offset points", color="grey")  # fmt: skip
    axes.set(xlabel="accepted length (tokens per round)", ylabel=column, ylim=PANELS[column],
             xlim=(2.95, 5.1))  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), PANELS, strict=True):
        draw(axes, table(), column)
    figure.savefig(DOCS / "pareto.png", dpi=110)


if __name__ == "__main__":
    main()
