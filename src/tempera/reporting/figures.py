"""Figures of one run: the grid of pictures with captions, and maps of its accepted tokens."""

import textwrap
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tempera.runtime.files import replacing

INK, PAPER, MUTED = (26, 26, 30), (255, 255, 255), (110, 110, 118)
KEPT, DRAWN = (27, 94, 42), (178, 223, 165)
COLUMNS, TILE, GAP, LINE = 6, 192, 12, 17


def grid(
    path: Path,
    title: str,
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    columns: int = COLUMNS,
) -> None:
    """Write a titled grid of pictures (uint8 [3, H, W]), each above its caption."""
    columns = max(1, min(columns, len(pictures)))
    body, head = font(13), font(18)
    width = GAP + columns * (TILE + GAP)
    texts = [wrap(caption, body, TILE) for caption in captions]
    heights = [
        max(len(text) for text in texts[first : first + columns]) * LINE + 8
        for first in range(0, len(texts), columns)
    ]
    lines = wrap(title, head, width - 2 * GAP)
    top = GAP + 26 * len(lines) + 6
    page = Image.new("RGB", (width, top + sum(TILE + height + GAP for height in heights)), PAPER)
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        draw.text((GAP, GAP - 4 + 26 * number), line, INK, head)
    for place, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        row, column = divmod(place, columns)
        x, y = (
            GAP + column * (TILE + GAP),
            top + sum(TILE + height + GAP for height in heights[:row]),
        )
        page.paste(enlarged(picture, TILE), (x, y))
        for number, line in enumerate(text):
            draw.text((x, y + TILE + 5 + LINE * number), line, MUTED, body)
    save_image(path, page)


def comparison(
    path: Path,
    labels: Sequence[str],
    notes: Sequence[str],
    pictures: Sequence[Sequence[NDArray[np.uint8]]],
    captions: Sequence[str],
) -> None:
    """Write one row of images per label, with a note below each label and a caption above each
    column.
    """
    edge, margin = 128, 190
    body, head = font(12), font(14)
    texts = [wrap(caption, body, edge, most=5) for caption in captions]
    top = GAP + max(len(text) for text in texts) * 15 + 6
    page = Image.new(
        "RGB",
        (margin + len(captions) * (edge + GAP) + GAP, top + len(labels) * (edge + GAP)),
        PAPER,
    )
    draw = ImageDraw.Draw(page)
    for column, text in enumerate(texts):
        for number, line in enumerate(text):
            draw.text((margin + column * (edge + GAP), GAP + 15 * number), line, MUTED, body)
    for row, (label, note) in enumerate(zip(labels, notes, strict=True)):
        y = top + row * (edge + GAP)
        name = wrap(label, head, margin - 2 * GAP)
        for number, line in enumerate(name):
            draw.text((GAP, y + 34 + 18 * number), line, INK, head)
        for number, line in enumerate(wrap(note, body, margin - 2 * GAP)):
            draw.text((GAP, y + 40 + 18 * len(name) + 15 * number), line, MUTED, body)
        for column, picture in enumerate(pictures[row]):
            page.paste(enlarged(picture, edge), (margin + column * (edge + GAP), y))
    save_image(path, page)


def enlarged(picture: NDArray[np.uint8], size: int) -> Image.Image:
    """A picture (uint8 [3, H, W]) resized to a square of `size` pixels. Whole-number enlargements
    keep sharp pixels; other sizes are smoothed.
    """
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    smooth = image.width > size or size % image.width
    return image.resize(
        (size, size), Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
    )


