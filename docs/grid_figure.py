"""The same prompts and seeds under several methods: docs/grid.png and docs/grid_continuous.png.

python docs/grid_figure.py

Pictures are those of `experiment=results` and `experiment=results_mar`, accepted lengths of
results.json. The description of each grid holds its labels.
"""

import json
import textwrap
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.image import imread
from results import collect

from tempera.reporting.collect import read_run
from tempera.runtime.image_files import picture_path

DOCS = Path(__file__).parent
SHOWN = {
    "grid.png": [
        "ar",
        "eagle",
        "parallel_block",
        "coolsd delta=2",
        "optimal_rsd schedule=optimal expected_length=3.4",
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
PICTURES = 5
TEXT = 11
"""Points; a page shows about two thirds of the size."""


def labels(file: str) -> dict[str, str]:
    """The accepted length beside each row of a grid."""
    rows = collect.read()["rows"]
    return {row: f"{rows[row]['accepted_length'][0]:.2f} tokens per round" for row in SHOWN[file]}


def draw(file: str) -> None:
    """Write one grid: a line for each row, a column for each of the first prompts."""
    shown = labels(file)
    directories = collect.directories(*collect.RUNS)
    runs = {row: read_run(directories[row]) for row in shown}
    first = next(iter(runs.values()))
    texts = dict(list(first.texts.items())[:PICTURES])
    figure = Figure(figsize=(1.5 * PICTURES + 2.1, 1.45 * len(runs) + 0.9), layout="constrained")
    panels = figure.subplots(len(runs), PICTURES)
    for line, (row, run) in zip(panels, runs.items(), strict=True):
        for panel, name in zip(line, texts, strict=True):
            panel.imshow(imread(picture_path(Path(run.directory), name)))
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
        method = textwrap.fill(row.removeprefix("mar "), 20, break_on_hyphens=False)
        label = f"{method}\n{shown[row]}"
        line[0].set_ylabel(label, size=TEXT, rotation=0, ha="right", va="center", labelpad=8)
    for panel, text in zip(panels[0], texts.values(), strict=True):
        panel.set_title(textwrap.fill(text, 18), size=TEXT)
    figure.savefig(DOCS / file, dpi=110, metadata={"Description": json.dumps(shown)})


if __name__ == "__main__":
    with style.context(DOCS / "pictures.mplstyle"):
        for file in SHOWN:
            draw(file)
