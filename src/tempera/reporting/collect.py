"""Finished runs, read from their directories: settings, metrics, and each prompt's own values."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from tempera.errors import TemperaError, shortened
from tempera.metrics import table
from tempera.metrics.comparisons import Weighted
from tempera.reporting.run_names import run_name
from tempera.runtime.files import fingerprint, read_json, regular_file, sha256_file
from tempera.runtime.installation import command

Values = dict[str, Any]
Numbers = dict[str, float | int | None]
Profile = list[float | None]


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
            row a prompt, a column a metric's key; NaN where a prompt has none.
        deviations: standard deviations over prompts, of the accepted length and the latency.
        texts: the prompts' texts by id.
        baseline: the name of the run that this one is compared with, and `baseline_length` its
            accepted length (`tempera.reporting.baseline`).
        differences: by metric, the mean difference from that run.
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
    images: int = 0
    metrics: dict[str, Numbers] = {}
    grid: list[int] = [1, 1]
    acceptance_by_depth: Profile = []
    acceptance_by_tenth: Profile = []
    rounds_by_tokens: Profile = []
    proximity_by_place: Profile = []
    time: dict[str, Any] = {}
    deviations: dict[str, float] = {}
    texts: dict[str, str] = {}
    values: pd.DataFrame = Field(default_factory=pd.DataFrame)
    weights: pd.DataFrame = Field(default_factory=pd.DataFrame)
    baseline: str | None = None
    baseline_length: float | None = None
    differences: dict[str, Values] = {}

    @property
    def family(self) -> str:
        """The name without δ or the option that was found for an accepted length."""
        return run_name(self.method, self.changes, None, self._found)

    @property
    def name(self) -> str:
        """The family with its δ, or with the accepted length that it was matched to."""
        length = self.expected_length if self.matched else None
        return run_name(self.method, self.changes, self.delta, self._found, length)

    @property
    def _found(self) -> str | None:
        """The option that was found for an accepted length."""
        return self.matched.option if self.matched else None

    def without(self, option: str) -> str:
        """The name without an option."""
        return run_name(self.method, self.changes, self.delta, option)

    def number(self, option: str) -> float | None:
        """The value of an option; None if it is no number."""
        value = self.changes.get(option, self.settings.get(option))
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def plain(self) -> bool:
        """Whether this is plain autoregression: method=ar with one token per step."""
        return self.method == "ar" and self.settings.get("steps") is None

    def value(self, metric: str) -> float:
        """A metric; NaN if it is unknown."""
        found = self.metrics.get(metric, {}).get("value")
        return float("nan") if found is None else float(found)

    def weighted(self, metric: str, prompts: Sequence[str], sign: float = 1.0) -> Weighted:
        """A metric by prompt, times a sign; prompts without it have no weight."""
        values, weights = (one[metric].reindex(prompts) for one in (self.values, self.weights))
        known = values.notna()
        above = (sign * values * weights).where(known, 0.0)
        return Weighted(above.to_numpy(float), weights.where(known, 0.0).to_numpy(float))


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Run directories at or below the paths: finished and unfinished ones.

    Raises:
        TemperaError: a path is not a directory, or there is no finished run.
    """
    places = [Path(path) for path in paths]
    for path in places:
        if not path.is_dir():
            raise TemperaError(
                f"{path} is not a directory: give directories of runs.", option="runs"
            )
    runs = sorted({found.parent for path in places for found in path.rglob("run.json")})
    finished = [run for run in runs if (run / "metrics.json").is_file()]
    if not finished:
        shown = ", ".join(map(str, places))
        raise TemperaError(
            f"there is no finished run in {shown}: run `{command('eval')}` first, or give another "
            "directory.",
            option="runs",
        )
    return finished, [run for run in runs if run not in finished]


