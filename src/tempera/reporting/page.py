"""report.html: runs on one self-contained page, which needs no network and no server.

The page is page.html with its style, script, tables and, for several runs, the Vega chart inlined,
and one JSON object that holds the runs, pictures and replays. Integer arrays are packed (`packed`).
"""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
from PIL import Image

from tempera.decoding.replay import COLUMNS, REPLAYS
from tempera.errors import TemperaError, misfit
from tempera.metrics import table
from tempera.reporting import pareto, tables
from tempera.reporting.baseline import same_draws
from tempera.reporting.collect import Run, results
from tempera.reporting.tables import Section
from tempera.runtime.files import write_text
from tempera.runtime.image_files import Picture, picture_path, read_picture
from tempera.runtime.row_store import Row, Store

SHOWN = 24
"""The page shows the pictures of this many prompts of each run, its first ones."""
PICTURE_BUDGET, REPLAY_BUDGET = 6_000_000, 3_000_000
"""Characters for pictures and for replays; they keep the whole page below 11 MB."""
SCALE, LEAST = 1000, -65.535
"""Log-probabilities are packed as thousandths of a nat, and clipped below at `LEAST`."""
ENCODINGS = ((None, 100), (512, 80), (256, 80), (128, 75), (64, 60), (32, 10))
"""Longest edge in pixels and quality of WebP, from the best to the smallest; 100 is lossless."""
LOSSLESS_PIXELS = 128 * 128
"""Pictures with more pixels are never stored losslessly."""


def write(
    path: Path, runs: Sequence[Run], sections: Sequence[Section], cautions: Sequence[str] = ()
) -> None:
    """Write the page.

    Args:
        sections: below pictures and chart.
        cautions: what a reader must know before comparing.
    """
    here = Path(__file__)
    data, problems = page_data(runs)
    lines = [f"<li>{html.escape(one)}</li>" for one in (*cautions, *problems)]
    script = ""
    if data["chart"]:
        import vl_convert

        script = f"<script>{vl_convert.javascript_bundle()}</script>"  # type: ignore[call-arg]
    parts = {
        "title": html.escape(f"tempera: {_title(runs)}"),
        "style": here.with_suffix(".css").read_text(encoding="utf-8"),
        "cautions": f'<ul id="cautions">{"".join(lines)}</ul>' if lines else "",
        "tables": "\n".join(map(_section, sections)),
        "vega": script,
        "script": here.with_name("replay.js").read_text(encoding="utf-8"),
        "data": _embedded(data),
    }
    first, *rest = here.with_suffix(".html").read_text(encoding="utf-8").split("{{")
    filled = [parts[name] + text for name, text in (one.split("}}", 1) for one in rest)]
    write_text(path, "".join([first, *filled]))


def _section(section: Section) -> str:
    notes = "".join(f'<p class="hint">{html.escape(note)}</p>' for note in section.notes)
    text = f'<p class="hint">{html.escape(section.text)}</p>' if section.text else ""
    head = f"<h2>{html.escape(section.title)}</h2>"
    return f"<section>{head}{text}{tables.page(section.table)}{notes}</section>"


