"""Figures of a run: grids of pictures with captions, and maps of its accepted tokens."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tempera.runtime.files import replacing

KEPT, DRAWN = (27, 94, 42), (178, 223, 165)
COLUMNS = 6


def grid(
    path: Path,
    title: str,
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    columns: int = COLUMNS,
) -> None:
    """Write a titled grid of pictures (uint8 [3, H, W]), each below its caption."""
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = _figure(max(4, 1.6 * columns), 0.6 + 2 * rows, title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels:
        panel.set_axis_off()
    for panel, picture, caption in zip(panels, pictures, captions, strict=False):
        panel.imshow(picture.transpose(1, 2, 0))
        panel.set_title(textwrap.fill(caption, 26, max_lines=3, placeholder="…"), size=7)
    _save(path, figure)


def acceptance_map(path: Path, title: str, result: Mapping[str, Any]) -> None:
    """Write a map of where in the image tokens were accepted drafts (mean over prompts), beside
    the acceptance rate at each depth.

    Args:
        result: the content of metrics.json.
    """
    figure = _figure(9.6, 4.4, title)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    share = np.array(result["acceptance_by_place"]).reshape(result["grid"])
    _map(left, share, "share of images", vmin=0, vmax=1)
    left.set_title("Tokens that were accepted drafts")
    rates = result["acceptance_by_depth"]
    bars = right.bar(range(1, len(rates) + 1), [rate or 0.0 for rate in rates], color="#3b6ea5")
    if len(rates) <= 10:
        right.bar_label(bars, ["–" if rate is None else f"{rate:.2f}" for rate in rates], padding=2)
    right.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    name = "Acceptance by depth of the draft" if rates else "Nothing is drafted"
    right.set(title=name, ylim=(0, 1.08), xlabel="depth", ylabel="accepted ÷ tested")
    _save(path, figure)


def accepted_lengths(path: Path, title: str, rounds: Sequence[float | None]) -> None:
    """Write how long rounds are, and how much of the speed-up those of each length bring: a round
    of n tokens saves n − 1 passes (SJD-PAC, Figure 1).

    Args:
        rounds: share of the rounds with 1, 2, … tokens.
    """
    figure = _figure(9.6, 3.6, title)
    shares = np.trim_zeros(np.array(rounds, np.float64), "b")
    tokens = np.arange(1, 1 + len(shares))
    saved = shares * (tokens - 1)
    panels = {"Rounds by tokens": shares, "Passes that they save": saved / max(saved.sum(), 1e-9)}
    for panel, (name, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        panel.bar(tokens, values, color="#3b6ea5")
        panel.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        panel.set(title=name, xlabel="tokens of a round", ylabel="share")
    _save(path, figure)


def proximity_map(
    path: Path, title: str, sizes: Sequence[float | None], shape: Sequence[int]
) -> None:
    """Write the mean size of LANTERN's proximity set at each place of the image (its Figure 7).

    Args:
        sizes: [T] by place in the image; None where nothing was tested.
        shape: rows and columns of the token grid.
    """
    figure = _figure(5.4, 4.6, title)
    values = np.array(sizes, np.float64).reshape(shape)
    _map(figure.subplots(), values, "codes in the proximity set")
    _save(path, figure)


def accepted(
    path: Path,
    title: str,
    pictures: Sequence[NDArray[np.uint8]],
    rows: Sequence[Mapping[str, Any]],
    shape: Sequence[int],
) -> None:
    """Write the first pictures (uint8 [3, H, W]) above maps of their tokens: accepted drafts in
    dark green, the other tokens in light green.

    Args:
        rows: the pictures' records with `depth` [T], by place in the image.
        shape: rows and columns of the token grid.
    """
    first = rows[:COLUMNS]
    kept = np.array([row["depth"] for row in first]).reshape(-1, 1, *shape) > 0
    colours = np.where(kept, *(np.array(one).reshape(3, 1, 1) for one in (KEPT, DRAWN)))
    shares = [f"{share:.0%} accepted drafts" for share in kept.mean((1, 2, 3))]
    captions = [*(str(row["text"]) for row in first), *shares]
    grid(path, title, [*pictures[: len(first)], *colours.astype(np.uint8)], captions, len(first))


def _map(panel: Axes, values: NDArray[np.float64], label: str, **limits: Any) -> None:
    shown = panel.imshow(values, cmap="viridis", **limits)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set(xlabel="column of the image", ylabel="row of the image")
    panel.figure.colorbar(shown, ax=panel, label=label, fraction=0.046, pad=0.03)


def _figure(width: float, height: float, title: str) -> Figure:
    """A titled figure of this size in inches, independent of pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, int(11 * width))), x=0.01, ha="left", size=10)
    return figure


def _save(path: Path, figure: Figure) -> None:
    """Write a PNG atomically; equal figures give equal files."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
