"""Relaxations at equal accepted length: what each costs, and which divergence predicts it. Tables
for reports on runs with `expected_length=` (docs/study.md).

Runs that differ only in their seed are one *arm*. A unit is a prompt, with the sums over its seeds;
resamples draw prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tempera.metrics import table
from tempera.metrics.comparisons import (
    Comparison,
    Weighted,
    compare_all,
    rank_correlation,
    spearman,
)
from tempera.reporting.baseline import CONTEXT
from tempera.reporting.console import number
from tempera.reporting.run_names import is_plain

REFERENCE = "uniform_rsd"
"""The relaxation that others are compared with, unless the report has a `baseline`."""
EXACT = "eagle"
"""The method of the exact row."""
DIVERGENCES = ("tv_bound", "kl_per_token", "logprob_per_token")


@dataclass(frozen=True)
class StudyTable:
    """A table of the study: text that introduces it, headings, and lines of cells."""

    title: str
    text: str
    head: list[str]
    lines: list[list[str]]


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
    runs: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name and length."""
        return self.name if self.length is None else f"{self.name} at {self.length:g}"

    @property
    def plain(self) -> bool:
        """Whether this is plain autoregression."""
        return is_plain(self.runs[0]["settings"])

    @cached_property
    def seeds(self) -> dict[Any, Mapping[str, Any]]:
        """The run of each seed."""
        return {run["settings"].get("seed"): run for run in self.runs}

    def weighted(self, metric: str, seeds: Iterable[Any], prompts: Sequence[str]) -> Weighted:
        """A metric by prompt, summed over seeds; prompts that a seed lacks have no weight."""
        found = np.zeros((len(prompts), 2))
        for seed in seeds:
            values = self.seeds[seed]["prompts"]
            for place, prompt in enumerate(prompts):
                value, weight = values.get(prompt, {}).get(metric, (np.nan, 0.0))
                found[place] += (value * weight, weight)
        known = ~np.isnan(found[:, 0])
        return Weighted(np.where(known, found[:, 0], 0.0), np.where(known, found[:, 1], 0.0))

    def measures(self, metric: str) -> bool:
        """Whether some prompt has this metric."""
        return any(metric in one for run in self.runs for one in run["prompts"].values())

    def value(self, metric: str) -> float:
        """The mean over seeds of a metric of whole runs; NaN if it is unknown or infinite."""
        values = [run["metrics"].get(metric, {}).get("value") for run in self.runs]
        return float(np.mean([np.nan if value is None else value for value in values]))


def tables(rows: Sequence[Mapping[str, Any]], baseline: str | None = None) -> list[StudyTable]:
    """The tables of the study; empty unless two relaxations have the same `expected_length`.

    Args:
        rows: runs as `tempera.reporting.collect` reads them.
        baseline: the family to compare with at equal length; `REFERENCE` by default.
    """
    found = []
    for arms in _groups(rows):
        lengths = [arm.length for arm in arms if arm.length is not None]
        if len(set(lengths)) == len(lengths):
            continue
        relaxed = [arm for arm in arms if arm.length is not None]
        found.append(_overview(arms))
        if any(arm.plain for arm in arms):
            found.append(_against_plain(arms))
        found += _against_reference(relaxed, baseline or REFERENCE)
        found += _correlations(relaxed)
    return found


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Arm]]:
    """The arms of each model and sampling: plain autoregression, the exact row, and relaxations."""
    groups: dict[tuple[Any, ...], dict[tuple[str, float | None], Arm]] = {}
    for row in rows:
        settings = row["settings"]
        unmatched = row["matched"] is None
        if unmatched and not is_plain(settings) and settings["method"] != EXACT:
            continue
        context = tuple(settings.get(name) for name in CONTEXT if name != "seed")
        length = None if unmatched else settings["expected_length"]
        arms = groups.setdefault(context, {})
        arms.setdefault((row["family"], length), Arm(row["family"], length)).runs.append(row)
    return [list(arms.values()) for arms in groups.values()]


def _overview(arms: Sequence[Arm]) -> StudyTable:
    """What was found for each arm, its accepted length, and its divergences."""
    keys = [metric for metric in table.METRICS if metric.key in DIVERGENCES]
    lines = []
    for arm in arms:
        matches = {
            f"{run['matched']['option']}={run['matched']['value']:g}": run["matched"]["length"]
            for run in arm.runs
            if run["matched"]
        }
        lines.append(
            [
                arm.label,
                ", ".join(matches),
                ", ".join(f"{length:.3f}" for length in matches.values()),
                number(arm.value("accepted_length"), ".3f"),
                *(
                    "infinite"
                    if _infinite(arm, metric.key)
                    else _cell(arm.value(metric.key), metric.format)
                    for metric in keys
                ),
            ]
        )
    images = sorted({run["images"] for arm in arms for run in arm.runs})
    seeds = sorted({str(seed) for arm in arms for seed in arm.seeds})
    text = (
        f"{' or '.join(map(str, images))} images a run, seed {', '.join(seeds)}. Each relaxation's "
        "free parameter was found on calibration prompts; its accepted length there, and on the "
        "evaluation's prompts."
    )
    head = ["run", "found", "length, calibration", "length, evaluation"]
    return StudyTable(
        "Study: relaxations at equal accepted length",
        text,
        [*head, *(metric.title for metric in keys)],
        lines,
    )


def _against_plain(arms: Sequence[Arm]) -> StudyTable:
    """Quality less that of plain autoregression."""
    plain = next(arm for arm in arms if arm.plain)
    others = [arm for arm in arms if arm is not plain]
    metrics = _paired(arms, ("quality",))
    lines, count = _compared([(arm, plain) for arm in others], metrics)
    return StudyTable(
        "Study: difference from plain autoregression",
        _explained(count),
        ["run", *(metric.heading for metric in metrics)],
        [[arm.label, *cells] for arm, cells in zip(others, lines, strict=True)],
    )


