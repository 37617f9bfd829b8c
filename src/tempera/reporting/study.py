"""Relaxations at equal accepted length: what each costs, and which divergence predicts it. Tables
for reports on runs with `expected_length=` (docs/study.md).

Runs that differ only in their seed are one *arm*. A unit is a prompt, with the sums over its seeds;
resamples draw prompts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from tempera.metrics import table
from tempera.metrics.comparisons import (
    Comparison,
    Weighted,
    compare_all,
    rank_correlation,
    spearman,
)
from tempera.reporting.baseline import CONTEXT
from tempera.reporting.collect import Run
from tempera.reporting.tables import Section, number

REFERENCE = "uniform_rsd"
"""The relaxation that others are compared with, unless the report has a `baseline`."""
EXACT = "eagle"
"""The method of the exact row."""
DIVERGENCES = ("tv_bound", "kl_per_token", "logprob_per_token")


@dataclass
class Arm:
    """The runs of one method at one accepted length.

    Attributes:
        name: the family.
        length: the accepted length that was wanted; None for plain autoregression and the exact
            row.
        runs: one per seed.
    """

    name: str
    length: float | None
    runs: list[Run] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name and length."""
        return self.name if self.length is None else f"{self.name} at {self.length:g}"

    @property
    def plain(self) -> bool:
        """Whether this is plain autoregression."""
        return self.runs[0].plain

    @property
    def seeds(self) -> dict[Any, Run]:
        """The run of each seed."""
        return {run.seed: run for run in self.runs}

    def weighted(self, metric: str, seeds: Iterable[Any], prompts: Sequence[str]) -> Weighted:
        """A metric by prompt, summed over seeds; prompts that a seed lacks have no weight."""
        runs = [self.seeds[seed] for seed in seeds]
        above, below = np.zeros(len(prompts)), np.zeros(len(prompts))
        for run in runs:
            has = metric in run.values
            values, weights = (
                (one[metric] if has else pd.Series(dtype=float)).reindex(prompts).to_numpy(float)
                for one in (run.values, run.weights)
            )
            above, below = above + values * weights, below + weights
        known = ~np.isnan(above)
        return Weighted(np.where(known, above, 0.0), np.where(known, below, 0.0))

    def measures(self, metric: str) -> bool:
        """Whether some prompt has this metric."""
        return any(metric in run.values and run.values[metric].notna().any() for run in self.runs)

    def value(self, metric: str) -> float:
        """The mean over seeds of a metric of whole runs; NaN if it is unknown or infinite."""
        return float(np.mean([run.value(metric) for run in self.runs]))


def tables(runs: Sequence[Run], baseline: str | None = None) -> list[Section]:
    """The tables of the study; empty unless two relaxations have the same `expected_length`.

    Args:
        baseline: the family to compare with at equal length; `REFERENCE` by default.
    """
    found = []
    for arms in _groups(runs):
        relaxed = [arm for arm in arms if arm.length is not None]
        if len({arm.length for arm in relaxed}) == len(relaxed):
            continue
        reference = baseline or REFERENCE
        plain = [arm for arm in arms if arm.plain]
        known = {arm.length: arm for arm in relaxed if arm.name == reference}
        found.append(_overview(arms))
        found += _compared(
            "Study: difference from plain autoregression",
            [(arm, plain[0]) for arm in arms if plain and arm is not plain[0]],
            ("quality",),
        )
        found += _compared(
            f"Study: difference from {reference} at equal length",
            [(arm, known[arm.length]) for arm in relaxed if arm is not known.get(arm.length, arm)],
            ("acceptance", "quality", "divergence"),
        )
        found += _correlations(relaxed)
    return found