def collect(directories: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, sorted, and a sentence about each one that is left out because one of its files is
    damaged.

    Raises:
        TemperaError: all runs are damaged.
    """
    table.forget()
    runs = []
    damaged = []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except TemperaError as problem:
            damaged.append(str(problem))
    if damaged and not runs:
        raise TemperaError(f"no run can be read; the first problem: {damaged[0]}")
    return sorted(runs, key=_order), damaged


def read_run(directory: Path) -> Run:
    """A run, without its differences from others.

    Raises:
        TemperaError: one of its files is missing, damaged or of something else.
    """
    path = directory / "metrics.json"
    content: Any = read_json(path)
    identity = _identity(directory, content)
    try:
        run = Run.model_validate(
            {**content, "directory": str(directory), "made_by": fingerprint(identity)}
        )
    except (TypeError, ValidationError) as problem:
        why = "it is another kind of file"
        if isinstance(problem, ValidationError):
            why = "{loc}: {msg}".format_map(problem.errors()[0])
        raise TemperaError(f"{path} is not an evaluation's result ({why}): run it again.") from None
    table.include(run.metrics)
    results = directory / "results.parquet"
    frame = _prompts(results)
    if content.get("results") != sha256_file(results):
        raise TemperaError(f"{results} is not the one that {path.name} tells of: run it again.")
    run.texts = dict(zip(frame["id"], frame["text"], strict=True))
    spread = [name for name in ("accepted_length", "latency") if name in frame]
    run.deviations = frame[spread].astype(float).std().to_dict()
    run.values, run.weights = _paired(frame.set_index("id"), int(np.prod(run.grid)))
    for key, total in run.values.sum(skipna=True).items():  # JSON has no infinite numbers
        if np.isinf(total) and run.metrics.get(str(key), {}).get("value", 0) is None:
            run.metrics[str(key)]["value"] = float(total)
    return run


def _identity(directory: Path, content: Any) -> dict[str, Any]:
    """The identity that a run directory was claimed with.

    Raises:
        TemperaError: its metrics.json is another run's.
    """
    known = read_json(directory / "run.json").get("identity")
    identity: dict[str, Any] = known if isinstance(known, dict) else {}
    own = {name: value for name, value in identity.items() if name != "format"}
    if own != content.get("settings"):
        raise TemperaError(f"{directory / 'metrics.json'} is of another run: run this one again.")
    return identity


def _prompts(path: Path) -> pd.DataFrame:
    """The columns of results.parquet that hold one value a prompt: tokens and other lists would
    take gigabytes.
    """
    regular_file(path)
    try:
        schema = pq.read_schema(path)
        flat = [field.name for field in schema if not pa.types.is_nested(field.type)]
        frame = pd.read_parquet(path, columns=flat)
        return frame.astype({"id": str, "text": str})
    except (pa.ArrowException, OSError, ValueError, KeyError) as problem:
        raise TemperaError(
            f"{path} is damaged ({shortened(str(problem))}): delete it and run again."
        ) from None


def _paired(frame: pd.DataFrame, tokens: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each prompt's values and weights of the paired metrics, for images of so many tokens."""
    values = {}
    weights = {}
    for metric in table.METRICS:
        columns = [name for name in metric.columns if name in frame]
        if metric.paired and columns:
            found = frame[columns].astype(float).mean(axis=1)
            values[metric.key] = found / tokens if metric.per_token else found
            weights[metric.key] = frame[metric.weight].astype(float) if metric.weight else 1.0
    return pd.DataFrame(values, frame.index), pd.DataFrame(weights, frame.index)


def _order(run: Run) -> tuple[Any, ...]:
    first = (run.model, not run.plain, run.method != "eagle")
    return (*first, run.family, run.delta or 0, str(run.seed or 0), run.directory)


def labels(runs: Sequence[Run], shown: Sequence[Run] | None = None) -> list[str]:
    """Names that tell the runs of a report apart: with their model and seed where these differ.

    Args:
        shown: some of the runs; all by default.
    """
    found = []
    several_models = len({run.model for run in runs}) > 1
    several_seeds = len({run.seed for run in runs}) > 1
    for run in runs if shown is None else shown:
        parts = [run.name]
        if several_models:
            parts.insert(0, str(run.model))
        if several_seeds:
            parts.append(f"seed={run.seed}")
        found.append(" ".join(parts))
    return found


def results(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run: what it is, its settings, and per metric its value, interval and count, in the
    columns `key`, `key_low`, `key_high` and `key_n`.
    """
    keys = [metric.key for metric in table.report_order()]
    ends = {"": "value", "_low": "low", "_high": "high", "_n": "n"}
    names = [f"{key}{end}" for key in keys for end in ends]
    rows = []
    for run in runs:
        own = ("directory", "name", "family", "plain", "model", "images", "machine", "data")
        settings = {  # LANTERN has an option and a metric `proximity`
            f"option_{name}" if name in names else name: value
            for name, value in run.settings.items()
        }
        measured = {
            f"{key}{end}": found.get(name)
            for key, found in run.metrics.items()
            for end, name in ends.items()
        }
        rows.append({name: getattr(run, name) for name in own} | settings | measured)
    frame = pd.DataFrame(rows, dtype=object)
    last = [name for name in names if name in frame]
    frame = frame[[*(name for name in frame if name not in last), *last]]
    return frame.astype(dict.fromkeys(last, float))
