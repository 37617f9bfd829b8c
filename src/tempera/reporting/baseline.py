"""Differences from a baseline, prompt by prompt. Both runs use the same random draws for a prompt,
so a few images are enough to show a small difference. A prompt is an id with its text: ids alone
repeat from one list of prompts to another.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from tempera.errors import TemperaError
from tempera.evaluation.run_identity import DRAWS
from tempera.metrics import table
from tempera.metrics.comparisons import difference
from tempera.reporting.finished_run import Run, Values, labels, with_schedule


def compare(runs: Sequence[Run], baseline: str | None = None) -> None:
    """Compare each run with a baseline run, and set its `baseline`, `baseline_length`, `gaps`,
    `differences`: for every paired metric the mean difference (`value`), its interval, `n`, and
    `t`, the paired t statistic over prompts (Cool-SD, Appendix C.4); and `uncompared`, why there
    are none. Prompts that only one of both runs has are left out, and so are metrics that were
    measured in another way.

    Among the baseline runs of the same model, sampling and seed, that is used which shares most
    prompts; of several, the one whose accepted length is nearest. Baseline runs themselves have no
    differences.

    Args:
        runs: changed in place.
        baseline: name, family or directory of the baseline runs; plain autoregression by default.

    Raises:
        TemperaError: no run matches `baseline`.
    """
    chosen = _baselines(runs, baseline)
    for run in runs:
        run.baseline = None
        run.baseline_length = None
        run.gaps = pd.DataFrame()
        run.differences = {}
        run.uncompared = ""
        if not chosen or any(run is one for one in chosen):
            continue
        candidates = [other for other in chosen if same_draws(other, run)]
        other = nearest(run, candidates)
        if other is None:
            run.uncompared = _reason(run, chosen, candidates)
            continue
        run.baseline = other.name
        run.baseline_length = other.value("accepted_length")
        run.gaps = _gaps(run, other)
        run.differences = _differences(run, other)


def nearest(run: Run, candidates: Sequence[Run]) -> Run | None:
    """The candidate that shares most prompts with a run; of several, the one most of whose metrics
    were measured as the run's, then the one of the nearest accepted length. None without any shared
    prompt.
    """

    def distance(other: Run) -> tuple[int, int, float]:
        alike = sum(run.measured_as(other, key) for key in run.values)
        gap = abs(other.value("accepted_length") - run.value("accepted_length"))
        return -len(shared(run, other)), -alike, float(np.nan_to_num(gap, nan=np.inf))

    return min((one for one in candidates if len(shared(run, one))), key=distance, default=None)


def same_draws(left: Run, right: Run) -> bool:
    """Whether both runs use the same random draws for the same prompt."""
    return not _other_settings(left, right)


def shared(left: Run, right: Run) -> pd.Index:
    """The prompts of both runs, by id and text; none where most ids of both stand for other texts:
    then the lists are different ones, whose ids count lines, and what agrees does so by chance.
    """
    both = left.values.index.intersection(right.values.index, sort=False)
    ids = left.texts.keys() & right.texts.keys()
    return both if 2 * len(both) >= len(ids) else both[:0]


def _baselines(runs: Sequence[Run], baseline: str | None) -> list[Run]:
    """The runs that `baseline` names; without a name those of plain autoregression.

    Raises:
        TemperaError: there is none of that name.
    """
    if baseline is None:
        return [run for run in runs if run.plain]
    shown = labels(runs)
    given = {baseline.rstrip("/"), str(Path(baseline).resolve())}
    chosen = [
        run
        for run, label in zip(runs, shown, strict=True)
        if not given.isdisjoint(_names(run, label, runs))
    ]
    if not chosen:
        raise TemperaError(
            f"baseline={baseline} matches no run: give one of {', '.join(dict.fromkeys(shown))}, "
            "or a run's directory.",
            option="baseline",
        )
    return chosen


def _names(run: Run, label: str, runs: Sequence[Run]) -> list[str]:
    """Whatever a run may be called as a baseline: all that reports call it, and its directory."""
    with_its_schedule = with_schedule(run, runs)
    directory = Path(run.directory)
    names = [label, directory.name, str(directory), str(directory.resolve())]
    for named in (run, with_its_schedule):
        names += [named.family, named.name]
    return [*names, *(name.replace("δ=", "delta=") for name in names)]


def _other_settings(run: Run, other: Run) -> list[str]:
    """The settings that keep two runs from using the same draws; another model has other weights
    anyway.
    """
    names = [name for name in DRAWS if run.settings.get(name) != other.settings.get(name)]
    return names[:-1] if {"model", "target"} <= {*names} else names


def _reason(run: Run, chosen: Sequence[Run], candidates: Sequence[Run]) -> str:
    """What the chosen runs have that this one cannot be compared with."""
    if candidates:
        ids = set(run.texts) & {name for other in candidates for name in other.texts}
        same_ids = ", even where their ids agree" if ids else ""
        return f"other prompts{same_ids}"
    other = min(chosen, key=lambda one: len(_other_settings(run, one)))
    names = _other_settings(run, other)
    pairs = [
        "other weights" if name == "target" else f"{name}={other.settings.get(name)}"
        for name in names
    ]
    return ", ".join(pairs)


def _gaps(run: Run, other: Run) -> pd.DataFrame:
    """A run's values less the other's, of the prompts that both have, [prompts × metrics]."""
    prompts = shared(run, other)
    same = len(prompts) == len(run.values) == len(other.values)
    keys = [
        key
        for key in run.values.columns.intersection(other.values.columns)
        if run.measured_as(other, key) and (same or not table.entry(key).of_set)
    ]
    return run.values.loc[prompts, keys] - other.values.loc[prompts, keys]


def _differences(run: Run, other: Run) -> dict[str, Values]:
    """The differences by metric, from the run's gaps."""
    result: dict[str, Values] = {}
    for key in run.gaps:
        gaps = run.gaps[key].dropna()
        if not len(gaps):
            continue
        values = run.weighted(key, gaps.index)
        others = other.weighted(key, gaps.index)
        with np.errstate(invalid="ignore", divide="ignore"):  # of few, equal, infinite values
            t = float(np.divide(gaps.mean(), gaps.sem()))
        result[key] = {**difference(values, others).as_dict(), "t": t}
    return result