def _against_reference(arms: Sequence[Arm], reference: str) -> list[StudyTable]:
    """Every metric less that of the reference relaxation at the same length."""
    known = {arm.length: arm for arm in arms if arm.name == reference}
    pairs = [
        (arm, known[arm.length])
        for arm in arms
        if arm.length in known and arm is not known[arm.length]
    ]
    if not pairs:
        return []
    metrics = _paired(arms, ("acceptance", "quality", "divergence"))
    lines, count = _compared(pairs, metrics)
    return [
        StudyTable(
            f"Study: difference from {reference} at equal length",
            _explained(count),
            ["run", *(metric.heading for metric in metrics)],
            [[arm.label, *cells] for (arm, _), cells in zip(pairs, lines, strict=True)],
        )
    ]


def _correlations(arms: Sequence[Arm]) -> list[StudyTable]:
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
    lines = []
    for title, chosen in sets:
        for key in DIVERGENCES:
            if len(chosen) >= 3 and all(arm.measures(key) for arm in chosen):
                cells = [_correlation(chosen, key, loss) for loss in losses]
                lines.append([f"{_divergence(key)}, {title}", *cells])
    text = (
        "Spearman's rank correlation of a divergence with the loss of quality, over "
        f"{len(arms)} relaxations, with a 95% interval from resampled prompts, not corrected for "
        "their number. 1: the divergence ranks the losses perfectly. Noise in the losses moves the "
        "correlation towards 0. An infinite divergence ranks above all others. Metrics that images "
        "have only together, such as recall, have no interval here."
    )
    head = ["divergence, length", *(f"loss of {metric.title}" for metric in losses)]
    return [StudyTable("Study: which divergence predicts the loss", text, head, lines)]


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
        return _cell(sign * outer * float(spearman(np.array(divergences), values)), "+.2f")
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
    pairs: Sequence[tuple[Arm, Arm]], metrics: Sequence[table.Metric]
) -> tuple[list[list[str]], int]:
    """Cells of every pair, and the number of comparisons."""
    seeds, prompts = _shared([arm for pair in pairs for arm in pair])
    weighted = [
        (left.weighted(metric.key, seeds, prompts), right.weighted(metric.key, seeds, prompts))
        for left, right in pairs
        for metric in metrics
    ]
    known = [
        place
        for place, pair in enumerate(weighted)
        if _overlap(*pair)
        and _same_set(metrics[place % len(metrics)], pairs[place // len(metrics)], seeds)
    ]
    found = dict(zip(known, compare_all([weighted[place] for place in known]), strict=True))
    cells = [
        _difference(found.get(place), metrics[place % len(metrics)])
        for place in range(len(weighted))
    ]
    width = len(metrics)
    return [cells[first : first + width] for first in range(0, len(cells), width)], len(known)


def _overlap(left: Weighted, right: Weighted) -> bool:
    shared = (left.denominators > 0) & (right.denominators > 0)
    return left.finite and right.finite and bool(shared.any())


def _same_set(metric: table.Metric, arms: Sequence[Arm], seeds: Sequence[Any]) -> bool:
    """Whether the arms' values of the metric can be compared: those of a whole set can if all have
    the same prompts.
    """
    sets = [[arm.seeds[seed]["prompts"].keys() for seed in seeds] for arm in arms]
    return not metric.of_set or all(one == sets[0] for one in sets)


def _infinite(arm: Arm, metric: str) -> bool:
    values = (run["prompts"].values() for run in arm.runs)
    return any(np.isinf(one.get(metric, (0.0,))[0]) for prompts in values for one in prompts)


def _shared(arms: Sequence[Arm]) -> tuple[list[Any], list[str]]:
    """The seeds that all arms have, and their prompts."""
    seeds = [seed for seed in arms[0].seeds if all(seed in arm.seeds for arm in arms)]
    prompts = dict.fromkeys(
        prompt for arm in arms for seed in seeds for prompt in arm.seeds[seed]["prompts"]
    )
    return seeds, list(prompts)


def _paired(arms: Sequence[Arm], sections: Sequence[str]) -> list[table.Metric]:
    """The paired metrics of these sections that some arm has, in the report's order."""
    return [
        metric
        for metric in table.report_order()
        if metric.paired
        and metric.section in sections
        and any(
            arm.measures(metric.key) and np.isfinite(arm.value(metric.key))
            for arm in arms
            if not arm.plain
        )
    ]


def _difference(found: Comparison | None, metric: table.Metric) -> str:
    """A difference with its interval; with an asterisk if it is significant."""
    if found is None:
        return "–"
    form = "+" + metric.format
    value, low, high = (
        number(one, form)
        for one in (found.difference.value, found.difference.low, found.difference.high)
    )
    return f"{value}{'*' if found.significant else ''} ({low} … {high})"


def _explained(count: int) -> str:
    return (
        "Paired by prompt and seed. Intervals are bootstrap intervals of level 1 − 0.05 / "
        f"{count}: all {count} of this table hold together with 95% confidence. *: Holm's "
        f"procedure on the {count} p-values of the paired bootstrap rejects equality at 5%. FID "
        "and KID are resampled to first order in the images' weights."
    )


def _divergence(key: str) -> str:
    return "fall of log-probability" if key == "logprob_per_token" else table.find(key).title


def _cell(value: float, form: str) -> str:
    return number(value, form) if np.isfinite(value) else "–"
