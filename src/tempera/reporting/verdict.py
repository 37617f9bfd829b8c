"""What a person would say of a report's runs."""

from collections.abc import Sequence

import numpy as np

from tempera.metrics import table
from tempera.reporting.finished_run import Run, labels
from tempera.reporting.pareto import axes
from tempera.reporting.tables import number

MOST = 4
"""More runs than these are judged together: only those stand in the verdict that no other beats."""


def verdict(runs: Sequence[Run]) -> str:
    """A sentence: how fast each run is, and what that costs, the fastest first; of many runs only
    those than which none is both faster and nearer to the target, and how many others there are.
    Empty if there is only plain autoregression.

    Args:
        runs: compared with a baseline (`tempera.reporting.baseline.compare`), if losses are to be
            told.
    """
    drafted = [run for run in runs if not run.plain and "accepted_length" in run.metrics]
    names = labels(runs, drafted)
    told = sorted(zip(drafted, names, strict=True), key=lambda one: -np.nan_to_num(_speed(one[0])))
    if len(told) > MOST:
        told = [one for one in told if not any(_beats(other, one[0]) for other in drafted)]
    clauses = [f"{name}: {', '.join([_pace(run), *_costs(run)])}" for run, name in told]
    others = len(drafted) - len(told)
    if others:
        clauses.append(f"{others} others gain less and are no nearer to the target")
    return f"{'; '.join(clauses)}." if clauses else ""


def _speed(run: Run) -> float:
    """Its speed-up, or if it was not timed, its accepted length."""
    speed = run.value("speedup")
    return run.value("accepted_length") if np.isnan(speed) else speed


def _beats(left: Run, right: Run) -> bool:
    """Whether the left run is as fast and as near to the target, and more so in one of both."""
    if left.model != right.model:
        return False
    faster = _speed(left) - _speed(right)
    nearer = _bound(right) - _bound(left)
    return faster >= 0 and nearer >= 0 and (faster > 0 or nearer > 0)


def _bound(run: Run) -> float:
    """Its KL bound, in as many digits as tables show: an exact method's differs from 0 by rounding
    errors.
    """
    metric = table.find("kl_per_token")
    return float(format(run.value(metric.key), metric.format))


def _pace(run: Run) -> str:
    """How fast it is."""
    speed = run.value("speedup")
    if np.isnan(speed):
        return f"{run.value('accepted_length'):.2f} tokens per round, not timed"
    slower = "slower, " if speed < 1 else ""
    return f"{slower}{speed:.1f} times as fast"


def _costs(run: Run) -> list[str]:
    """Its divergence, and by how much pictures are worse where the interval excludes chance."""
    bound = _bound(run)
    costs = [f"KL {number(bound, '.2g')}"] if bound > 0 else []
    compared = [metric for metric in axes("quality") if metric.section == "quality"]
    losses = []
    for metric in compared:
        difference = run.difference(metric)
        worse = -1 if metric.higher_is_better else 1
        ends = [worse * difference.get(end, 0.0) for end in ("low", "high")]
        if min(ends) > 0:
            change = number(difference["value"], f"+{metric.format}")
            losses.append(f"{metric.title} {change}")
    if not any(map(run.difference, compared)):
        return costs
    return [*costs, *losses] if losses else [*costs, f"no loss seen in {run.images} pictures"]
