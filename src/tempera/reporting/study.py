"""Relaxations at equal accepted length: what each costs, and which divergence predicts it. Tables
for reports on runs with `expected_length=` (docs/study.md).

Runs that differ only in their seed are pooled to one *arm*. A unit is a prompt, with the sums over
its seeds; resamples draw prompts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pandas as pd

from tempera.evaluation.run_identity import DRAWS
from tempera.metrics.comparisons import Weighted, compare_all, rank_correlation
from tempera.metrics.table import Metric, find, report_order
from tempera.reporting.finished_run import Run, metrics_of
from tempera.reporting.tables import Cell, Section, table

REFERENCE = "uniform_rsd"
"""The relaxation that others are compared with, unless the report has a `baseline`."""
EXACT = "eagle"
"""The method of the exact row."""
DIVERGENCES = {"tv_bound": 1.0, "kl_per_token": 1.0, "logprob_per_token": -1.0}
"""Divergences from the target, with the sign that makes larger ones worse."""


def tables(runs: Sequence[Run], baseline: str | None = None) -> list[Section]:
    """The tables of the study; empty unless two relaxations have the same `expected_length`.

    Args:
        baseline: the family to compare with at equal length; `REFERENCE` by default.
    """
    groups = [arms for arms in _groups(runs) if _has_equal_lengths(arms)]
    differing = _differing_settings(groups)
    all_sections = []
    for arms in groups:
        settings = arms[0].settings
        where = "".join(f", {name}={settings.get(name)}" for name in differing)
        sections = _of_group(arms, baseline or REFERENCE)
        all_sections += [replace(section, title=section.title + where) for section in sections]
    return all_sections


def _differing_settings(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The settings beside the seed in which the groups differ, which their titles then tell."""
    differing = []
    for name in DRAWS:
        values = {str(arms[0].settings.get(name)) for arms in groups}
        is_told = name == "seed" or (name == "target" and "model" in differing)
        if len(values) > 1 and not is_told:
            differing.append(name)
    return differing


def _has_equal_lengths(arms: Sequence[Run]) -> bool:
    """Whether two relaxations have the same accepted length."""
    lengths = [arm.expected_length for arm in arms if arm.matched]
    return len(set(lengths)) < len(lengths)


