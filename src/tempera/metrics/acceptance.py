"""Metrics of decoding itself, from a run's records. Intervals resample prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval


def acceptance(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Acceptance, throughput and divergence by metric key, from one record per prompt (see
    `tempera.evaluation.pipeline.records`). Metrics whose columns are missing are left out.
    """
    column = {
        name: np.array([row[name] for row in rows], np.float64)
        for name in rows[0]
        if isinstance(rows[0][name], int | float)
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
    if "logprob" in column:
        metrics["logprob_per_token"] = bootstrap.ratio(column["logprob"], tokens)
    if tested.any():
        metrics["acceptance_rate"] = bootstrap.ratio(kept, tested)
    for name in ("target_passes", "residual_trials", "residual_failures"):
        if name in column:
            metrics[name] = bootstrap.mean(column[name])
    if "residual_trials" in column and (tested > kept).any():
        metrics["trials_per_rejection"] = bootstrap.ratio(column["residual_trials"], tested - kept)
    for name in ("tv", "tv_bound", "kl_per_token", "top1", "top10", "entropy", "proximity"):
        if name in column and not np.isnan(column[name]).all():
            metrics[name] = bootstrap.mean(column[name][~np.isnan(column[name])])
    if "logprob" in column and "logprob_squares" in column:
        metrics["logprob_deviation"] = _deviation(
            column["logprob"], column["logprob_squares"], tokens
        )
    return metrics


def _deviation(sums: Array, squares: Array, tokens: Array) -> Interval:
    """Standard deviation over all tokens, from each prompt's sum and sum of squares."""

    def deviation(drawn: Array) -> Array:
        drawn_tokens = drawn @ tokens
        with np.errstate(invalid="ignore"):  # greedy relaxed rules keep tokens of probability 0
            variance = drawn @ squares / drawn_tokens - (drawn @ sums / drawn_tokens) ** 2
        return np.sqrt(np.maximum(variance, 0))

    n = len(tokens)
    drawn = bootstrap.counts(n, 1000)
    return bootstrap.percentile(float(deviation(np.ones(n))), deviation(drawn), n)
