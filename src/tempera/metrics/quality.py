"""Quality of a set of pictures: scores of each picture, then metrics over the set, each with a
bootstrap interval.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.metrics import bootstrap, table
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Evaluator, Networks, Pictures
from tempera.runtime.files import replacing
from tempera.runtime.row_store import Row, Store

ENOUGH = 16
"""Distances between sets (FID, KID, precision, recall) need this many pictures."""


def score_pictures(
    networks: Networks,
    prompts: Sequence[Prompt],
    picture: Callable[[Prompt], Pictures],
    store: Store,
    batch: int = 64,
) -> dict[str, Row]:
    """Score each prompt's picture, in batches, unless the store holds its scores already.

    Args:
        networks: what scores them.
        prompts: what was asked for.
        picture: the prompt's picture, uint8 [3, h, w].
        store: where scores are kept.
        batch: pictures scored at once.

    Returns:
        All rows of the store by prompt id: `features` [D] and a column for each score.
    """
    missing = set(store.missing([prompt.id for prompt in prompts]))
    todo = [prompt for prompt in prompts if prompt.id in missing]
    for first in range(0, len(todo), batch):
        group = todo[first : first + batch]
        store.add(_scored(networks, group, np.stack([picture(prompt) for prompt in group])))
    return store.rows()


@torch.inference_mode()
def _scored(networks: Networks, prompts: Sequence[Prompt], pictures: Pictures) -> list[Row]:
    images = torch.from_numpy(pictures)
    columns: dict[str, Any] = {"id": [prompt.id for prompt in prompts]}
    if networks.features is not None:
        columns["features"] = networks.features(images).double().cpu().tolist()
    for score in networks.scores:
        columns |= {
            name: values.double().cpu().tolist() for name, values in score(images, prompts).items()
        }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


@torch.inference_mode()
def reference_features(
    evaluator: Evaluator, networks: Networks, cache: Path | None = None
) -> Array | None:
    """Features of the evaluator's real pictures, float64 [m, D], or None where it has none.

    They are kept in `cache` (~/.cache/tempera unless given) under the evaluator's identity.
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
    except ValueError:  # the cache only saves time: without it the features are computed again
        pass
    return features


def quality(
    rows: Sequence[Mapping[str, Any]],
    networks: Networks,
    reference: Array | None,
    resamples: int,
) -> dict[str, Interval]:
    """The metrics over a set of pictures, by key: distances from the reference features [m, D], and
    means of the scores.

    Raises:
        TemperaError: a distance has no entry in the table of metrics.
    """
    return _distances(rows, networks, reference, min(resamples, 200)) | _means(rows, resamples)


def _distances(
    rows: Sequence[Mapping[str, Any]], networks: Networks, reference: Array | None, resamples: int
) -> dict[str, Interval]:
    if reference is None or len(rows) < ENOUGH or any(row.get("features") is None for row in rows):
        return {}
    features = np.array([row["features"] for row in rows], np.float64)
    return {
        table.find(key).key: distance(features, reference, resamples)
        for key, distance in networks.distances.items()
    }


def _means(rows: Sequence[Mapping[str, Any]], resamples: int) -> dict[str, Interval]:
    """The mean of every metric's scores; prompts are the units, and what a prompt leaves open does
    not count.
    """
    metrics = {}
    for metric in table.METRICS:
        values = np.array([[_number(row.get(name)) for name in metric.columns] for row in rows])
        interval = bootstrap.ratio(np.nansum(values, 1), (~np.isnan(values)).sum(1), resamples)
        if interval.n:
            metrics[metric.key] = interval
    return metrics


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
