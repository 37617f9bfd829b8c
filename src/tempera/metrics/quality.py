"""Quality of a set of pictures: each picture's scores, then metrics of the set with bootstrap
intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.metrics import bootstrap, table
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import BATCH, Evaluator, Networks, Pictures
from tempera.metrics.reference import feature_cache
from tempera.metrics.table import Metric
from tempera.runtime.files import cache_directory, replacing
from tempera.runtime.row_store import Row, Store

ENOUGH = 16
"""Distances between sets (FID, KID, precision, recall) need at least this many pictures."""
UNSEEN = torch.empty(0, dtype=torch.uint8)
"""In place of the pictures that a score does not look at."""


@torch.inference_mode()
def score_pictures(
    networks: Networks,
    prompts: Sequence[Prompt],
    picture: Callable[[Prompt], Pictures],
    store: Store,
    batch: int = BATCH,
) -> dict[str, Row]:
    """Score each prompt's picture, in batches, unless the store already holds its scores.

    Args:
        networks: the networks that score pictures.
        prompts: the prompts of the pictures.
        picture: returns a prompt's picture, uint8 [3, h, w].
        store: keeps the scores.
        batch: number of pictures scored at once.

    Returns:
        All rows of the store by prompt id: `features` [D] and one column per score.
    """
    missing = set(store.missing([prompt.id for prompt in prompts]))
    todo = [prompt for prompt in prompts if prompt.id in missing]
    for first in track(range(0, len(todo), batch), "scoring", disable=not todo, transient=True):
        group = todo[first : first + batch]
        for same, images in _of_one_size(group, picture) if networks.sees else [(group, UNSEEN)]:
            store.add(_scored(networks, same, images))
    return store.rows()


def _of_one_size(
    prompts: Sequence[Prompt], picture: Callable[[Prompt], Pictures]
) -> Iterator[tuple[list[Prompt], Tensor]]:
    """Prompts whose pictures have one size, with these, uint8 [B, 3, h, w]."""
    pictures = {prompt.id: picture(prompt) for prompt in prompts}
    for size in dict.fromkeys(one.shape for one in pictures.values()):
        same = [prompt for prompt in prompts if pictures[prompt.id].shape == size]
        yield same, torch.from_numpy(np.stack([pictures[prompt.id] for prompt in same]))


def _scored(networks: Networks, prompts: Sequence[Prompt], images: Tensor) -> list[Row]:
    """The rows of some prompts."""
    outputs: dict[str, Any] = {}
    if networks.features is not None:
        outputs["features"] = networks.features(images)
    for score in networks.scores:
        outputs |= score(images, prompts)
    columns = {name: values.double().cpu().tolist() for name, values in outputs.items()}
    return [
        {"id": prompt.id} | {name: values[index] for name, values in columns.items()}
        for index, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def reference_features(
    evaluator: Evaluator, networks: Networks, edge: int, cache: Path | None = None
) -> Array | None:
    """Features of the evaluator's real pictures, float64 [m, D], or None if it has none. They are
    cached on disk under the evaluator's identity.

    Args:
        evaluator: provides the real pictures.
        networks: the group of its networks that computes features.
        edge: edge length of the generated pictures, in pixels.
        cache: directory of the cache; the user's cache directory by default.
    """
    if networks.features is None or not networks.distances:
        return None
    names = [feature_cache(evaluator.identity), networks.identity, str(edge)]
    path = (cache or cache_directory()) / f"{'-'.join(filter(None, names))}.npy"
    with suppress(OSError, ValueError):
        cached: Array = np.load(path)
        return cached
    batches = [
        networks.features(torch.from_numpy(pictures)).double().cpu().numpy()
        for pictures in track(evaluator.reference(edge), "reference pictures", transient=True)
    ]
    if not batches:
        return None
    features: Array = np.concatenate(batches)
    with (
        suppress(ValueError),  # the cache only saves time: the features can be computed again
        replacing(path) as temporary,
        temporary.open("wb") as file,
    ):
        np.save(file, features)
    return features


def quality(
    rows: Sequence[Mapping[str, Any]],
    networks: Networks,
    reference: Array | None,
    resamples: int,
    device: torch.device | None = None,
    own: Sequence[Metric] = (),
) -> dict[str, Interval]:
    """The metrics of a set of pictures, by key: distances from the reference, other metrics of the
    whole set, and means of the pictures' scores.

    Args:
        rows: each picture's `features` [D] and scores.
        networks: the networks that computed them.
        reference: features of real pictures, [m, D].
        resamples: number of bootstrap resamples for each interval.
        device: computes the distances if it is CUDA; otherwise the CPU does.
        own: metrics that the table lacks.

    Raises:
        TemperaError: a distance has no entry in the table of metrics.
    """
    import pandas as pd  # takes half a second

    frame = pd.DataFrame(rows)
    metrics: dict[str, Interval] = {}
    if len(frame) >= ENOUGH and "features" in frame and frame["features"].notna().all():
        compute_device = (
            device if device is not None and device.type == "cuda" else torch.device("cpu")
        )
        features = torch.tensor(
            np.stack(frame["features"]), dtype=torch.float64, device=compute_device
        )
        few = min(resamples, 200)
        for key, statistic in networks.statistics.items():
            metrics[table.find(key).key] = statistic(features[:, networks.pool or 0 :], few)
        for key, distance in networks.distances.items():
            if reference is not None:
                metrics[table.find(key).key] = distance(
                    features[:, : networks.pool], reference[:, : networks.pool], few
                )
    for metric in {metric.key: metric for metric in (*table.METRICS, *own)}.values():
        values = frame.reindex(columns=list(metric.columns)).to_numpy(np.float64)
        weights = (~np.isnan(values)).sum(1).astype(np.float64)
        sums = np.nansum(values, 1)
        if metric.weight in frame:
            sums, weights = (one * frame[metric.weight].to_numpy() for one in (sums, weights))
        interval = bootstrap.ratio(sums, weights, resamples)
        if interval.n:
            metrics[metric.key] = interval
    return metrics
