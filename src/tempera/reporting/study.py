"""Relaxations at equal accepted length: what each costs, and which divergence predicts it. Tables
for reports on runs with `expected_length=` (docs/study.md).

Runs that differ only in their seed are pooled to one *arm*. A unit is a prompt, with the sums over
its seeds; resamples draw prompts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tempera.metrics import table
from tempera.metrics.comparisons import Comparison, compare_all, rank_correlation
from tempera.reporting.baseline import CONTEXT
from tempera.reporting.collect import Run
from tempera.reporting.tables import Section, cell, number

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
    found = []
    for arms in _groups(runs):
        relaxed = [arm for arm in arms if arm.matched]
        if len({arm.expected_length for arm in relaxed}) == len(relaxed):
            continue
        reference = baseline or REFERENCE
        plain = [arm for arm in arms if arm.plain]
        known = {arm.expected_length: arm for arm in relaxed if arm.family == reference}
        found.append(_overview(arms))
        found += _compared(
            "Study: difference from plain autoregression",
            [(arm, plain[0]) for arm in arms if plain and arm is not plain[0]],
            ("quality",),
        )
        pairs = [(arm, known.get(arm.expected_length, arm)) for arm in relaxed]
        found += _compared(
            f"Study: difference from {reference} at equal length",
            [(arm, other) for arm, other in pairs if arm is not other],
            ("acceptance", "quality", "divergence"),
        )
        found += _correlations(relaxed)
    return found


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The arms of each model and sampling: plain autoregression, the exact row, and relaxations,
    each with the seeds that all of them have.
    """
    groups: dict[tuple[Any, ...], dict[str, list[Run]]] = {}
    for run in runs:
        if run.matched or run.plain or run.method == EXACT:
            context = tuple(run.settings.get(name) for name in CONTEXT if name != "seed")
            groups.setdefault(context, {}).setdefault(run.name, []).append(run)
    arms = []
    for group in groups.values():
        seeds = set.intersection(*({run.seed for run in same} for same in group.values()))
        kept = [[run for run in same if run.seed in seeds] for same in group.values()]
        arms.append([_pooled(same) for same in kept if same])
    return arms


def _pooled(runs: Sequence[Run]) -> Run:
    """Runs of several seeds as one; a prompt that one of them lacks has no value."""
    weights = sum(run.weights for run in runs)
    values = sum(run.values * run.weights for run in runs) / weights
    means = {key: {"value": float(np.mean([run.value(key) for run in runs]))}
             for key in runs[0].metrics}  # fmt: skip
    seeds = ", ".join(str(run.seed) for run in runs)
    update = {"values": values, "weights": weights, "metrics": means, "seed": seeds}
    return runs[0].model_copy(update=update)


def _overview(arms: Sequence[Run]) -> Section:
    """What was found for each arm, its accepted length, and its divergences."""
    lines = []
    for arm in arms:
        found = arm.matched
        line = {
            "run": arm.name,
            "found": f"{found.option}={found.value:g}" if found else "",
            "length, calibration": f"{found.length:.3f}" if found else "",
            "length, evaluation": number(arm.value("accepted_length"), ".3f"),
        }
        for metric in map(table.find, DIVERGENCES):
            line[metric.title] = number(arm.value(metric.key), metric.format)
        lines.append(line)
    images = " or ".join(map(str, sorted({arm.images for arm in arms})))
    text = (
        f"{images} images a run, seed {arms[0].seed}. Each relaxation's free parameter was found "
        "on calibration prompts; its accepted length there, and on the evaluation's prompts."
    )
    title = "Study: relaxations at equal accepted length"
    return Section(title, pd.DataFrame(lines), text)