def _embedded(value: object) -> str:
    """JSON that is safe inside a script element, whatever its strings contain."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    """The data that the page's script shows, and sentences about what is left out."""
    problems: list[str] = []
    stored = [_stored(run, problems) for run in runs]
    count = sum(len(run.texts) for run in runs)
    size = sum(len(json.dumps(packed_replay(one, None))) for rows in stored for one in rows[:1])
    kept = min(SHOWN, REPLAY_BUDGET // max(size, 1))
    if any(len(rows) > kept for rows in stored):
        problems.append(f"Replays of the first {kept} prompts only, to keep the page small.")
    numbers: dict[str, int] = {}
    shown = []
    for run, rows in zip(runs, stored, strict=True):
        replays = {row["id"]: row for row in rows[:kept]}
        prompts = []
        for name, text in _first(run):
            prompt: dict[str, Any] = {"id": name, "text": text, "picture": None, "replay": None}
            size_of = None
            try:
                picture = read_picture(picture_path(Path(run.directory), name))
                address = _address(picture, PICTURE_BUDGET // min(count, SHOWN * len(runs)))
                prompt["picture"] = numbers.setdefault(address, len(numbers))
                size_of = picture.shape[1:]
            except TemperaError as problem:
                problems.append(f"Not shown: {problem}")
            if name in replays:
                prompt["replay"] = packed_replay(replays[name], size_of)
            prompts.append(prompt | {"length": _length(run, name)})
        shown.append(_run(run, runs) | {"prompts": prompts})
    metrics = [
        {"key": metric.key, "heading": metric.heading}
        for metric in table.report_order()
        if any(np.isfinite(run.value(metric.key)) for run in runs)
    ]
    chart = None
    if len(runs) > 1 and metrics:
        names = pareto.families(results(runs))
        chart = pareto.chart(alt.NamedData("runs"), "@x", "@y", names, "container", 400).to_dict()
    data = {"metrics": metrics, "chart": chart, "runs": shown, "pictures": list(numbers)}
    return data, problems


def _run(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """A run's names and metrics, and the place of the plain run beside which its pictures stand."""
    beside = (
        place
        for place, other in enumerate(runs)
        if other is not run and other.plain and same_draws(other, run)
    )
    names = ("name", "family", "plain", "model", "delta", "seed", "images")
    ends = ("value", "low", "high")
    return {
        **{name: getattr(run, name) for name in names},
        "metrics": {
            key: [_finite(one.get(end)) for end in ends] for key, one in run.metrics.items()
        },
        "reference": next(beside, None),
    }


def _length(run: Run, name: str) -> float | None:
    """The accepted length of one image."""
    known = "accepted_length" in run.values
    return _finite(round(float(run.values.loc[name, "accepted_length"]), 3)) if known else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _stored(run: Run, problems: list[str]) -> list[Row]:
    """The replays of the prompts that a run shows."""
    try:
        rows = Store(Path(run.directory) / REPLAYS, COLUMNS).rows()
        found = [rows[name] for name, _ in _first(run) if name in rows]
        for row in found:
            packed_replay(row, None)
    except (TemperaError, KeyError, TypeError, ValueError, OverflowError) as problem:
        why = problem if isinstance(problem, TemperaError) else misfit(problem)
        problems.append(f"Replays of {run.directory} left out: {why}")
        return []
    return found


def packed(values: Sequence[int]) -> str:
    """Pack non-negative integers: their width in bytes (1, 2 or 4), a colon, and base64 of the
    little-endian array. [1, 2] in two bytes each is `2:AQACAA==`.
    """
    largest = max(values, default=0)
    width = 1 if largest < 2**8 else 2 if largest < 2**16 else 4
    numbers = np.array(values, np.int64).astype(f"<u{width}")
    return f"{width}:" + base64.b64encode(numbers.tobytes()).decode("ascii")


PACKED = ("place", "origin", "nodes", "proposed", "order", "tokens", "drafted", "fate")


def packed_replay(replay: Row, size: tuple[int, ...] | None) -> dict[str, Any]:
    """A row of `tempera.decoding.replay.replays` for the page. Of continuous tokens there are
    neither ids nor probabilities.

    Args:
        replay: the row.
        size: height and width of the picture. Its proportions show whether the last column of
            tokens has no pixels (line ends).
    """
    result: dict[str, Any] = {name: replay[name] for name in ("rows", "columns")}
    result["blank"] = blank_columns(replay, size)
    result |= {name: packed(replay[name]) for name in PACKED if replay.get(name)}
    if replay.get("drafted"):
        result["parent"] = packed([1 + parent for parent in replay["parent"]])
    if "tokens" in replay:
        logprobs = [LEAST if one is None else min(max(one, LEAST), 0) for one in replay["logprob"]]
        result["logprob"] = packed([round(-SCALE * one) for one in logprobs])
    return result


def blank_columns(replay: Row, size: tuple[int, ...] | None) -> int:
    """Token columns at the right that have no pixels: 1 if lines end with a token, else 0."""
    if size is None:
        return 0
    return int(round(size[1] * replay["rows"] / size[0]) == replay["columns"] - 1)


def _address(picture: Picture, room: int) -> str:
    """A picture as a `data:` URL, in the best encoding that takes no more than `room` characters,
    or in the smallest.
    """
    large = picture[0].size > LOSSLESS_PIXELS
    for edge, quality in ENCODINGS[large:]:
        image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
        if edge is not None:
            image.thumbnail((edge, edge), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "WEBP", lossless=quality == 100, quality=quality)
        text = base64.b64encode(file.getvalue()).decode("ascii")
        if len(text) <= room:
            break
    return f"data:image/webp;base64,{text}"


def _first(run: Run) -> list[tuple[str, str]]:
    """Ids and texts of the prompts that a run shows."""
    return list(run.texts.items())[:SHOWN]


def _title(runs: Sequence[Run]) -> str:
    models = ", ".join(dict.fromkeys(str(run.model) for run in runs))
    shown = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"{shown} on {models}" if models else shown
