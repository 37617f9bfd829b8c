"""Differences from a baseline, prompt by prompt. Both runs use the same random draws for a prompt,
so a few images are enough to show a small difference.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tempera.errors import TemperaError
from tempera.metrics import bootstrap, table
from tempera.metrics.bootstrap import Array, Interval
from tempera.reporting.run_names import is_plain

RunSummary = Mapping[str, Any]
CONTEXT = ("model", "guidance", "temperature", "top_k", "top_p", "seed", "dtype")
"""Settings that runs must share to be compared prompt by prompt."""
EQUAL_LENGTH = 0.02
"""Relative difference up to which two accepted lengths count as equal."""


def compare(rows: Sequence[MutableMapping[str, Any]], baseline: str | None = None) -> None:
    """Compare each row with a baseline run and add the result to the row, in place.

    - `baseline`: the label of the run that the row is compared with;
    - `baseline_length`: that run's accepted length;
    - `differences`: for every paired metric the mean difference from that run (`value`), its
      interval, `n`, and `t`, the paired t statistic over prompts (Cool-SD, Appendix C.4).

    Among the baseline runs of the same model, sampling and seed, the one whose accepted length is
    nearest to the row's is used. Baseline runs themselves, and rows without a match, get None and
    no differences.

    Args:
        rows: runs as `tempera.reporting.collect` reads them.
        baseline: name, family or directory of the baseline runs; plain autoregression by default.

    Raises:
        TemperaError: no run matches `baseline`.
    """
    chosen = [row for row in rows if _is_baseline(row, baseline)]
    if baseline is not None and not chosen:
        families = ", ".join(sorted({str(row["family"]) for row in rows}))
        raise TemperaError(
            f"baseline={baseline} matches no run: give a run's name or directory, or one of the "
            f"families {families}."
        )
    for row in rows:
        row["baseline"], row["baseline_length"], row["differences"] = None, None, {}
        known = [other for other in chosen if _comparable(other, row)]
        if known and not _is_baseline(row, baseline):
            nearest = _nearest(row, known)
            row["baseline"], row["baseline_length"] = label(nearest), accepted_length(nearest)
            row["differences"] = _differences(row, nearest)


def label(row: RunSummary) -> str:
    """The family with its δ, or with the accepted length that it was matched to."""
    if row.get("matched"):
        return f"{row['family']} at {row['settings']['expected_length']:g}"
    return str(row["family"]) + ("" if row["delta"] is None else f" δ={row['delta']:g}")


def _is_baseline(row: RunSummary, baseline: str | None) -> bool:
    if baseline is None:
        return is_plain(row["settings"])
    directory = Path(row["directory"])
    names = (row["family"], label(row), row["name"], directory.name, str(directory))
    return baseline.rstrip("/") in {*names, *(name.replace("δ=", "delta=") for name in names)}


def _comparable(left: RunSummary, right: RunSummary) -> bool:
    """Whether both runs use the same random draws for the same prompt."""
    return all(left["settings"].get(name) == right["settings"].get(name) for name in CONTEXT)


def accepted_length(run: RunSummary) -> float:
    """The run's accepted length; NaN if it is unknown."""
    value = run["metrics"].get("accepted_length", {}).get("value")
    return float("nan") if value is None else float(value)


def of_equal_length(row: RunSummary) -> bool:
    """Whether the row's accepted length equals its baseline's, within `EQUAL_LENGTH`."""
    return abs(accepted_length(row) / float(row["baseline_length"]) - 1) <= EQUAL_LENGTH


def _nearest(row: RunSummary, others: Sequence[RunSummary]) -> RunSummary:
    """The run whose accepted length is nearest to the row's; the first if lengths are unknown."""
    wanted = accepted_length(row)
    distances = [abs(accepted_length(other) - wanted) for other in others]
    return others[int(np.argmin(np.nan_to_num(distances, nan=np.inf)))]


def _differences(row: RunSummary, baseline: RunSummary) -> dict[str, dict[str, float]]:
    """The differences by metric key, over the prompts that both runs share."""
    ours, theirs = row["prompts"], baseline["prompts"]
    shared = sorted(ours.keys() & theirs.keys())
    result = {}
    for metric in table.METRICS:
        key = metric.key
        known = [name for name in shared if key in ours[name] and key in theirs[name]]
        if metric.of_set and ours.keys() != theirs.keys():
            continue
        if metric.paired and known:
            left, right = (np.array([run[name][key] for name in known]) for run in (ours, theirs))
            interval = _difference(left, right)
            if interval.n:
                result[key] = interval.as_dict() | {"t": _paired_t(left[:, 0] - right[:, 0])}
    return result


def _paired_t(differences: Array) -> float:
    """Mean ÷ standard error, NaN for fewer than two prompts or equal differences."""
    with np.errstate(invalid="ignore", divide="ignore"):
        known = differences[~np.isnan(differences)]
        if len(known) < 2:
            return float("nan")
        return float(known.mean() / (known.std(ddof=1) / np.sqrt(len(known))))


def _difference(left: Array, right: Array, resamples: int = 1000) -> Interval:
    """The difference of two weighted means over the same prompts, which are resampled together.

    Args:
        left, right: [n, 2], values and weights in columns.
        resamples: number of bootstrap resamples.
    """
    with np.errstate(invalid="ignore"):  # log-probabilities may be -inf
        keep = ~np.isnan(left[:, 0] - right[:, 0])
        left, right = left[keep], right[keep]

        def difference(drawn: Array) -> Array:
            means = [
                drawn @ (side[:, 0] * side[:, 1]) / (drawn @ side[:, 1]) for side in (left, right)
            ]
            return np.asarray(means[0] - means[1])

        if not keep.any():
            return Interval(float("nan"), float("nan"), float("nan"), 0)
        n = len(left)
        value = float(difference(np.ones(n)))
        return bootstrap.percentile(value, difference(bootstrap.counts(n, resamples)), n)
