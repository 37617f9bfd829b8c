"""Finished run directories for tests of report.html, made up without a model: each run's pictures,
records, and the rounds in which they might have been decoded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.replay import PASSED, REJECTED, REPLAYS, UNTESTED
from tempera.reporting.finished_run import Run
from tempera.runtime.files import fingerprint, sha256_file
from tempera.runtime.image_files import picture_path, write_picture
from tempera.runtime.row_store import Store, write_table

DEPTH = 5
RUNS: tuple[tuple[str, float | None, float], ...] = (
    ("ar", None, 0.0),
    ("eagle", None, 0.55),
    ("coolsd", 1.1, 0.6),
    ("coolsd", 2.0, 0.7),
    ("coolsd", 3.0, 0.8),
    ("uniform_rsd", 1.1, 0.6),
    ("uniform_rsd", 2.0, 0.72),
)
"""Method, δ, and how often a draft is accepted."""


def made_up_runs(
    directory: Path,
    runs: Sequence[tuple[str, float | None, float]] = RUNS,
    prompts: int = 6,
    grid: tuple[int, int] = (8, 8),
    text: str = "a red ring",
    reference: str = "scenes",
    **settings: Any,
) -> Path:
    """A directory with one finished run each; pictures have 4 × 4 pixels a token.

    Args:
        text: how the prompts' texts begin.
        reference: the real pictures of FID.
    """
    for number, (method, delta, accepted) in enumerate(runs):
        one, rng, rows = directory / f"{number}_{method}", np.random.default_rng(number), []
        names = [f"world-{place:06d}" for place in range(prompts)]
        own = {"method": method, "model": "shapes", "seed": 0, "delta": delta} | settings
        made_by = fingerprint(own)
        depth = 0 if method == "ar" else DEPTH
        replays = [replay(name, grid, depth, accepted, rng) for name in names]
        for name, made in zip(names, replays, strict=True):
            rounds, clip = made["place"].count(1), 0.8 - 0.2 * accepted + 0.05 * rng.random()
            length, logprob = grid[0] * grid[1] / rounds, sum(made["logprob"])
            rows.append({"id": name, "text": f"{text}, {name}", "tokens": made["tokens"]})
            rows[-1] |= {"rounds": rounds, "accepted_length": length, "logprob": logprob}
            rows[-1]["clip_score"] = clip
            picture = rng.integers(0, 256, (3, *grid), np.uint8).repeat(4, 1).repeat(4, 2)
            write_picture(picture_path(one, name), picture, made_by)
        Store(one / REPLAYS, made_by).add(replays)
        results = one / "results.parquet"
        write_table(results, rows)
        length, clip = (
            float(np.mean([row[key] for row in rows])) for key in ("accepted_length", "clip_score")
        )
        values = {
            "accepted_length": (length, 0.1),
            "speedup": (0.4 + 0.6 * length, 0.15),
            "latency_ar": (0.64, 0.01),
            "efficiency": (0.4 / length + 0.6, 0.05),
            "fid": (8 + 3 * accepted**2, 0.7),
            "clip_score": (clip, 0.008),
            "kl_per_token": (0.0 if delta is None else accepted**4 / 10, 0.004),
        }
        content = {
            "settings": own,
            "results": sha256_file(results),
            "images": prompts,
            "exact": delta is None,
            "length": grid[0] * grid[1],
            "grid": list(grid),
            "scorers": {"fid": ["classifier", reference], "clip_score": ["clip"]},
            "metrics": {
                key: {"value": value, "low": value - width, "high": value + width, "n": prompts}
                for key, (value, width) in values.items()
            },
            "about": {
                "machine": "cpu",
                "changes": {name: one for name, one in settings.items() if name != "seed"},
            },
        }
        (one / "run.json").write_text(json.dumps({"identity": own}))
        (one / "metrics.json").write_text(json.dumps(content))
    return directory


def finished(
    method: str,
    values: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    **given: Any,
) -> Run:
    """A run in memory: each prompt's values by metric, and metrics, by default their means.

    Args:
        given: fields of `Run`; other names are settings.
    """
    frame = pd.DataFrame(values or {}, dtype=float)
    names = [f"p{place}" for place in range(len(frame))]
    texts = given.pop("texts", [f"prompt {name}" for name in names])
    frame.index = pd.MultiIndex.from_arrays([names, texts], names=["id", "text"])
    ones = pd.DataFrame(1.0, frame.index, frame.columns).assign(**(weights or {}))
    fields = {name: given.pop(name) for name in list(given) if name in Run.model_fields}
    means = {key: {"value": float(frame[key].mean()), "low": None, "high": None} for key in frame}
    usual = {"model": "shapes", "seed": 0, "images": len(frame), "machine": "cpu", "length": 1}
    fields = usual | fields
    settings = {name: fields.get(name) for name in ("model", "seed", "delta")}
    return Run(
        directory=fields.pop("directory", f"runs/{method}"),
        method=method,
        settings={"method": method, **settings, **given},
        changes=changes or {},
        metrics=means | (metrics or {}),
        values=frame,
        weights=ones,
        **fields,
    )


def replay(
    name: str, grid: tuple[int, int], depth: int, accepted: float, rng: np.random.Generator
) -> dict[str, Any]:
    """A replay of a chain of `depth` drafts, each accepted with the same probability."""
    length = grid[0] * grid[1]
    place, origin, nodes, parent, fate, drafted = [], [], [], [], [], []
    tokens = rng.integers(0, 400, length).tolist()
    while len(place) < length:
        start = len(place)
        tests = rng.random(depth) < accepted
        taken = depth if tests.all() else int(tests.argmin())
        drawn = BONUS if taken == depth else RESAMPLED
        room = length - start
        place += list(range(1, taken + 2))[:room]
        origin += [*[ACCEPTED] * taken, drawn][:room]
        nodes.append(depth)
        parent += range(-1, depth - 1)
        fate += [PASSED] * taken + [REJECTED] * (taken < depth) + [UNTESTED] * (depth - taken - 1)
        ahead = [*tokens[start : start + taken], *rng.integers(0, 400, depth).tolist()]
        drafted += ahead[:depth]
    return {
        "id": name,
        "rows": grid[0],
        "columns": grid[1],
        "place": place,
        "origin": origin,
        "logprob": (-rng.exponential(1.5, length)).tolist(),
        "tokens": tokens,
        "nodes": nodes,
        "drafted": drafted,
        "parent": parent,
        "fate": fate,
    }
