"""What a run directory holds, in two files: results.parquet and metrics.json. It needs no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.evaluation import latency
from tempera.evaluation.pipeline import BY_PLACE, record_columns
from tempera.evaluation.run_directory import PROMPTS, RECORDS, check_format
from tempera.evaluation.score import Pictured, orders, scored
from tempera.metrics.acceptance import acceptance
from tempera.metrics.bootstrap import Array
from tempera.runtime.files import fingerprint, read_json, sha256_file, write_json
from tempera.runtime.row_store import Row, Store, read_table, write_table

FACTS = ("name", "exact", "length", "vocab", "grid", "timed")
"""What run.json has of `tempera.evaluation.run.facts`, beside the identity and other facts."""
RESULTS = "results.parquet"
METRICS = "metrics.json"


def pictured(directory: Path) -> Pictured:
    """The pictures of a run directory.

    Raises:
        TemperaError: it is of another version, or no run has begun there.
    """
    identity = read_json(directory / "run.json").get("identity")
    identity = identity if isinstance(identity, dict) else {}
    check_format(directory, identity)
    made_by = fingerprint(identity)
    rows = read_table(directory / PROMPTS, {"id": None, "text": None}, identity=made_by)
    return Pictured(directory, made_by, [Prompt(row["id"], row["text"]) for row in rows])


def summarise(directory: Path) -> dict[str, Any]:
    """Write results.parquet, and metrics.json, which marks a run as finished, of the records,
    timings and scores in a run directory.

    Returns:
        The content of metrics.json.

    Raises:
        TemperaError: the directory cannot be written, or prompts have no records yet.
    """
    own = pictured(directory)
    results = directory / RESULTS
    while True:
        known = orders(directory)
        result, rows = _summary(own)
        write_table(results, rows, own.made_by)
        result["results"] = sha256_file(results)
        write_json(directory / METRICS, result)
        written = sha256_file(results) == result["results"]
        if written and orders(directory) == known:  # else another process wrote, too
            return result


def _summary(own: Pictured) -> tuple[dict[str, Any], list[Row]]:
    """The content of metrics.json but for the hash of the results, and the rows of these."""
    directory = own.directory
    run: Any = read_json(directory / "run.json")
    identity = {name: value for name, value in run["identity"].items() if name != "format"}
    rows = _records(own, run)
    ids = [row["id"] for row in rows]
    timings = _timings(own, run, ids)
    scores = scored(directory, own.made_by, ids)
    metrics = acceptance(rows) if "tokens" in rows[0] else {}
    if timings.get(1):
        metrics |= latency.speed(timings[1], run["length"], metrics["accepted_length"])
    metrics |= latency.batch_speedups({size: timings[size] for size in timings if size > 1})
    intervals = {name: interval.as_dict() for name, interval in metrics.items()} | scores.metrics
    result = {
        "name": run["name"],
        "settings": identity,
        "images": len(rows),
        "exact": run["exact"],
        "grid": run["grid"],
        "length": run["length"],
        "metrics": {name: _plain(interval) for name, interval in intervals.items()},
        "scorers": scores.scorers,
        "described": [asdict(metric) for metric in scores.described.values()],
        **(_profiles(rows) if "tokens" in rows[0] else {}),
        "memory": max((row["memory"] for row in rows if "memory" in row), default=None),
        "time": _plain(latency.breakdown(timings[1])) if timings.get(1) else {},
        "about": {name: value for name, value in run.items() if name not in ("identity", *FACTS)},
    }
    return result, _results(rows, timings.get(1, []), scores.values)


def _records(own: Pictured, run: Mapping[str, Any]) -> list[Row]:
    """One row per prompt, in their order."""
    columns = record_columns(run["length"], run["vocab"]) if run["length"] else {"text": None}
    records = Store(own.directory / RECORDS, own.made_by, columns).rows()
    missing = [prompt.id for prompt in own.prompts if prompt.id not in records]
    if missing:
        raise TemperaError(
            f"{own.directory} is not finished: {len(missing)} of {len(own.prompts)} prompts have "
            "no images yet: run the evaluation there again."
        )
    return [records[prompt.id] for prompt in own.prompts]


def _timings(own: Pictured, run: Mapping[str, Any], ids: Sequence[str]) -> dict[int, list[Row]]:
    """Timings by batch size, on the machine that the run was last started on."""
    timings = {}
    stored_timings = own.directory / "timings"
    for size in run["timed"]:
        store = Store(
            stored_timings / latency.timing_name(run["machine"], size), own.made_by, latency.COLUMNS
        )
        timed = store.rows()
        rows = [timed[name] for name in ids if name in timed]
        timings[size] = rows if size == 1 else list(timed.values())
    return timings


def _profiles(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over all images by depth of the draft, by tenth of the image in the order of decoding,
    and by place in the image; None where nothing was tested.

    Returns:
        `acceptance_by_depth`, `acceptance_by_tenth`, `acceptance_by_place` (the share of images
        whose token is an accepted draft), `rounds_by_tokens` (the share of rounds with 1, 2, …
        tokens; the last round of an image is cut at its end and counts as one more) and
        `figures_by_place` (figures of the rule, by name).
    """

    def total(name: str) -> Array:
        return np.sum([row[name] for row in rows], axis=0) if name in rows[0] else np.zeros(0)

    rounds = sum(row["rounds"] for row in rows)
    drafted = np.mean([np.array(row["depth"]) > 0 for row in rows], axis=0)
    figures: dict[str, list[float | None]] = {}
    for name in sorted({name for row in rows for name in row if name.endswith(BY_PLACE)}):
        values = np.array([row[name] for row in rows if name in row], np.float64)
        shares = _shares(np.nansum(values, axis=0), (~np.isnan(values)).sum(axis=0))
        figures[name.removesuffix(BY_PLACE)] = shares
    return {
        "acceptance_by_depth": _shares(total("accepted"), total("tested")),
        "acceptance_by_tenth": _shares(total("accepted_by_tenth"), total("tested_by_tenth")),
        "acceptance_by_place": drafted.tolist(),
        "rounds_by_tokens": list(-np.diff([rounds, *total("accepted"), 0]) / rounds),
        "figures_by_place": figures,
    }


def _shares(parts: Array, wholes: Array) -> list[float | None]:
    """part ÷ whole, element by element; None where the whole is 0."""
    shares: list[float | None] = []
    for part, whole in zip(parts, wholes, strict=True):
        shares.append(float(part / whole) if whole else None)
    return shares


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, None for NaN and infinite ones: JSON has neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _results(
    rows: Sequence[Row], timings: Sequence[Row], scores: Mapping[str, Row]
) -> list[dict[str, Any]]:
    """The rows of results.parquet: a prompt's record but for its tokens, its latencies if it was
    timed, its scores.
    """
    timed = {row["id"]: {"latency_ar": row["ar"], "latency": row["method"]} for row in timings}
    results = []
    for row in rows:
        name = row["id"]
        values = row | timed.get(name, {}) | scores.get(name, {})
        result: dict[str, Any] = {"id": name, "latency_ar": None, "latency": None}
        for column, value in values.items():
            if column not in ("id", "tokens", "features"):
                result[column] = value
        results.append(result)
    return results