def _correlations(arms: Sequence[Run]) -> list[Section]:
    """Rank correlation of every divergence with every loss, over all relaxations, and over those of
    each length.
    """
    prompts = _prompts(arms)
    losses = [metric for metric in table.METRICS if metric.section == "quality"]
    losses = [metric for metric in losses if metric.paired and _comparable(metric, arms)]
    lengths = sorted({arm.expected_length for arm in arms if arm.expected_length})
    sets = {"all lengths": arms}
    if len(lengths) > 1:
        sets |= {f"{one:g}": [arm for arm in arms if arm.expected_length == one] for one in lengths}
    lines = []
    for title, chosen in sets.items():
        for divergence, sign in DIVERGENCES.items():
            if len(chosen) < 3 or not all(divergence in arm.values for arm in chosen):
                continue
            left = [arm.weighted(divergence, prompts, sign) for arm in chosen]
            line = {"divergence, length": f"{table.find(divergence).title}, {title}"}
            for loss in losses:
                falls = -1.0 if loss.higher_is_better else 1.0
                right = [arm.weighted(loss.key, prompts, falls) for arm in chosen]
                line[f"loss of {loss.title}"] = cell(
                    rank_correlation(left, right).as_dict(), "+.2f"
                )
            lines.append(line)
    text = (
        "Spearman's rank correlation of a divergence with the loss of quality, over "
        f"{len(arms)} relaxations, with a 95% interval from resampled prompts, not corrected for "
        "their number. 1: the divergence ranks the losses perfectly. Noise in the losses moves the "
        "correlation towards 0. An infinite divergence ranks above all others."
    )
    title = "Study: which divergence predicts the loss"
    return [Section(title, pd.DataFrame(lines), text)] if lines else []


def _compared(
    title: str, pairs: Sequence[tuple[Run, Run]], sections: Sequence[str]
) -> list[Section]:
    """The paired metrics of these sections, the left arm of each pair less the right one; nothing
    without pairs.
    """
    if not pairs:
        return []
    prompts = _prompts([arm for pair in pairs for arm in pair])
    metrics = [one for one in table.report_order() if one.paired and one.section in sections]
    weighted = {
        (place, metric.heading): (left, right)
        for metric in metrics
        for place, pair in enumerate(pairs)
        if _comparable(metric, pair)
        for left, right in [[arm.weighted(metric.key, prompts) for arm in pair]]
        if left.finite and right.finite
    }
    found = dict(zip(weighted, compare_all(list(weighted.values())), strict=True))
    shown = [one for one in metrics if any(one.heading == heading for _, heading in found)]
    lines = [
        {"run": arm.name}
        | {one.heading: _difference(found.get((place, one.heading)), one) for one in shown}
        for place, (arm, _) in enumerate(pairs)
    ]
    text = (
        "Paired by prompt and seed. Intervals are bootstrap intervals of level 1 − 0.05 / "
        f"{len(found)}: all {len(found)} of this table hold together with 95% confidence. *: "
        f"Holm's procedure on the {len(found)} p-values of the paired bootstrap rejects equality "
        "at 5%. FID and KID are resampled to first order in the images' weights."
    )
    return [Section(title, pd.DataFrame(lines), text)]


def _prompts(arms: Sequence[Run]) -> list[str]:
    """The prompts of all arms."""
    return list(dict.fromkeys(prompt for arm in arms for prompt in arm.values.index))


def _comparable(metric: table.Metric, arms: Sequence[Run]) -> bool:
    """Whether all arms have values of the metric for a prompt; and for the same ones, if they are
    of the whole set.
    """
    if not all(metric.key in arm.values for arm in arms):
        return False
    known = pd.concat([arm.values[metric.key].notna() for arm in arms], axis=1).eq(True).all(axis=1)
    return bool(known.all() if metric.of_set else known.any())


def _difference(found: Comparison | None, metric: table.Metric) -> str:
    """A difference with its interval; with an asterisk if it is significant."""
    text = cell(found.difference.as_dict() if found else {}, f"+{metric.format}")
    return text.replace(" (", "* (") if found and found.significant else text
