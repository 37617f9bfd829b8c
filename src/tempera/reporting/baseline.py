"""Differences from a baseline, prompt by prompt. Both runs use the same random draws for a prompt,
so a few images are enough to show a small difference.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tempera.config.options import Role, names_with
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.metrics.comparisons import difference
from tempera.reporting.finished_run import Run, Values

CONTEXT = tuple(names_with(Role.PAIRED))
"""Settings that runs must share to be compared prompt by prompt."""


def compare(runs: Sequence[Run], baseline: str | None = None) -> None:
    """Compare each run with a baseline run, and set its `baseline`, `baseline_length` and
    `differences`: for every paired metric the mean difference (`value`), its interval, `n`, and
    `t`, the paired t statistic over prompts (Cool-SD, Appendix C.4).

    Among the baseline runs of the same model, sampling and seed, the one whose accepted length is
    nearest is used. Baseline runs themselves, and runs without a match, have no differences.

    Args:
        runs: changed in place.
        baseline: name, family or directory of the baseline runs; plain autoregression by default.

    Raises:
        TemperaError: no run matches `baseline`.
    """
    chosen = [run for run in runs if _is_baseline(run, baseline)]
    if baseline is not None and not chosen:
        families = ", ".join(sorted({run.family for run in runs}))
        raise TemperaError(
            f"baseline={baseline} matches no run: give a run's name or directory, or one of the "
            f"families {families}.",
            option="baseline",
        )
    for run in runs:
        run.baseline = None
        run.baseline_length = None
        run.differences = {}
        candidates = [other for other in chosen if same_draws(other, run)]
        if candidates and not _is_baseline(run, baseline):
            lengths = np.array([other.value("accepted_length") for other in candidates])
            gaps = np.abs(lengths - run.value("accepted_length"))
            nearest = int(np.argmin(np.nan_to_num(gaps, nan=np.inf)))
            run.baseline = candidates[nearest].name
            run.baseline_length = float(lengths[nearest])
            run.differences = _differences(run, candidates[nearest])


def _is_baseline(run: Run, baseline: str | None) -> bool:
    """Whether `baseline` names a run, or the run is plain autoregression if there is no name."""
    if baseline is None:
        return run.plain
    directory = Path(run.directory)
    names = [run.family, run.name, directory.name, str(directory)]
    names += [name.replace("δ=", "delta=") for name in names]
    return baseline.rstrip("/") in names


def same_draws(left: Run, right: Run) -> bool:
    """Whether both runs use the same random draws for the same prompt."""
    return all(left.settings.get(name) == right.settings.get(name) for name in CONTEXT)


def _differences(run: Run, other: Run) -> dict[str, Values]:
    """The differences by metric, over the prompts that both runs share."""
    shared = run.values.index.intersection(other.values.index)
    same = set(run.values.index) == set(other.values.index)
    result: dict[str, Values] = {}
    for key in run.values.columns.intersection(other.values.columns):
        gaps = (run.values.loc[shared, key] - other.values.loc[shared, key]).dropna()
        if len(gaps) and (same or not table.find(key).of_set):
            values = run.weighted(key, gaps.index)
            others = other.weighted(key, gaps.index)
            with np.errstate(invalid="ignore", divide="ignore"):  # of few, equal, infinite values
                t = float(np.divide(gaps.mean(), gaps.sem()))
            result[key] = {**difference(values, others).as_dict(), "t": t}
    return result
