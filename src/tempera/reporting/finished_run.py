"""A finished run, and several as the names and the table of a report."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from tempera.metrics import table
from tempera.metrics.comparisons import Weighted
from tempera.metrics.table import Metric
from tempera.reporting.run_names import run_name

Values = dict[str, Any]
Numbers = dict[str, float | int | None]
Profile = list[float | None]
Length = Annotated[float, BeforeValidator(lambda length: math.nan if length is None else length)]
"""Tokens of an image; NaN of a picture that other code made."""
FACTS = ("directory", "name", "family", "plain", "model", "images", "machine", "data")
"""What a run is, in the first columns of a report's results."""


def _of(*path: str, default: Any = None) -> Any:
    """A field that lies at this path of metrics.json."""
    return Field(default, validation_alias=AliasPath(*path))


class Matched(BaseModel):
    """What a run records about a search for its accepted length (`expected_length=`): the free
    parameter, its value, and its length on calibration prompts.
    """

    option: str
    value: float
    length: float


class Run(BaseModel):
    """A finished run, as its metrics.json describes it.

    Attributes:
        made_by: what the parts of the run carry (`tempera.evaluation.run_directory`).
        values, weights: each prompt's value of the paired metrics, and its weight in their means, a
            column a metric's key; NaN where a prompt has none. A row is a prompt, under its id and
            text: ids alone repeat from one list of prompts to another.
        deviations: standard deviations over prompts, of the accepted length and the latency.
        described: its metrics that the table lacks.
        begun: prompts of a later start that has not finished, if there was one.
        exact: whether its method's rule claims the law of plain autoregression.
        length: tokens of an image, with those of a preview, which are not of the `grid`; NaN of
            pictures that other code made.
        scorers: by metric, what measured it: the identities of its networks and, for a distance
            from real pictures, of these.
        baseline: the name of the run that this one is compared with, and `baseline_length` its
            accepted length (`tempera.reporting.baseline`).
        gaps: the difference of each prompt that both have, a column a metric's key.
        differences: by metric, the mean difference from that run.
        uncompared: what the baseline has for which there are none.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)
    directory: str
    made_by: str = ""
    settings: dict[str, Any]
    method: str = _of("settings", "method", default=...)
    model: str | None = _of("settings", "model", default="")
    delta: float | None = _of("settings", "delta")
    seed: int | str | None = _of("settings", "seed")
    expected_length: float | None = _of("settings", "expected_length")
    changes: dict[str, Any] = _of("about", "changes", default={})
    machine: str = _of("about", "machine", default="")
    started: str = _of("about", "started", default="")
    version: str = _of("about", "versions", "tempera-decoding", default="")
    memory: int | None = None
    data: str | None = _of("about", "data", "preset", default="")
    paper: dict[str, str] | None = _of("about", "paper")
    matched: Matched | None = _of("about", "matched")
    exact: bool = False
    images: int = 0
    begun: int = 0
    described: list[Metric] = []
    length: Length
    scorers: dict[str, list[str]] = {}
    metrics: dict[str, Numbers] = {}
    grid: tuple[int, int] = (1, 1)
    acceptance_by_place: Profile = []
    acceptance_by_depth: Profile = []
    rounds_by_tokens: Profile = []
    figures_by_place: dict[str, Profile] = {}
    time: dict[str, Any] = {}
    deviations: dict[str, float] = {}
    values: pd.DataFrame = Field(default_factory=pd.DataFrame)
    weights: pd.DataFrame = Field(default_factory=pd.DataFrame)
    baseline: str | None = None
    baseline_length: float | None = None
    gaps: pd.DataFrame = Field(default_factory=pd.DataFrame)
    differences: dict[str, Values] = {}
    uncompared: str = ""

    @property
    def family(self) -> str:
        """The name without δ or the option that was found for an accepted length."""
        return run_name(self.method, self.changes, None, self._matched_option)

    @property
    def name(self) -> str:
        """The family with its δ, or with the accepted length that it was matched to."""
        length = self.expected_length if self.matched else None
        return run_name(self.method, self.changes, self.delta, self._matched_option, length)

    @property
    def _matched_option(self) -> str | None:
        """The option that was found for an accepted length."""
        return self.matched.option if self.matched else None

    def without(self, option: str) -> str:
        """The name without an option."""
        return run_name(self.method, self.changes, self.delta, option)

    def number(self, option: str) -> float | None:
        """The value of an option; None if it is not a number."""
        value = self.changes.get(option, self.settings.get(option))
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def plain(self) -> bool:
        """Whether this is plain autoregression: method=ar with one token per step."""
        return self.method == "ar" and self.settings.get("steps") is None

    @property
    def decoded(self) -> bool:
        """Whether tempera decoded its pictures, and not other code."""
        return not math.isnan(self.length)

    @property
    def crowd(self) -> str:
        """How many processes shared the cores while it was timed, if that was more than one a
        core.
        """
        load = self.time.get("load", 0)
        cores = self.time.get("cores", 1)
        return f"{load:.0f} processes share {cores} cores" if load > cores else ""

    @property
    def texts(self) -> dict[str, str]:
        """The prompts' texts by id."""
        return dict(self.values.index)

    def value(self, metric: str) -> float:
        """A metric; NaN if it is unknown."""
        value = self.metrics.get(metric, {}).get("value")
        return float("nan") if value is None else float(value)

    def shown(self, metric: Metric) -> Numbers:
        """What reports show of a metric: nothing if it needs more images."""
        return self.metrics.get(metric.key, {}) if self.images >= metric.fewest else {}

    def difference(self, metric: Metric) -> Values:
        """What reports show of a difference from the baseline: nothing if it needs more images."""
        return self.differences.get(metric.key, {}) if self.images >= metric.fewest else {}

    def measured_as(self, other: "Run", metric: str) -> bool:
        """Whether the same networks measured a metric of both runs, with the same settings and
        against the same real pictures.
        """
        return self.scorers.get(metric) == other.scorers.get(metric)

    def on_grid(self, values: Sequence[float | None]) -> NDArray[np.float64]:
        """A profile by place, laid out on the image's grid, [rows, columns], without the preview's
        tokens before it.
        """
        rows, columns = self.grid
        return np.array(values[-rows * columns :], np.float64).reshape(rows, columns)

    def weighted(self, metric: str, prompts: pd.Index, sign: float = 1.0) -> Weighted:
        """A metric by prompt, times a sign; prompts without it have no weight."""
        values = self.values[metric].reindex(prompts)
        weights = self.weights[metric].reindex(prompts)
        measured = values.notna()
        sums = (sign * values * weights).where(measured, 0.0)
        return Weighted(sums.to_numpy(float), weights.where(measured, 0.0).to_numpy(float))


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """The table's metrics, and those that only these runs have."""
    own: dict[str, Metric] = {}
    for run in runs:
        own |= {metric.key: metric for metric in run.described}
        own |= {key: table.entry(key) for key in run.metrics if key not in own}
    known = {metric.key for metric in table.METRICS}
    return [*table.METRICS, *(metric for key, metric in own.items() if key not in known)]