def font(size: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's DejaVu Sans; unlike Pillow's default font it has Greek letters and signs."""
    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size
    )


def wrap(text: str, face: ImageFont.FreeTypeFont, width: int, most: int = 4) -> list[str]:
    """Break text into at most `most` lines of at most `width` pixels; an ellipsis replaces what
    does not fit. The time depends on the number of lines, not on the length of the text.
    """
    words, lines, place = text.split(), list[str](), 0
    while place < len(words) and len(lines) < most - 1:
        end = place + 1
        while end < len(words) and _fits(" ".join(words[place : end + 1]), face, width):
            end += 1
        lines.append(" ".join(words[place:end]))
        place = end
    if place < len(words):
        lines.append(" ".join(words[place : place + LONGEST * width]))
    return [_clip(line, face, width) for line in lines] or [""]


LONGEST = 4
"""Most characters per pixel of a line; it bounds the work on characters that have no width."""


def _fits(line: str, face: ImageFont.FreeTypeFont, width: int) -> bool:
    return len(line) <= LONGEST * width and face.getlength(line) <= width


def _clip(line: str, face: ImageFont.FreeTypeFont, width: int) -> str:
    if _fits(line, face, width):
        return line
    line = line[: LONGEST * width]
    ends = range(len(line) + 1)
    fitting = bisect_left(ends, True, key=lambda end: face.getlength(f"{line[:end]}…") > width)
    return line[: max(fitting - 1, 0)].rstrip() + "…"


def acceptance_map(path: Path, title: str, result: Mapping[str, Any]) -> None:
    """Write a map of where in the image tokens were accepted drafts (mean over prompts), beside
    the acceptance rate at each depth.

    Args:
        result: the content of metrics.json.
    """
    share = np.array(result["acceptance_by_place"]).reshape(result["grid"])
    by_depth = result["acceptance_by_depth"]
    figure = new_figure(9.6, 4.4)
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=10, x=0.01, ha="left")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    shown = left.imshow(share, vmin=0, vmax=1, cmap="viridis")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    left.set(
        title="Tokens that were accepted drafts",
        xlabel="column of the image",
        ylabel="row of the image",
    )
    figure.colorbar(shown, ax=left, label="share of images", fraction=0.046, pad=0.03)
    right.set(title="Acceptance by depth of the draft", ylim=(0, 1.08), ylabel="accepted ÷ tested")
    if by_depth:
        rates = [rate or 0.0 for rate in by_depth]
        bars = right.bar(range(1, len(rates) + 1), rates, color="#3b6ea5", width=0.7)
        if len(rates) <= 10:
            texts = ["–" if rate is None else f"{rate:.2f}" for rate in by_depth]
            right.bar_label(bars, texts, padding=2, fontsize=9)
        right.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        right.set_xlabel("depth")
    else:
        right.text(
            0.5,
            0.5,
            "nothing is drafted",
            ha="center",
            va="center",
            color="gray",
            transform=right.transAxes,
        )
        right.set_xticks([])
    right.spines[["top", "right"]].set_visible(False)
    save_figure(path, figure)


def proximity_map(
    path: Path, title: str, sizes: Sequence[float | None], shape: tuple[int, int]
) -> None:
    """Write the mean size of LANTERN's proximity set at each place of the image (its Figure 7).

    Args:
        sizes: [T] by place in the image; None where nothing was tested.
        shape: rows and columns of the token grid.
    """
    figure = new_figure(5.4, 4.6)
    figure.suptitle("\n".join(textwrap.wrap(title, 70)), fontsize=10, x=0.01, ha="left")
    panel = figure.subplots()
    shown = panel.imshow(np.array(sizes, np.float64).reshape(shape), cmap="viridis")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set(xlabel="column of the image", ylabel="row of the image")
    figure.colorbar(shown, ax=panel, label="codes in the proximity set", fraction=0.046, pad=0.03)
    save_figure(path, figure)


def accepted(
    path: Path,
    title: str,
    pictures: Sequence[NDArray[np.uint8]],
    rows: Sequence[Mapping[str, Any]],
    shape: tuple[int, int],
) -> None:
    """Write the first pictures (uint8 [3, H, W]) above maps of their tokens: accepted drafts in
    dark green, the other tokens in light green.

    Args:
        rows: the pictures' records with `depth` [T], by place in the image.
        shape: rows and columns of the token grid.
    """
    kept = np.array([row["depth"] for row in rows[:COLUMNS]])[..., None] > 0
    colours = (
        np.where(kept, KEPT, DRAWN).astype(np.uint8).reshape(-1, *shape, 3).transpose(0, 3, 1, 2)
    )
    shares = [f"{share:.0%} accepted drafts" for share in kept.mean((1, 2))]
    texts = [str(row["text"]) for row in rows[:COLUMNS]]
    grid(path, title, [*pictures[: len(kept)], *colours], [*texts, *shares], len(kept))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, independent of pyplot's global state."""
    figure = Figure(
        figsize=(width, height), dpi=130, layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06)
    )
    FigureCanvasAgg(figure)
    return figure


def save_figure(path: Path, figure: Figure) -> None:
    """Write a PNG atomically; equal figures give equal files."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def save_image(path: Path, image: Image.Image) -> None:
    """Write a PNG atomically."""
    with replacing(path) as temporary:
        image.save(temporary, format="PNG")
