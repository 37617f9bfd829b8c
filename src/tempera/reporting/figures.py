"""Figures of a run: grids of pictures with captions, and where and how often drafts are kept."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tempera.reporting.finished_run import Run
from tempera.reporting.pareto import COLOURS
from tempera.runtime.files import replacing
from tempera.runtime.image_files import Picture

COLUMNS = 6
PAPER = "#fbfbfa"
INK = "#1c1c20"
SOFT = "#5d5d66"
BROKEN = "#d00000"
"""Colours of report.html in the light, opaque: they read wherever a picture is shown."""
STYLE: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLOURS),
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "font.size": 9,
    "image.cmap": "cividis",
    "text.parse_math": False,
    "text.usetex": False,
}
"""Of all figures here. Every text is shown as it is: a user's is no mathematics, whatever signs it
has.
"""


@rc_context(STYLE)
def grid(
    path: Path,
    title: str,
    pictures: Sequence[Picture],
    captions: Sequence[str],
    broken: Sequence[bool],
) -> None:
    """Write a titled grid of pictures (uint8 [3, H, W]), each below its caption; broken ones stand
    in a frame.
    """
    columns = min(COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = _figure(max(4, 1.6 * columns), 0.6 + 2 * rows, title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels:
        panel.set(xticks=[], yticks=[])
        panel.set_axis_off()
    for panel, picture, caption, marked in zip(panels, pictures, captions, broken, strict=False):
        panel.imshow(picture.transpose(1, 2, 0))
        if marked:
            panel.set_axis_on()
            panel.spines[:].set(visible=True, color=BROKEN, linewidth=3)
            caption = f"broken: {caption}"
        caption = textwrap.fill(caption, 26, max_lines=3, placeholder="…")
        panel.set_title(caption, size=8, color=SOFT)
    save(path, figure)


@rc_context(STYLE)
def acceptance(path: Path, title: str, run: Run) -> None:
    """Write where in the image tokens were accepted drafts, and if anything was drafted: how often
    by depth, how long rounds are, and which of them save passes of the target (a round of n tokens
    saves n − 1; SJD-PAC, Figure 1). Also the means of the rule's own figures at each place, such as
    the size of proximity sets (LANTERN, Figure 7). The tokens of a preview have no place in the
    image.
    """
    maps = {"Accepted drafts, share of images": run.acceptance_by_place}
    for name, profile in run.figures_by_place.items():
        maps[name.capitalize()] = profile
    bars: dict[tuple[str, str], NDArray[np.float64]] = {}
    if run.acceptance_by_depth:
        rounds = np.array(run.rounds_by_tokens, np.float64)
        saved = rounds * np.arange(len(rounds))
        rates = np.array(run.acceptance_by_depth, np.float64)
        tokens = "tokens of the round"
        bars["Accepted ÷ tested drafts", "depth of the draft"] = rates
        bars["Share of all rounds", tokens] = rounds
        bars["Share of all saved passes", tokens] = saved / max(saved.sum(), 1e-9)
    count = len(maps) + len(bars)
    columns = min(count, 2)
    figure = _figure(4.8 * columns, 0.4 + 3.6 * -(-count // columns), title)
    panels = list(figure.subplots(-(-count // columns), columns, squeeze=False).flatten())
    for name, profile in maps.items():
        panel = panels.pop(0)
        cells = run.on_grid(profile)
        rows, columns = cells.shape
        from_one = (0.5, columns + 0.5, rows + 0.5, 0.5)  # as report.html counts them
        shown = panel.imshow(cells, vmin=0, extent=from_one)
        panel.set(title=name, xlabel="column of the image", ylabel="row of the image")
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        figure.colorbar(shown, ax=panel)
    for (name, across), values in bars.items():
        panel = panels.pop(0)
        panel.bar(range(1, 1 + len(values)), values)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel.set(title=name, xlabel=across)
    for panel in panels:
        panel.set_axis_off()
    save(path, figure)


def _figure(width: float, height: float, title: str) -> Figure:
    """A titled figure of this size in inches, independent of pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, int(10 * width))), x=0.01, ha="left", size=11)
    return figure


def save(path: Path, figure: Figure) -> None:
    """Write a PNG atomically. Letters that the font lacks become boxes, which is told once. Equal
    figures give equal files.
    """
    with replacing(path) as temporary, warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Glyph")
        figure.savefig(temporary, format="png", metadata={"Software": None})
    if any(str(one.message).startswith("Glyph") for one in caught):
        print(f"{path} shows boxes in place of letters that matplotlib's font does not have.")