def _groups(runs: Sequence[Run]) -> list[list[Arm]]:
    """The arms of each model and sampling: plain autoregression, the exact row, and relaxations."""
    groups: dict[tuple[Any, ...], dict[tuple[str, float | None], Arm]] = {}
    for run in runs:
        if run.matched is None and not run.plain and run.method != EXACT:
            continue
        context = tuple(run.settings.get(name) for name in CONTEXT if name != "seed")
        length = None if run.matched is None else run.expected_length
        arms = groups.setdefault(context, {})
        arms.setdefault((run.family, length), Arm(run.family, length)).runs.append(run)
    return [list(arms.values()) for arms in groups.values()]


def _overview(arms: Sequence[Arm]) -> Section:
    """What was found for each arm, its accepted length, and its divergences."""
    keys = [metric for metric in table.METRICS if metric.key in DIVERGENCES]
    lines = []
    for arm in arms:
        found = [run.matched for run in arm.runs if run.matched]
        line = {
            "run": arm.label,
            "found": ", ".join(dict.fromkeys(f"{one.option}={one.value:g}" for one in found)),
            "length, calibration": ", ".join(dict.fromkeys(f"{one.length:.3f}" for one in found)),
            "length, evaluation": number(arm.value("accepted_length"), ".3f"),
        }
        for metric in keys:
            text = number(arm.value(metric.key), metric.format)
            line[metric.title] = "infinite" if _infinite(arm, metric.key) else text
        lines.append(line)
    images = " or ".join(map(str, sorted({run.images for arm in arms for run in arm.runs})))
    seeds = ", ".join(sorted({str(seed) for arm in arms for seed in arm.seeds}))
    text = (
        f"{images} images a run, seed {seeds}. Each relaxation's free parameter was found on "
        "calibration prompts; its accepted length there, and on the evaluation's prompts."
    )
    title = "Study: relaxations at equal accepted length"
    return Section(title, pd.DataFrame(lines), text)


def _correlations(arms: Sequence[Arm]) -> list[Section]:
    """Rank correlation of every divergence with every loss, over all relaxations, and over those of
    each length.
    """
    if len(arms) < 3:
        return []
    losses = [metric for metric in table.METRICS if _is_loss(metric, arms)]
    lengths = sorted({arm.length for arm in arms if arm.length is not None})
    sets = [("all lengths", arms)]
    if len(lengths) > 1:
        sets += [(f"{one:g}", [arm for arm in arms if arm.length == one]) for one in lengths]
    lines = [
        {"divergence, length": f"{_divergence(key)}, {title}"}
        | {f"loss of {loss.title}": _correlation(chosen, key, loss) for loss in losses}
        for title, chosen in sets
        for key in DIVERGENCES
        if len(chosen) >= 3 and all(arm.measures(key) for arm in chosen)
    ]
    text = (
        "Spearman's rank correlation of a divergence with the loss of quality, over "
        f"{len(arms)} relaxations, with a 95% interval from resampled prompts, not corrected for "
        "their number. 1: the divergence ranks the losses perfectly. Noise in the losses moves the "
        "correlation towards 0. An infinite divergence ranks above all others. Metrics that images "
        "have only together, such as recall, have no interval here."
    )
    return [Section("Study: which divergence predicts the loss", pd.DataFrame(lines), text)]


def _is_loss(metric: table.Metric, arms: Sequence[Arm]) -> bool:
    """Whether the metric is a quality that all arms have."""
    return (
        metric.section == "quality"
        and metric.higher_is_better is not None
        and (metric.paired or metric.in_report)
        and all(np.isfinite(arm.value(metric.key)) for arm in arms)
    )


def _correlation(arms: Sequence[Arm], divergence: str, loss: table.Metric) -> str:
    """Rank correlation over the arms; its sign is that of the loss."""
    sign = -1.0 if loss.higher_is_better else 1.0
    outer = -1.0 if divergence == "logprob_per_token" else 1.0
    seeds, prompts = _shared(arms)
    by_prompt = loss.paired and all(arm.measures(loss.key) for arm in arms)
    if not by_prompt or not _same_set(loss, arms, seeds):
        values = np.array([arm.value(loss.key) for arm in arms])
        divergences = [arm.weighted(divergence, seeds, prompts).mean for arm in arms]
        return number(sign * outer * float(spearman(np.array(divergences), values)), "+.2f")
    left, right = (
        [arm.weighted(key, seeds, prompts) for arm in arms] for key in (divergence, loss.key)
    )
    interval = rank_correlation([_times(sign * outer, one) for one in left], right)
    if not interval.n:
        return "–"
    low, high = (number(one, "+.2f") for one in (interval.low, interval.high))
    return f"{number(interval.value, '+.2f')} ({low} … {high})"


