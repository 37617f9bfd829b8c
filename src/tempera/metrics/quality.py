"""Quality of a set of pictures: verdicts per picture, then metrics over the set, each with a
bootstrap interval.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.metrics import bootstrap, distances
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Evaluator, Networks, Pictures
from tempera.runtime.files import replacing
from tempera.runtime.row_store import Row, Store

ENOUGH = 16
"""Fewer pictures than this have no FID, KID, precision or recall."""
GROUPS = {
    "shape": ("shape1", "shape2"),
    "colour": ("colour1", "colour2"),
    "size": ("size1", "size2"),
    "relation": ("relation",),
    "background": ("background",),
    "pattern": ("pattern",),
}
"""Attribute accuracies, and the classifier's attributes behind each."""
MAIN = ("shape", "colour", "background")
"""Those that make up `attribute_accuracy`."""


def evaluate_pictures(
    networks: Networks,
    prompts: Sequence[Prompt],
    pictures: Callable[[Prompt], Pictures],
    store: Store,
    batch: int = 64,
) -> dict[str, Row]:
    """Verdicts on each prompt's picture: those missing are made, in batches; returns all, by prompt
    id.

    Args:
        pictures: the prompt's picture, uint8 [3, h, w].
        store: where verdicts are kept.
    """
    waiting = set(store.missing([prompt.id for prompt in prompts]))
    todo = [prompt for prompt in prompts if prompt.id in waiting]
    for first in range(0, len(todo), batch):
        group = todo[first : first + batch]
        store.add(_verdicts(networks, group, np.stack([pictures(prompt) for prompt in group])))
    return store.rows()


@torch.inference_mode()
def _verdicts(networks: Networks, prompts: Sequence[Prompt], pictures: Pictures) -> list[Row]:
    images = torch.from_numpy(pictures)
    columns: dict[str, Any] = {"id": [prompt.id for prompt in prompts]}
    if networks.features is not None:
        columns["features"] = networks.features(images).double().cpu().tolist()
    if networks.clip_score is not None:
        columns["clip_score"] = networks.clip_score(images, prompts).double().cpu().tolist()
    if networks.attributes is not None:
        columns |= {
            name: verdict.tolist() for name, verdict in networks.attributes(images, prompts).items()
        }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


@torch.inference_mode()
def reference_features(
    evaluator: Evaluator, networks: Networks, cache: Path | None = None
) -> Array | None:
    """Features of the evaluator's real pictures, [m, D]; kept in `cache` (~/.cache/tempera) under
    the evaluator's identity. None without any.
    """
    if networks.features is None:
        return None
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tempera"
        if cache is None
        else cache
    )
    path = cache / f"reference-{evaluator.identity}.npy"
    try:
        known: Array = np.load(path)
        return known
    except (OSError, ValueError):
        pass
    batches = [
        networks.features(torch.from_numpy(pictures)).double().cpu().numpy()
        for pictures in evaluator.reference()
    ]
    if not batches:
        return None
    features: Array = np.concatenate(batches)
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, features)
    except ValueError:  # the cache is a convenience; without it the features are made again
        pass
    return features


def quality(
    verdicts: Sequence[Mapping[str, Any]], reference: Array | None, neighbours: int, resamples: int
) -> dict[str, Interval]:
    """The metrics over a set of pictures, from their verdicts."""
    metrics: dict[str, Interval] = {}
    if (
        reference is not None
        and len(verdicts) >= ENOUGH
        and all(row.get("features") is not None for row in verdicts)
    ):
        features = np.array([row["features"] for row in verdicts], np.float64)
        few = min(resamples, 200)
        metrics["fid"] = distances.frechet(features, reference, few)
        metrics["kid"] = distances.kernel(features, reference, few)
        metrics["precision"], metrics["recall"] = distances.precision_recall(
            features, reference, neighbours, few
        )
    if all(row.get("clip_score") is not None for row in verdicts):
        metrics["clip_score"] = bootstrap.mean(
            np.array([row["clip_score"] for row in verdicts]), resamples
        )
    return metrics | _accuracies(verdicts, resamples)


def _accuracies(verdicts: Sequence[Mapping[str, Any]], resamples: int) -> dict[str, Interval]:
    """Right ÷ told, over prompts, of every attribute."""
    metrics = {}
    combined = {"attribute": sum((GROUPS[name] for name in MAIN), ()), **GROUPS}
    for name, columns in combined.items():
        table = np.array([[_number(row.get(column)) for column in columns] for row in verdicts])
        interval = bootstrap.ratio(np.nansum(table, 1), (~np.isnan(table)).sum(1), resamples)
        if interval.n:
            metrics[f"{name}_accuracy"] = interval
    return metrics


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