def _of_group(arms: Sequence[Run], reference: str) -> list[Section]:
    """The tables of arms with the same model and sampling."""
    plain = next((arm for arm in arms if arm.plain), None)
    relaxed = [arm for arm in arms if arm.matched]
    references = {arm.expected_length: arm for arm in relaxed if arm.family == reference}
    sections = [_overview(arms)]
    if plain is not None:
        sections += _compared(
            "Study: difference from plain autoregression",
            [(arm, plain) for arm in arms if arm is not plain],
            ("quality",),
        )
    pairs = [(arm, references.get(arm.expected_length, arm)) for arm in relaxed]
    sections += _compared(
        f"Study: difference from {reference} at equal length",
        [(arm, other) for arm, other in pairs if arm is not other],
        ("acceptance", "quality", "divergence"),
    )
    return sections + _correlations(relaxed)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The arms of each model and sampling: plain autoregression, the exact row, and relaxations,
    each with the seeds that all of them have.
    """
    by_context: dict[tuple[str, ...], dict[str, list[Run]]] = {}
    for run in runs:
        if run.matched or run.plain or run.method == EXACT:
            context = tuple(str(run.settings.get(name)) for name in DRAWS if name != "seed")
            by_name = by_context.setdefault(context, {})
            by_name.setdefault(run.name, []).append(run)
    return [_arms(list(by_name.values())) for by_name in by_context.values()]


def _arms(runs_by_arm: Sequence[Sequence[Run]]) -> list[Run]:
    """One pooled run per arm, of the seeds that all arms have; none if they share no seed."""
    seeds_by_arm = [{run.seed for run in runs} for runs in runs_by_arm]
    shared = set.intersection(*seeds_by_arm)
    if not shared:
        return []
    return [_pooled([run for run in runs if run.seed in shared]) for runs in runs_by_arm]


def _pooled(runs: Sequence[Run]) -> Run:
    """Runs of several seeds as one; a prompt that one of them lacks has no value."""
    weights = sum(run.weights for run in runs)
    values = sum(run.values * run.weights for run in runs) / weights
    means = {}
    for key in runs[0].metrics:
        mean = np.mean([run.value(key) for run in runs])
        means[key] = {"value": float(mean)}
    seeds = ", ".join(str(run.seed) for run in runs)
    update = {"values": values, "weights": weights, "metrics": means, "seed": seeds}
    return runs[0].model_copy(update=update)


def _overview(arms: Sequence[Run]) -> Section:
    """What was found for each arm, its accepted length, and its divergences."""
    matches = [arm.matched for arm in arms]
    columns: dict[str, list[Cell]] = {
        "option": [{"text": match.option} if match else {} for match in matches],
        "found": [{"value": match.value} if match else {} for match in matches],
        "length, calibration": [{"value": match.length} if match else {} for match in matches],
        "length, evaluation": [{"value": arm.value("accepted_length")} for arm in arms],
    }
    formats = {"found": ".4g", "length, calibration": ".3f", "length, evaluation": ".3f"}
    for metric in map(find, DIVERGENCES):
        columns[metric.title] = [{"value": arm.value(metric.key)} for arm in arms]
        formats[metric.title] = metric.format
    images = " or ".join(map(str, sorted({arm.images for arm in arms})))
    text = (
        f"{images} images per run, seed {arms[0].seed}. Each relaxation's free parameter was found "
        "on calibration prompts; its accepted length there, and on the evaluation's prompts."
    )
    title = "Study: relaxations at equal accepted length"
    return Section(title, table([arm.name for arm in arms], columns), formats, text)


def _correlations(arms: Sequence[Run]) -> list[Section]:
    """Rank correlation of every divergence with every loss, over all relaxations, and over those of
    each length.
    """
    prompts = _prompts(arms)
    losses = [
        metric
        for metric in metrics_of(arms)
        if metric.section == "quality" and metric.paired and _comparable(metric, arms)
    ]
    lengths = sorted({arm.expected_length for arm in arms if arm.expected_length})
    arms_by_title = {"all lengths": arms}
    if len(lengths) > 1:
        for length in lengths:
            arms_by_title[f"{length:g}"] = [arm for arm in arms if arm.expected_length == length]
    names: list[str] = []
    columns: dict[str, list[Cell]] = {f"loss of {metric.title}": [] for metric in losses}
    for title, chosen in arms_by_title.items():
        for divergence, sign in DIVERGENCES.items():
            if len(chosen) < 3 or not all(divergence in arm.values for arm in chosen):
                continue
            names.append(f"{find(divergence).title}, {title}")
            divergences = [arm.weighted(divergence, prompts, sign) for arm in chosen]
            for metric in losses:
                loss_sign = -1.0 if metric.higher_is_better else 1.0
                metric_losses = [arm.weighted(metric.key, prompts, loss_sign) for arm in chosen]
                correlation = rank_correlation(divergences, metric_losses)
                columns[f"loss of {metric.title}"].append(correlation.as_dict())
    if not names:
        return []
    text = (
        "Spearman's rank correlation of a divergence with the loss of quality, over "
        f"{len(arms)} relaxations, with a 95% interval from resampled prompts, not corrected for "
        "their number. 1: the divergence ranks the losses perfectly. Noise in the losses moves the "
        "correlation towards 0. An infinite divergence ranks above all others."
    )
    title = "Study: which divergence predicts the loss"
    numbers = table(names, columns, "divergence, length")
    return [Section(title, numbers, dict.fromkeys(columns, "+.2f"), text)]


def _compared(
    title: str, pairs: Sequence[tuple[Run, Run]], sections: Sequence[str]
) -> list[Section]:
    """The paired metrics of these sections, the left arm of each pair less the right one; nothing
    without pairs.
    """
    if not pairs:
        return []
    prompts = _prompts([arm for pair in pairs for arm in pair])
    every = metrics_of([arm for pair in pairs for arm in pair])
    metrics = [one for one in report_order(every) if one.paired and one.section in sections]
    compared: dict[tuple[int, str], tuple[Weighted, Weighted]] = {}
    for metric in metrics:
        for row, (left, right) in enumerate(pairs):
            if not _comparable(metric, (left, right)):
                continue
            left_values = left.weighted(metric.key, prompts)
            right_values = right.weighted(metric.key, prompts)
            if left_values.finite and right_values.finite:
                compared[row, metric.key] = (left_values, right_values)
    comparisons = compare_all(list(compared.values()))
    differences: dict[tuple[int, str], Cell] = {}
    for name, comparison in zip(compared, comparisons, strict=True):
        difference = comparison.difference.as_dict()
        differences[name] = difference | {"significant": comparison.significant}
    columns = {
        metric.heading: [differences.get((row, metric.key), {}) for row in range(len(pairs))]
        for metric in metrics
    }
    text = (
        "Paired by prompt and seed. Intervals are bootstrap intervals of level 1 − 0.05 / "
        f"{len(compared)}: all {len(compared)} of this table hold together with 95% confidence. "
        f"*: Holm's procedure on the {len(compared)} p-values of the paired bootstrap rejects "
        "equality at 5%. FID and KID are resampled to first order in the images' weights."
    )
    formats = {metric.heading: f"+{metric.format}" for metric in metrics}
    return [Section(title, table([arm.name for arm, _ in pairs], columns), formats, text)]


def _prompts(arms: Sequence[Run]) -> pd.Index:
    """The prompts of all arms."""
    return reduce(pd.Index.union, (arm.values.index for arm in arms))


def _comparable(metric: Metric, arms: Sequence[Run]) -> bool:
    """Whether all arms have values of the metric for a prompt, which were measured alike; and for
    the same ones, if they are of the whole set.
    """
    if not all(metric.key in arm.values for arm in arms):
        return False
    if not all(arm.measured_as(arms[0], metric.key) for arm in arms):
        return False
    measured = pd.concat([arm.values[metric.key].notna() for arm in arms], axis=1)
    by_all = measured.eq(True).all(axis=1)
    return bool(by_all.all() if metric.of_set else by_all.any())
