"""report.html: runs on one self-contained page, which needs no network and no server.

The page is page.html with its style, script, tables and, for several runs, the Vega chart inlined,
and one JSON object that holds the runs, pictures and replays.
"""

import base64
import html
import io
import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tempera.decoding.replay import REPLAYS
from tempera.errors import TemperaError, misfit
from tempera.metrics.table import report_order
from tempera.reporting import pareto
from tempera.reporting.baseline import nearest, same_draws
from tempera.reporting.finished_run import Run, labels, metrics_of, round_seconds
from tempera.reporting.tables import Section, html_of, is_of_few
from tempera.runtime.files import write_text
from tempera.runtime.image_files import Picture, picture_path, read_picture
from tempera.runtime.row_store import Row, Store

SHOWN = 24
"""Page and grid.png show the pictures of this many prompts of each run, its first ones."""
REPLAY_BUDGET = 6_000_000
"""Characters for replays, about as many as the pictures of 30 runs take."""
NEEDED = ("rows", "columns", "place", "origin")
ALSO = ("nodes", "proposed", "order", "tokens", "drafted", "parent", "fate")
"""Columns of a replay that the page shows."""
MOST = 65_535
"""Largest log-probability of a replay, in thousandths of a nat."""
LOSSLESS_EDGE = 128
"""Longest edge in pixels of a picture that is stored without loss."""
LONGEST_EDGE = 256
"""Longest edge in pixels of any picture; larger ones are shrunk."""


def write(
    path: Path, runs: Sequence[Run], sections: Sequence[Section], cautions: Sequence[str] = ()
) -> None:
    """Write the page.

    Args:
        sections: the first stands above chart and pictures, the others below them.
        cautions: what a reader must know before comparing.
    """
    here = Path(__file__)
    data, problems = page_data(runs)
    lines = [f"<li>{html.escape(text)}</li>" for text in (*cautions, *problems)]
    script = ""
    if data["chart"]:
        import vl_convert

        script = f"<script>{vl_convert.javascript_bundle()}</script>"  # type: ignore[call-arg]
    parts = {
        "title": html.escape(f"tempera: {_title(runs)}"),
        "style": here.with_suffix(".css").read_text(encoding="utf-8"),
        "cautions": f'<ul id="cautions">{"".join(lines)}</ul>' if lines else "",
        "verdict": "".join(map(_section, sections[:1])),
        "tables": "\n".join(map(_section, sections[1:])),
        "vega": script,
        "script": here.with_name("replay.js").read_text(encoding="utf-8"),
        "data": _embedded(data),
    }
    template = here.with_suffix(".html").read_text(encoding="utf-8")
    write_text(path, re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template))


def _section(section: Section) -> str:
    return f"<section><h2>{html.escape(section.title)}</h2>{html_of(section)}</section>"


def _embedded(value: object) -> str:
    """JSON that is safe inside a script element, whatever its strings contain."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    """The data that the page's script shows, and sentences about what is left out."""
    problems: list[str] = []
    replays = _fitting_replays([_replays(run, problems) for run in runs], problems)
    pictures: dict[str, int] = {}
    curves = pareto.curves(runs).to_dict("records")
    columns = zip(runs, labels(runs), replays, curves, round_seconds(runs), strict=True)
    shown = []
    for run, label, own_replays, curve, pace in columns:
        prompts = _prompts(run, pace, own_replays, pictures, problems)
        shown.append(_run(run, runs) | {"name": label, "pace": pace} | curve | {"prompts": prompts})
    metrics = _metrics(runs)
    chart = None
    if len(runs) > 1 and metrics:
        names = list(dict.fromkeys(run["curve"] for run in shown if not run["plain"]))
        chart = pareto.chart("runs", "@x", "@y", names, "container", 400).to_dict()
    data = {"metrics": metrics, "chart": chart, "runs": shown, "pictures": list(pictures)}
    return data, problems


def _prompts(
    run: Run,
    pace: float | None,
    replays: dict[str, Row],
    pictures: dict[str, int],
    problems: list[str],
) -> list[dict[str, Any]]:
    """The prompts that the page shows of a run.

    Args:
        pace: seconds of its rounds, if it was timed.
        replays: of the run's prompts, by id; `blank` is set in them.
        pictures: the number of each picture of the page, by its address; new ones are added.
        problems: sentences about pictures that cannot be read are added.
    """
    prompts = []
    for name, text in islice(run.texts.items(), SHOWN):
        number = None
        replay = replays.get(name)
        try:
            picture = read_picture(picture_path(Path(run.directory), name), run.made_by)
            number = pictures.setdefault(_address(picture), len(pictures))
            if replay:
                replay["blank"] = blank_columns(replay, picture.shape[1:])
        except TemperaError as problem:
            problems.append(f"Not shown: {problem}")
        values = run.values.loc[name, text]
        length = values.get("accepted_length")  # None of pictures that other code made
        seconds = pace and length and pace * run.length / float(length)
        prompt = {
            "id": name,
            "text": text,
            "picture": number,
            "replay": replay,
            "length": length and float(length),
            "seconds": seconds,
            "broken": bool(values.get("broken") == 1),
        }
        prompts.append(prompt)
    return prompts


