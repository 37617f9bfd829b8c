"""Finished run directories for tests of report.html, made up without a model: each run's pictures,
records, and the rounds in which they might have been decoded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tempera.decoding.replay import KEPT, REJECTED, REPLAYS, UNTESTED
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED
from tempera.reporting.collect import Run
from tempera.runtime.image_files import picture_path, write_picture
from tempera.runtime.row_store import Store, write_table
from tempera.shapes.world import World

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
    patch: int = 4,
    **settings: Any,
) -> Path:
    """A directory with one finished run each; pictures have `patch` pixels a token."""
    for number, (method, delta, accepted) in enumerate(runs):
        one = directory / f"{number}_{method}"
        _made_up_run(one, method, delta, accepted, prompts, grid, patch, number, settings)
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
    frame.index = [f"p{place}" for place in range(len(frame))]
    ones = pd.DataFrame(1.0, frame.index, frame.columns).assign(**(weights or {}))
    fields = {name: given.pop(name) for name in list(given) if name in Run.model_fields}
    means = {key: {"value": float(frame[key].mean()), "low": None, "high": None} for key in frame}
    fields = {"model": "shapes", "seed": 0, "images": len(frame), "machine": "cpu"} | fields
    settings = {name: fields.get(name) for name in ("model", "seed", "delta")}
    return Run(
        directory=fields.pop("directory", f"runs/{method}"),
        method=method,
        settings={"method": method, **settings, **given},
        changes=changes or {},
        metrics=means | (metrics or {}),
        values=frame,
        weights=ones,
        texts={name: f"prompt {name}" for name in frame.index},
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
        fate += [KEPT] * taken + [REJECTED] * (taken < depth) + [UNTESTED] * (depth - taken - 1)
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


def _made_up_run(
    directory: Path,
    method: str,
    delta: float | None,
    accepted: float,
    prompts: int,
    grid: tuple[int, int],
    patch: int,
    number: int,
    settings: dict[str, Any],
) -> None:
    rng = np.random.default_rng(number)
    scenes = World(0).batch(0, prompts)
    rows, replays = [], []
    for place, scene in enumerate(scenes):
        name = f"world-{place:06d}"
        replays.append(replay(name, grid, 0 if method == "ar" else DEPTH, accepted, rng))
        rounds = replays[-1]["place"].count(1)
        rows.append(
            {
                "id": name,
                "text": scene.caption,
                "tokens": replays[-1]["tokens"],
                "rounds": rounds,
                "accepted_length": grid[0] * grid[1] / rounds,
                "logprob": sum(replays[-1]["logprob"]),
                "clip_score": 0.8 - 0.2 * accepted + 0.05 * float(rng.random()),
            }
        )
        write_picture(picture_path(directory, name), _picture(scene.image, grid, patch, rng))
    Store(directory / REPLAYS).add(replays)
    write_table(directory / "results.parquet", rows)
    known = {"method": method, "model": "shapes", "seed": 0, **settings}
    known |= {} if delta is None else {"delta": delta}
    length = float(np.mean([row["accepted_length"] for row in rows]))
    values = {
        "accepted_length": (length, 0.1),
        "speedup": (0.3 + 0.6 * length, 0.15),
        "fid": (8 + 3 * accepted**2 + 0.6 * number % 1, 0.7),
        "clip_score": (float(np.mean([row["clip_score"] for row in rows])), 0.008),
        "attribute_accuracy": (0.92 - 0.1 * accepted**2, 0.01),
        "kl_per_token": (0.0 if delta is None else accepted**4 / 10, 0.004),
    }
    content = {
        "name": method,
        "settings": known,
        "images": prompts,
        "grid": list(grid),
        "metrics": {
            key: {"value": value, "low": value - width, "high": value + width, "n": prompts}
            for key, (value, width) in values.items()
        },
        "about": {
            "machine": "cpu",
            "changes": {name: one for name, one in settings.items() if name != "seed"},
        },
    }
    (directory / "run.json").write_text("{}")
    (directory / "metrics.json").write_text(json.dumps(content))


def _picture(
    image: np.ndarray, grid: tuple[int, int], patch: int, rng: np.random.Generator
) -> np.ndarray:
    """A scene at the wanted size, uint8 [3, H, W], with some noise."""
    height, width = grid[0] * patch, grid[1] * patch
    ys, xs = np.arange(height) * len(image) // height, np.arange(width) * len(image) // width
    scaled = 255 * image[ys][:, xs].transpose(2, 0, 1)
    return (scaled + rng.normal(0, 4, scaled.shape)).clip(0, 255).astype(np.uint8)
