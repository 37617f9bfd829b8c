"""What a person would say of a report's runs: how fast each is, and what that costs.

A run with an exact rule costs nothing: its pictures have the distribution of plain autoregression.
Of the others a loss is told where chance does not explain it: of all losses that are looked for in
a report, in all runs and metrics, any false one is told with a probability of at most
`FALSE_ALARMS` (tests of random signs, one-sided, with Holm's correction).
"""

from collections.abc import Sequence

import numpy as np

from tempera.metrics import table
from tempera.metrics.bootstrap import Array
from tempera.metrics.comparisons import FALSE_ALARMS, above_zero, holm
from tempera.metrics.table import Metric
from tempera.reporting.finished_run import Run, labels
from tempera.reporting.pareto import axes
from tempera.reporting.tables import number

MOST = 4
"""More runs than these are judged together: only those stand in the verdict that no other beats."""
FEWEST = 64
"""Pictures of both runs below which nothing is said of losses. Where the baseline breaks none,
seven broken ones are no chance, whatever their number: 11% of 64, but 44% of 16.
"""


def verdict(runs: Sequence[Run]) -> str:
    """A sentence on each run, the fastest first, and runs that were not timed last; of many runs
    only those than which none is both faster and nearer to the target, and how many others there
    are. Empty if there is only plain autoregression.

    Args:
        runs: compared with a baseline (`tempera.reporting.baseline.compare`), if losses are to be
            told.
    """
    drafted = [run for run in runs if run.decoded and not run.plain]
    losses = _losses(drafted)
    names = labels(runs, drafted)
    shown = sorted(range(len(drafted)), key=lambda index: _order(drafted[index]))
    if len(shown) > MOST:
        shown = [one for one in shown if not any(_beats(other, drafted[one]) for other in drafted)]
    clauses = []
    for index in shown:
        run = drafted[index]
        said = [_pace(run), *_costs(run, losses[index])]
        clauses.append(f"{names[index]}: {', '.join(said)}")
    others = len(drafted) - len(shown)
    if others:
        clauses.append(
            f"{others} other run{'s' * (others > 1)}, each no faster than one of these and no "
            "closer to the target"
        )
    return f"{'; '.join(clauses)}." if clauses else ""


def _timed(run: Run) -> bool:
    return not np.isnan(run.value("speedup"))


def _gain(run: Run) -> float:
    """Its speed-up; its accepted length if it was not timed, to be compared with such alone."""
    return run.value("speedup" if _timed(run) else "accepted_length")


def _order(run: Run) -> tuple[bool, float]:
    return not _timed(run), -np.nan_to_num(_gain(run))


def _beats(left: Run, right: Run) -> bool:
    """Whether the left run is as fast and as near to the target, and more so in one of both. Runs
    of two models, on two machines, or of which only one was timed do not compare.
    """
    kinds = [(run.model, _timed(run), _timed(run) and run.machine) for run in (left, right)]
    if kinds[0] != kinds[1]:
        return False
    faster = _gain(left) - _gain(right)
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
    if not _timed(run):
        tokens = "" if np.isnan(_gain(run)) else f"{_gain(run):.2f} tokens per round, "
        return f"{tokens}not timed"
    slower = "slower, " if _gain(run) < 1 else ""
    return f"{slower}{_gain(run):.1f} times as fast"


def _costs(run: Run, losses: Sequence[Metric] | None) -> list[str]:
    """Its divergence, and by how much its pictures are worse.

    Args:
        losses: the metrics that are worse; None if nothing was looked for.
    """
    bound = _bound(run)
    if run.exact and not bound > 0:
        return ["exact: same distribution"]
    most = f"at most {number(bound, '.2g')} nats per token" if np.isfinite(bound) else "infinite"
    costs = [f"KL {most}"] if bound > 0 else []
    if run.exact:
        return [*costs, "although its rule says that it is exact"]
    if losses is None:
        few = f"{len(run.gaps)} pictures are too few to detect a loss ({FEWEST} are needed)"
        return [*costs, few] if _quality(run) else costs
    for metric in losses:
        change = number(run.difference(metric)["value"], f"+{metric.format}")
        costs.append(f"{metric.title} {change}")
    return costs if losses else [*costs, f"no significant loss in {len(run.gaps)} pictures"]


def _quality(run: Run) -> list[Metric]:
    """The metrics in which it was compared, and losses are looked for."""
    compared = [metric for metric in axes("quality") if metric.section == "quality"]
    return [metric for metric in compared if run.difference(metric)]


def _losses(runs: Sequence[Run]) -> list[list[Metric] | None]:
    """The metrics in which each run is worse than its baseline, beyond chance; None for a run in
    which nothing is looked for: an exact one, or one of too few pictures.
    """
    looked = [[] if run.exact or len(run.gaps) < FEWEST else _quality(run) for run in runs]
    pairs = [(index, metric) for index, metrics in enumerate(looked) for metric in metrics]
    found: list[list[Metric] | None] = [[] if metrics else None for metrics in looked]
    if not pairs:
        return found
    worse = [_worse(runs[index], metric) for index, metric in pairs]
    for (index, metric), p in zip(pairs, holm(above_zero(_table(worse))), strict=True):
        worsened = found[index]
        if worsened is not None and p <= FALSE_ALARMS:
            worsened.append(metric)
    return found


def _worse(run: Run, metric: Metric) -> Array:
    """By how much each of its pictures is worse; 0 where that is unknown."""
    sign = -1.0 if metric.higher_is_better else 1.0
    gaps = sign * run.gaps[metric.key].to_numpy(float)
    return np.where(np.isfinite(gaps), gaps, 0.0)


def _table(columns: Sequence[Array]) -> Array:
    """The columns beside each other, filled with 0 below."""
    longest = max(map(len, columns))
    return np.stack([np.pad(column, (0, longest - len(column))) for column in columns], 1)
