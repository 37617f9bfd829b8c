"""report.html: runs on one self-contained page, which needs no network and no server.

The page is page.html with its style, script, tables and, for several runs, the Vega chart inlined,
and one JSON object that holds the runs, pictures and replays. Integer arrays are packed (`packed`).
"""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
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
    pictures, unreadable = _pictures(runs)
    replays, left_out = _replays(runs, pictures)
    addresses = _addresses(list(pictures.values()))
    numbers = {address: number for number, address in enumerate(dict.fromkeys(addresses))}
    place_of = {key: numbers[one] for key, one in zip(pictures, addresses, strict=True)}
    shown = [
        {"key": metric.key, "heading": metric.heading}
        for metric in table.report_order()
        if any(np.isfinite(run.value(metric.key)) for run in runs)
    ]
    names = pareto.families(results(runs))
    chart = pareto.chart(alt.NamedData("runs"), "@x", "@y", names, "container", 400)
    data = {
        "metrics": shown,
        "chart": chart.to_dict() if len(runs) > 1 and shown else None,
        "runs": [_run(place, runs, place_of, replays) for place in range(len(runs))],
        "pictures": list(numbers),
    }
    return data, [*unreadable, *left_out]


def _run(
    place: int,
    runs: Sequence[Run],
    pictures: Mapping[tuple[int, str], int],
    replays: Mapping[tuple[int, str], Any],
) -> dict[str, Any]:
    """A run's names and metrics, its prompts, and the place of the plain run beside which its
    pictures stand.
    """
    run = runs[place]
    beside = [
        number
        for number, other in enumerate(runs)
        if other is not run and other.plain and same_draws(other, run)
    ]
    return {
        **{name: getattr(run, name) for name in ("name", "family", "plain", "model", "delta")},
        **{name: getattr(run, name) for name in ("seed", "images")},
        "metrics": {
            key: [_finite(one.get(end)) for end in ("value", "low", "high")]
            for key, one in run.metrics.items()
        },
        "reference": beside[0] if beside else None,
        "prompts": [
            {
                "id": name,
                "text": text,
                "picture": pictures.get((place, name)),
                "length": _length(run, name),
                "replay": replays.get((place, name)),
            }
            for name, text in _first(run)
        ],
    }


def _length(run: Run, name: str) -> float | None:
    """The accepted length of one image."""
    if "accepted_length" not in run.values:
        return None
    return _finite(round(float(run.values.loc[name, "accepted_length"]), 3))


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def packed(values: Sequence[int]) -> str:
    """Pack non-negative integers: their width in bytes (1, 2 or 4), a colon, and base64 of the
    little-endian array. [1, 2] in two bytes each is `2:AQACAA==`.
    """
    largest = max(values, default=0)
    width = 1 if largest < 2**8 else 2 if largest < 2**16 else 4
    numbers = np.array(values, np.int64).astype(f"<u{width}")
    return f"{width}:" + base64.b64encode(numbers.tobytes()).decode("ascii")


PACKED = ("place", "origin", "nodes", "proposed", "order", "tokens", "drafted", "fate")


def packed_replay(replay: Row, size: tuple[int, int] | None) -> dict[str, Any]:
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


def blank_columns(replay: Row, size: tuple[int, int] | None) -> int:
    """Token columns at the right that have no pixels: 1 if lines end with a token, else 0."""
    if size is None:
        return 0
    return int(round(size[1] * replay["rows"] / size[0]) == replay["columns"] - 1)


def _pictures(runs: Sequence[Run]) -> tuple[dict[tuple[int, str], Picture], list[str]]:
    """The pictures by (place of the run, prompt id), and a sentence about each unreadable one."""
    found: dict[tuple[int, str], Picture] = {}
    problems = []
    for place, run in enumerate(runs):
        for name, _ in _first(run):
            try:
                found[place, name] = read_picture(picture_path(Path(run.directory), name))
            except TemperaError as problem:
                problems.append(f"Not shown: {problem}")
    return found, problems


def _addresses(pictures: Sequence[Picture]) -> list[str]:
    """Each picture as a `data:` URL, all in the best encoding in which they seem, judged by a few
    of them, to fit the budget. Equal pictures count once.
    """
    distinct = {(one.shape, one.tobytes()): one for one in pictures}
    few = list(distinct.values())[:: max(1, len(distinct) // 8)]
    room = PICTURE_BUDGET * len(few) / max(1, len(distinct))
    large = any(picture[0].size > LOSSLESS_PIXELS for picture in few)
    for edge, quality in ENCODINGS[large:]:
        if sum(len(_address(one, edge, quality)) for one in few) <= room:
            break
    known = {key: _address(one, edge, quality) for key, one in distinct.items()}
    return [known[one.shape, one.tobytes()] for one in pictures]


def _address(picture: Picture, edge: int | None, quality: int) -> str:
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    if edge is not None:
        image.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", lossless=quality == 100, quality=quality)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _replays(
    runs: Sequence[Run], pictures: Mapping[tuple[int, str], Picture]
) -> tuple[dict[tuple[int, str], Any], list[str]]:
    """The replays by (place of the run, prompt id), and sentences about what is left out. The
    budget limits the number of prompts, which is the same for all runs.
    """
    stored: list[dict[str, Row]] = []
    problems = []
    for run in runs:
        try:
            stored.append(Store(Path(run.directory) / REPLAYS, COLUMNS).rows())
        except TemperaError as problem:
            stored.append({})
            problems.append(f"Replays left out: {problem}")
    result: dict[tuple[int, str], Any] = {}
    room = REPLAY_BUDGET
    for turn in range(SHOWN):
        column: dict[tuple[int, str], Any] = {}
        for place, run in enumerate(runs):
            for name, _ in _first(run)[turn : turn + 1]:
                if name not in stored[place]:
                    continue
                picture = pictures.get((place, name))
                size = None if picture is None else (picture.shape[1], picture.shape[2])
                try:
                    column[place, name] = packed_replay(stored[place][name], size)
                except (KeyError, TypeError, ValueError, OverflowError) as problem:
                    where = Path(run.directory) / REPLAYS
                    why = f"that of {name} in {where} is damaged ({misfit(problem)})"
                    problems.append(f"Replays left out: {why}.")
                    stored[place] = {}
        room -= sum(len(json.dumps(one)) for one in column.values())
        if room < 0:
            problems.append(f"Replays of the first {turn} prompts only, to keep the page small.")
            break
        result |= column
    return result, problems


def _first(run: Run) -> list[tuple[str, str]]:
    """Ids and texts of the prompts that a run shows."""
    return list(run.texts.items())[:SHOWN]


def _title(runs: Sequence[Run]) -> str:
    models = ", ".join(dict.fromkeys(str(run.model) for run in runs))
    shown = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"{shown} on {models}" if models else shown
