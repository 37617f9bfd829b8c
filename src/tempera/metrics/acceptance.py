"""Metrics of decoding itself, from a run's records. Intervals resample prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval

MEANS = (
    "target_passes", "residual_trials", "residual_failures", "tv", "tv_bound", "kl_per_token",
    "top1", "top10", "entropy", "collision", "proximity",
)  # fmt: skip
"""Columns whose means over the prompts that have a value are metrics."""


def acceptance(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Acceptance, throughput and divergence by metric key, from one record per prompt (see
    `tempera.evaluation.pipeline.records`). Metrics whose columns are missing are left out.
    """
    column = {
        name: np.array([row[name] for row in rows], np.float64)  # None, of NaN, becomes NaN
        for name in rows[0]
        if any(isinstance(row[name], int | float) for row in rows)
    }
    tokens = np.array([len(row["tokens"]) for row in rows], np.float64)
    kept, tested = (
        np.array([sum(row[name]) for row in rows], np.float64) for name in ("accepted", "tested")
    )
    metrics = {
        "accepted_length": bootstrap.ratio(tokens, column["rounds"]),
        "tau": bootstrap.ratio(kept, column["rounds"]),
        "throughput": bootstrap.ratio(tokens, column["seconds"]),
    }
    if tested.any():
        metrics["acceptance_rate"] = bootstrap.ratio(kept, tested)
    if "residual_trials" in column and (tested > kept).any():
        metrics["trials_per_rejection"] = bootstrap.ratio(column["residual_trials"], tested - kept)
    for name in MEANS:
        if name in column and len(known := column[name][~np.isnan(column[name])]):
            metrics[name] = bootstrap.mean(known)
    if "logprob" in column:
        known = ~np.isnan(column["logprob"])
        sums, lengths = column["logprob"][known], tokens[known]
        metrics["logprob_per_token"] = bootstrap.ratio(sums, lengths)
        if "logprob_squares" in column:
            squares = column["logprob_squares"][known]

            def deviation(drawn: Array) -> Array:
                """Over all tokens, from each prompt's sum and sum of squares."""
                total = drawn @ lengths
                variance = drawn @ squares / total - (drawn @ sums / total) ** 2
                return np.asarray(np.sqrt(np.maximum(variance, 0)))

            metrics["logprob_deviation"] = bootstrap.resampled(deviation, len(lengths))
    return metrics