def _times(sign: float, values: Weighted) -> Weighted:
    return Weighted(sign * values.numerators, values.denominators)


def _compared(
    title: str, pairs: Sequence[tuple[Arm, Arm]], sections: Sequence[str]
) -> list[Section]:
    """The paired metrics of these sections, the left arm of each pair less the right one; nothing
    without pairs.
    """
    if not pairs:
        return []
    arms = [arm for pair in pairs for arm in pair]
    metrics = [
        metric
        for metric in table.report_order()
        if metric.paired
        and metric.section in sections
        and any(
            not arm.plain and arm.measures(metric.key) and np.isfinite(arm.value(metric.key))
            for arm in arms
        )
    ]
    seeds, prompts = _shared(arms)
    weighted = {
        (place, metric.heading): tuple(arm.weighted(metric.key, seeds, prompts) for arm in pair)
        for place, pair in enumerate(pairs)
        for metric in metrics
        if _same_set(metric, pair, seeds)
    }
    known = {
        cell: (left, right) for cell, (left, right) in weighted.items() if _overlap(left, right)
    }
    found = dict(zip(known, compare_all(list(known.values())), strict=True))
    lines = [
        {"run": arm.label}
        | {one.heading: _difference(found.get((place, one.heading)), one) for one in metrics}
        for place, (arm, _) in enumerate(pairs)
    ]
    text = (
        "Paired by prompt and seed. Intervals are bootstrap intervals of level 1 − 0.05 / "
        f"{len(known)}: all {len(known)} of this table hold together with 95% confidence. *: "
        f"Holm's procedure on the {len(known)} p-values of the paired bootstrap rejects equality "
        "at 5%. FID and KID are resampled to first order in the images' weights."
    )
    return [Section(title, pd.DataFrame(lines), text)]


def _overlap(left: Weighted, right: Weighted) -> bool:
    shared = (left.denominators > 0) & (right.denominators > 0)
    return left.finite and right.finite and bool(shared.any())


def _same_set(metric: table.Metric, arms: Sequence[Arm], seeds: Sequence[Any]) -> bool:
    """Whether the arms' values of the metric can be compared: those of a whole set can if all have
    the same prompts.
    """
    sets = [[set(arm.seeds[seed].values.index) for seed in seeds] for arm in arms]
    return not metric.of_set or all(one == sets[0] for one in sets)


def _infinite(arm: Arm, metric: str) -> bool:
    return any(metric in run.values and np.isinf(run.values[metric]).any() for run in arm.runs)


def _shared(arms: Sequence[Arm]) -> tuple[list[Any], list[str]]:
    """The seeds that all arms have, and their prompts."""
    seeds = [seed for seed in arms[0].seeds if all(seed in arm.seeds for arm in arms)]
    every = (arm.seeds[seed].values.index for arm in arms for seed in seeds)
    return seeds, list(dict.fromkeys(prompt for index in every for prompt in index))


def _difference(found: Comparison | None, metric: table.Metric) -> str:
    """A difference with its interval; with an asterisk if it is significant."""
    if found is None:
        return "–"
    ends = (found.difference.value, found.difference.low, found.difference.high)
    value, low, high = (number(one, "+" + metric.format) for one in ends)
    return f"{value}{'*' if found.significant else ''} ({low} … {high})"


def _divergence(key: str) -> str:
    return "fall of log-probability" if key == "logprob_per_token" else table.find(key).title
