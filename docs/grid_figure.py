"""The same prompts and seeds under several methods: docs/grid.png and docs/grid_continuous.png.

python docs/grid_figure.py

Pictures are those of `python docs/results/make.py runs`, accepted lengths of results.json.
"""

import runpy
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.image import imread

from tempera.reporting.collect import read_run
from tempera.runtime.image_files import picture_path

DOCS = Path(__file__).parent
SHOWN = {
    "grid.png": [
        "ar",
        "eagle",
        "block",
        "coolsd delta=2",
        "optimal_rsd schedule=optimal expected_length=3.8",
        "lantern",
    ],
    "grid_continuous.png": [
        "mar ar",
        "mar ar steps=6",
        "mar cspd gamma=4",
        "mar cspd_published gamma=4",
        "mar cspd_exact gamma=2",
    ],
}
PICTURES = 6


def draw(file: str, rows: list[str], make: dict[str, Any]) -> None:
    """Write one grid: a line for each row, a column for each of the first prompts."""
    known = make["numbers"](make["read"]())
    runs = {row: read_run(make["metrics"](row).parent) for row in rows}
    texts = dict(list(runs[rows[0]].texts.items())[:PICTURES])
    figure = Figure(figsize=(1.45 * PICTURES + 2.1, 1.35 * len(rows) + 0.7), layout="constrained")
    panels = figure.subplots(len(rows), PICTURES)
    for line, (row, run) in zip(panels, runs.items(), strict=True):
        for panel, name in zip(line, texts, strict=True):
            panel.imshow(imread(picture_path(Path(run.directory), name)))
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        label = textwrap.fill(row.removeprefix("mar "), 20, break_on_hyphens=False)
        length = f"{known[row].accepted_length:.2f} tokens per round"
        line[0].set_ylabel(f"{label}\n{length}", rotation=0, ha="right", va="center", labelpad=8)
    for panel, text in zip(panels[0], texts.values(), strict=True):
        panel.set_title(textwrap.fill(text, 20), size=9)
    figure.savefig(DOCS / file, dpi=110)


if __name__ == "__main__":
    made = runpy.run_path(str(DOCS / "results" / "make.py"))
    for file, rows in SHOWN.items():
        draw(file, rows, made)
