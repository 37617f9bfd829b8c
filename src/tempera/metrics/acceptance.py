"""Metrics of decoding itself, from a run's records. Intervals resample prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval

MEANS = (
    "target_passes",
    "residual_trials",
    "residual_failures",
    "tv",
    "tv_bound",
    "kl_per_token",
    "top1",
    "top10",
    "entropy",
    "collision",
    "proximity",
)
"""Columns whose means over the prompts that have a value are metrics."""
KEYS = {"proximity": "proximity_set_size"}
"""Metrics that are not called as their columns, because an option is."""


def acceptance(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Acceptance, throughput and divergence by metric key, from one record per prompt (see
    `tempera.evaluation.pipeline.records`). Metrics whose columns are missing are left out.
    """
    column = {name: _numbers(rows, name) for name in rows[0] if _has_numbers(rows, name)}
    tokens = np.array([len(row["tokens"]) for row in rows], np.float64)
    accepted = _totals(rows, "accepted")
    tested = _totals(rows, "tested")
    rejected = tested - accepted
    metrics = {
        "accepted_length": bootstrap.ratio(tokens, column["rounds"]),
        "tau": bootstrap.ratio(accepted, column["rounds"]),
        "throughput": bootstrap.ratio(tokens, column["seconds"]),
    }
    if tested.any():
        metrics["acceptance_rate"] = bootstrap.ratio(accepted, tested)
    if "residual_trials" in column and rejected.any():
        metrics["trials_per_rejection"] = bootstrap.ratio(column["residual_trials"], rejected)
    for name in MEANS:
        if name not in column:
            continue
        values = column[name][~np.isnan(column[name])]
        if len(values):
            metrics[KEYS.get(name, name)] = bootstrap.mean(values)
    if "logprob" in column:
        has_logprob = ~np.isnan(column["logprob"])
        sums = column["logprob"][has_logprob]
        lengths = tokens[has_logprob]
        metrics["logprob_per_token"] = bootstrap.ratio(sums, lengths)
        if "logprob_squares" in column:
            squares = column["logprob_squares"][has_logprob]
            metrics["logprob_deviation"] = _deviation(sums, squares, lengths)
    return metrics


def _has_numbers(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(isinstance(row[name], int | float) for row in rows)


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> Array:
    """A column, [prompts]; None, which stands for NaN in JSON, becomes NaN."""
    return np.array([row[name] for row in rows], np.float64)


def _totals(rows: Sequence[Mapping[str, Any]], name: str) -> Array:
    """The sum of each prompt's counts by depth, [prompts]."""
    return np.array([sum(row[name]) for row in rows], np.float64)


def _deviation(sums: Array, squares: Array, lengths: Array) -> Interval:
    """The standard deviation over all tokens.

    Args:
        sums, squares: each prompt's sum of values and of their squares, [prompts].
        lengths: its number of tokens, [prompts].
    """

    def deviation(drawn: Array) -> Array:
        total = drawn @ lengths
        variance = drawn @ squares / total - (drawn @ sums / total) ** 2
        return np.asarray(np.sqrt(np.maximum(variance, 0)))

    return bootstrap.resampled(deviation, len(lengths))