def with_schedule(run: Run, runs: Sequence[Run]) -> Run:
    """The run; with its schedule among its changes where another run of its method changes that:
    in a sweep of schedules each is named.
    """
    swept = any(other.method == run.method and "schedule" in other.changes for other in runs)
    if not swept or "schedule" not in run.settings:
        return run
    changes = {"schedule": run.settings["schedule"]} | run.changes
    return run.model_copy(update={"changes": changes})


def labels(runs: Sequence[Run], shown: Sequence[Run] | None = None) -> list[str]:
    """Names that tell the runs of a report apart: with their model, seed and schedule where these
    differ, and with their directory where two would have one name.

    Args:
        shown: some of the runs; all by default.
    """
    names = [_label(run, runs) for run in runs]
    alike: dict[str, set[str]] = {}
    for run, name in zip(runs, names, strict=True):
        alike.setdefault(name, set()).add(run.directory)
    told = {}
    for run, name in zip(runs, names, strict=True):
        told[id(run)] = name
        if len(alike[name]) > 1:
            parent = os.path.commonpath(alike[name])
            told[id(run)] += f" ({Path(run.directory).relative_to(parent).as_posix()})"
    return [told[id(run)] for run in (runs if shown is None else shown)]


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The name of a run with its model, seed and schedule where those of all runs differ."""
    parts = [with_schedule(run, runs).name]
    if len({run.model for run in runs}) > 1 and run.model:
        parts.insert(0, run.model)
    if len({run.seed for run in runs}) > 1 and run.seed is not None:
        parts.append(f"seed={run.seed}")
    return " ".join(parts)


def round_seconds(runs: Sequence[Run]) -> list[float | None]:
    """Seconds of a round of each run at batch 1; None for a run that was not timed.

    They are those of a round of plain autoregression, times what a round costs in turn with it. The
    former is the median of the runs with the same model on the same machine, so that the clocks of
    runs compare as their speed-ups do, even if the machine was busier during one.
    """
    rows = []
    for run in runs:
        plain = run.value("latency_ar") / run.length
        rows.append((str(run.model), run.machine, plain, run.value("efficiency")))
    frame = pd.DataFrame(rows, columns=["model", "machine", "plain", "efficiency"])
    plain_rounds = frame.groupby(["model", "machine"])["plain"].transform("median")
    seconds = plain_rounds / frame["efficiency"]
    return [value if 0 < value < math.inf else None for value in seconds]


def results(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: what it is, its settings, and per metric its value, interval and count, in the
    columns `key`, `key_low`, `key_high` and `key_n`.
    """
    ends = {"": "value", "_low": "low", "_high": "high", "_n": "n"}
    measured = [
        f"{metric.key}{end}" for metric in table.report_order(metrics_of(runs)) for end in ends
    ]
    rows = []
    for run in runs:
        row = {name: getattr(run, name) for name in FACTS}
        for name, value in run.settings.items():
            # a metric may have the name of an option, such as `k`
            row[f"option_{name}" if name in measured else name] = value
        for key, interval in run.metrics.items():
            for end, part in ends.items():
                row[f"{key}{end}"] = interval.get(part)
        rows.append(row)
    frame = pd.DataFrame(rows, dtype=object)
    last = [name for name in measured if name in frame]
    first = [name for name in frame if name not in last]
    return frame[[*first, *last]].astype(dict.fromkeys(last, float))
