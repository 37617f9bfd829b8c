"""report.html: a report's runs on one self-contained page, which needs no network and no server.

The page is report_page.html with style and script inlined, and one JSON object that holds the
numbers, pictures and replays. Integer arrays are packed (`packed`).
"""

import base64
import html
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tempera.decoding.replay import COLUMNS, REPLAYS
from tempera.errors import TemperaError, misfit
from tempera.metrics import table
from tempera.reporting import paper_tables
from tempera.reporting.baseline import CONTEXT, label
from tempera.reporting.console import number
from tempera.reporting.page_pictures import data_addresses
from tempera.reporting.run_names import is_plain
from tempera.reporting.study import StudyTable
from tempera.runtime.files import write_text
from tempera.runtime.image_files import Picture, picture_path, read_picture
from tempera.runtime.row_store import Row, Store

SHOWN = 24
"""The page shows the pictures of this many prompts of each run, its first ones."""
PICTURE_BUDGET, REPLAY_BUDGET = 6_000_000, 3_000_000
"""Most characters for pictures and for replays; they keep the whole page below 10 MB."""
SCALE, LEAST = 1000, -65.535
"""Log-probabilities are packed as thousandths of a nat, and clipped below at `LEAST`."""


def write(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    cautions: Sequence[str] = (),
    against: str = "",
    studied: Sequence[StudyTable] = (),
) -> Path:
    """Write the page and return its path.

    Args:
        path: the file to write.
        rows: runs as `tempera.reporting.collect` reads them.
        cautions: what a reader must know before comparing.
        against: the baseline of the runs' differences; plain autoregression if empty.
        studied: the tables of `tempera.reporting.study`.
    """
    here = Path(__file__)
    page = here.with_suffix(".html").read_text(encoding="utf-8")
    parts = {
        "style": here.with_suffix(".css").read_text(encoding="utf-8"),
        "script": here.with_suffix(".js").read_text(encoding="utf-8"),
        "title": html.escape(f"tempera: {_title(rows)}"),
        "data": embedded(page_data(rows, cautions, against, studied)),
    }
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    write_text(path, page)
    return path


def embedded(value: object) -> str:
    """JSON that is safe inside a script element, whatever its strings contain."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(
    rows: Sequence[Mapping[str, Any]],
    cautions: Sequence[str],
    against: str,
    studied: Sequence[StudyTable] = (),
) -> dict[str, Any]:
    """The data that the page's script shows."""
    pictures, unreadable = _pictures(rows)
    replays, left_out = _replays(rows, pictures["sizes"])
    shown = [metric for metric in table.report_order() if any(_known(row, metric) for row in rows)]
    families = list(dict.fromkeys(row["family"] for row in rows))
    return {
        "title": _title(rows),
        "against": against or "plain autoregression",
        "cautions": [*cautions, *unreadable, *left_out],
        "metrics": [
            {
                "key": metric.key,
                "title": metric.title,
                "heading": metric.heading,
                "unit": metric.unit,
                "main": metric.in_report,
                "axis": metric.in_pareto,
            }
            for metric in shown
        ],
        "families": families,
        "runs": [
            _run(row)
            | {
                "family": families.index(row["family"]),
                "reference": _reference(row, rows),
                "prompts": [
                    {
                        "id": name,
                        "text": row["texts"][name],
                        "picture": pictures["of"].get((place, name)),
                        "length": _length(row, name),
                        "replay": replays.get((place, name)),
                    }
                    for name in _first(row)
                ],
            }
            for place, row in enumerate(rows)
        ],
        "pictures": pictures["addresses"],
        "study": [asdict(one) for one in studied],
        "papers": [
            {
                "title": comparison.title,
                "columns": [column.title for column in comparison.columns],
                "models": [paper_tables.model_head(model) for model in comparison.models],
                "lines": comparison.lines,
                "notes": comparison.notes,
            }
            for comparison in paper_tables.beside(rows)
        ],
    }


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    """A run's name, settings, metrics and differences."""
    return {
        "name": label(row),
        **{name: row[name] for name in ("delta", "model", "seed", "images", "directory")},
        "plain": is_plain(row["settings"]),
        "metrics": {
            metric.key: _cell(row["metrics"][metric.key], metric.format)
            for metric in table.METRICS
            if _known(row, metric)
        },
        "differences": {
            key: _cell(interval, "+.4f") for key, interval in row["differences"].items()
        },
    }


def packed(values: Sequence[int]) -> str:
    """Pack non-negative integers: their width in bytes (1, 2 or 4), a colon, and base64 of the
    little-endian array. [1, 2] in two bytes each is `2:AQACAA==`.
    """
    largest = max(values, default=0)
    width, kind = (1, "B") if largest < 2**8 else (2, "H") if largest < 2**16 else (4, "I")
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"{width}:" + base64.b64encode(numbers.tobytes()).decode("ascii")