def _metrics(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Keys and headings of the metrics that some run has, and no run has too few images for."""
    measured = {key for run in runs for key in run.metrics if np.isfinite(run.value(key))}
    images = min(run.images for run in runs)
    return [
        {"key": metric.key, "heading": metric.heading}
        for metric in report_order(metrics_of(runs))
        if metric.key in measured and images >= metric.fewest
    ]


def _run(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """A run's names and metrics, and the place of the plain run beside which its pictures stand."""
    plain = [other for other in runs if other.plain and same_draws(other, run)]
    beside = nearest(run, [other for other in plain if other is not run])
    reference = next((index for index, other in enumerate(runs) if other is beside), None)
    metrics = {}
    for key, interval in run.metrics.items():
        ends = ("value",) if is_of_few(interval) else ("value", "low", "high")
        metrics[key] = [_finite(interval.get(end)) for end in ends]
    return {
        "plain": run.plain,
        "decoded": run.decoded,
        "model": run.model or "other code",
        "seed": run.seed,
        "images": run.images,
        "metrics": metrics,
        "reference": reference,
    }


def _finite(value: float | None) -> float | None:
    """The value; None if it is infinite, for which JSON has no number."""
    return value if value is not None and abs(value) < float("inf") else None


def _replays(run: Run, problems: list[str]) -> dict[str, Row]:
    """The replays of the prompts that a run shows, by id: parts of the rows of
    `tempera.decoding.replay.replays`. Of continuous tokens there are neither ids nor probabilities.
    """
    try:
        rows = Store(Path(run.directory) / REPLAYS, run.made_by).rows()
        return {name: _replay(rows[name]) for name in islice(run.texts, SHOWN) if name in rows}
    except (TemperaError, KeyError, TypeError, ValueError) as problem:
        why = problem if isinstance(problem, TemperaError) else misfit(problem)
        problems.append(f"Replays of {run.directory} left out: {why}")
        return {}


def _fitting_replays(
    replays: Sequence[dict[str, Row]], problems: list[str]
) -> list[dict[str, Row]]:
    """The replays of as many first prompts of each run as fit `REPLAY_BUDGET`, and a sentence in
    `problems` if that leaves some out. All replays count as long as their run's first one.
    """
    size = 0
    for by_prompt in replays:
        for first in islice(by_prompt.values(), 1):
            size += len(json.dumps(first))
    most = REPLAY_BUDGET // max(size, 1)
    if any(len(by_prompt) > most for by_prompt in replays):
        problems.append(f"Replays of the first {most} prompts only, to keep the page small.")
    return [dict(islice(by_prompt.items(), most)) for by_prompt in replays]


def _replay(row: Row) -> Row:
    """A replay as JSON, with log-probabilities as positive thousandths of a nat, at most `MOST`."""
    shown = {name: row[name] for name in NEEDED} | {"blank": 0}
    shown |= {name: row[name] for name in ALSO if row.get(name)}
    if "tokens" in row:
        nats = np.nan_to_num(-1000 * np.array(row["logprob"], float), nan=MOST, posinf=MOST)
        shown["logprob"] = nats.clip(0, MOST).astype(int).tolist()
    return shown


def blank_columns(replay: Row, size: tuple[int, ...]) -> int:
    """Token columns at the right that have no pixels, as the proportions of the picture show: 1 if
    lines end with a token, else 0.
    """
    return int(round(size[1] * replay["rows"] / size[0]) == replay["columns"] - 1)


def _address(picture: Picture) -> str:
    """A picture as a `data:` URL: a small one as it is, another within `LONGEST_EDGE`
    pixels.
    """
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    lossless = max(image.size) <= LOSSLESS_EDGE
    image.thumbnail((LONGEST_EDGE, LONGEST_EDGE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", lossless=lossless, quality=100 if lossless else 75)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _title(runs: Sequence[Run]) -> str:
    """Of the page: the run or the number of runs, and their models."""
    models = ", ".join(dict.fromkeys(run.model for run in runs if run.model))
    shown = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"{shown} on {models}" if models else shown