def packed_replay(replay: Row, size: tuple[int, int] | None) -> dict[str, Any]:
    """A row of `tempera.decoding.replay.replays` for the page.

    Args:
        replay: the row.
        size: height and width of the picture. Its proportions show whether the last column of
            tokens has no pixels (line ends).
    """
    firsts = [at for at, place in enumerate(replay["place"]) if place == 1]
    ends = [*firsts[1:], len(replay["place"])]
    result: dict[str, Any] = {
        "rows": replay["rows"],
        "columns": replay["columns"],
        "blank": blank_columns(replay, size),
        "emitted": packed([end - first for first, end in zip(firsts, ends, strict=True)]),
        "origin": packed(replay["origin"]),
        "nodes": packed(replay["nodes"] or [replay["proposed"][first] for first in firsts]),
    }
    if "order" in replay:  # continuous tokens have neither ids nor probabilities
        return result | {"order": packed(replay["order"])}
    result["tokens"] = packed(replay["tokens"])
    result["logprob"] = packed([_thousandths(one) for one in replay["logprob"]])
    if replay["drafted"]:
        parents = [1 + parent for parent in replay["parent"]]
        width = replay["nodes"][0]
        same = parents == parents[:width] * (len(parents) // max(width, 1))
        result |= {
            "drafted": packed(replay["drafted"]),
            "parents": packed(parents[:width] if same else parents),
            "fate": packed(replay["fate"]),
        }
    return result


def _thousandths(logprob: float | None) -> int:
    return round(-SCALE * max(LEAST, LEAST if logprob is None else min(logprob, 0.0)))


def blank_columns(replay: Row, size: tuple[int, int] | None) -> int:
    """Token columns at the right that have no pixels: 1 if lines end with a token, else 0."""
    if size is None:
        return 0
    return int(round(size[1] * replay["rows"] / size[0]) == replay["columns"] - 1)


def _pictures(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The pictures, and a sentence about each one that cannot be read.

    `addresses` lists the distinct `data:` URLs. For each (place of the run, prompt id), `of` gives
    the picture's index among them and `sizes` its height and width.
    """
    found: dict[tuple[int, str], Picture] = {}
    problems = []
    for place, row in enumerate(rows):
        for name in _first(row):
            try:
                found[place, name] = read_picture(picture_path(Path(row["directory"]), name))
            except TemperaError as problem:
                problems.append(f"Not shown: {problem}")
    encoded = data_addresses(list(found.values()), PICTURE_BUDGET)
    numbers = {address: number for number, address in enumerate(dict.fromkeys(encoded))}
    pictures = {
        "addresses": list(numbers),
        "of": {key: numbers[address] for key, address in zip(found, encoded, strict=True)},
        "sizes": {key: picture.shape[1:] for key, picture in found.items()},
    }
    return pictures, problems


def _replays(
    rows: Sequence[Mapping[str, Any]], sizes: Mapping[tuple[int, str], tuple[int, int]]
) -> tuple[dict[tuple[int, str], Any], list[str]]:
    """The replays by (place of the run, prompt id), and sentences about what is left out. The
    budget limits the number of prompts, which is the same for all runs.
    """
    stored: list[dict[str, Row]] = []
    problems = []
    for row in rows:
        try:
            stored.append(Store(Path(row["directory"]) / REPLAYS, COLUMNS).rows())
        except TemperaError as problem:
            stored.append({})
            problems.append(f"Replays left out: {problem}")
    result: dict[tuple[int, str], Any] = {}
    room = REPLAY_BUDGET
    for turn in range(SHOWN):
        column: dict[tuple[int, str], Any] = {}
        for place, row in enumerate(rows):
            for name in _first(row)[turn : turn + 1]:
                if name not in stored[place]:
                    continue
                try:
                    size = sizes.get((place, name))
                    column[place, name] = packed_replay(stored[place][name], size)
                except (KeyError, TypeError, ValueError, OverflowError) as problem:
                    where = Path(row["directory"]) / REPLAYS
                    problems.append(
                        f"Replays left out: that of {name} in {where} is damaged "
                        f"({misfit(problem)})."
                    )
                    stored[place] = {}
        room -= sum(len(json.dumps(one)) for one in column.values())
        if room < 0:
            problems.append(f"Replays of the first {turn} prompts only, to keep the page small.")
            break
        result |= column
    return result, problems


def _first(row: Mapping[str, Any]) -> list[str]:
    """Ids of the prompts that a run shows."""
    return list(row["texts"])[:SHOWN]


def _reference(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The place of the plain autoregressive run with the row's model, sampling and seed, whose
    pictures the page shows beside the row's; None if there is none.
    """
    for place, other in enumerate(rows):
        same = all(other["settings"].get(name) == row["settings"].get(name) for name in CONTEXT)
        if other is not row and same and is_plain(other["settings"]):
            return place
    return None


def _length(row: Mapping[str, Any], name: str) -> float | None:
    """The accepted length of one image."""
    known = row["prompts"].get(name, {}).get("accepted_length")
    return None if known is None else round(known[0], 3)


def _known(row: Mapping[str, Any], metric: table.Metric) -> bool:
    return row["metrics"].get(metric.key, {}).get("value") is not None


def _cell(interval: Mapping[str, Any], form: str) -> list[Any]:
    """Value, low, high and n, then value and interval as text; None for numbers that are not
    finite.
    """
    value, low, high = (_finite(interval.get(key)) for key in ("value", "low", "high"))
    text = "–" if interval.get("value") is None else number(interval["value"], form)
    span = "" if low is None or high is None else f"{number(low, form)} … {number(high, form)}"
    return [value, low, high, interval.get("n"), text, span]


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _title(rows: Sequence[Mapping[str, Any]]) -> str:
    models = ", ".join(dict.fromkeys(str(row["model"]) for row in rows))
    runs = label(rows[0]) if len(rows) == 1 else f"{len(rows)} runs"
    return f"{runs} on {models}" if models else runs
