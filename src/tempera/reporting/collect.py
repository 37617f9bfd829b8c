"""Finished runs, read from their directories: settings, metrics, and each prompt's own values."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tempera.errors import TemperaError, shortened
from tempera.metrics import table
from tempera.reporting.run_names import family_name, is_plain
from tempera.runtime.files import read_json, regular_file
from tempera.runtime.installation import command

Values = dict[str, Any]
Numbers = dict[str, float | int | None]
Profile = list[float | None]


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
        values, weights: each prompt's value of the paired metrics, and its weight in their means, a
            row a prompt, a column a metric's key; NaN where a prompt has none.
        texts: the prompts' texts by id.
        baseline: the name of the run that this one is compared with, and `baseline_length` its
            accepted length (`tempera.reporting.baseline`).
        differences: by metric, the mean difference from that run.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    directory: str
    method: str
    model: str | None = ""
    delta: float | None = None
    seed: int | str | None = None
    expected_length: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    changes: dict[str, Any] = Field(default_factory=dict)
    images: int = 0
    machine: str = ""
    data: str | None = ""
    paper: dict[str, str] | None = None
    matched: Matched | None = None
    metrics: dict[str, Numbers] = Field(default_factory=dict)
    grid: list[int] = Field(default_factory=lambda: [1, 1])
    acceptance_by_depth: Profile = Field(default_factory=list)
    acceptance_by_tenth: Profile = Field(default_factory=list)
    tv_by_depth: Profile = Field(default_factory=list)
    proximity_by_place: Profile = Field(default_factory=list)
    time: dict[str, Any] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)
    values: pd.DataFrame = Field(default_factory=pd.DataFrame)
    weights: pd.DataFrame = Field(default_factory=pd.DataFrame)
    baseline: str | None = None
    baseline_length: float | None = None
    differences: dict[str, Values] = Field(default_factory=dict)

    @property
    def family(self) -> str:
        """The curve that the run lies on: its name without the value that tells points apart."""
        matched = None if self.matched is None else self.matched.model_dump()
        return family_name(self.method, self.changes, matched)

    @property
    def name(self) -> str:
        """The family with its δ, or with the accepted length that it was matched to."""
        if self.matched:
            return f"{self.family} at {self.expected_length:g}"
        return self.family + ("" if self.delta is None else f" δ={self.delta:g}")

    @property
    def plain(self) -> bool:
        """Whether this is plain autoregression."""
        return is_plain(self.settings)

    def value(self, metric: str) -> float:
        """A metric; NaN if it is unknown."""
        found = self.metrics.get(metric, {}).get("value")
        return float("nan") if found is None else float(found)


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Run directories at or below the paths: finished and unfinished ones.

    Raises:
        TemperaError: a path is not a directory, or there is no finished run.
    """
    places = [Path(path) for path in paths]
    if not places:
        raise TemperaError("the list of runs is empty: give run directories.", option="runs")
    for path in places:
        if not path.is_dir():
            raise TemperaError(
                f"{path} is not a directory: give run directories, or a directory that contains "
                "some.",
                option="runs",
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
    runs, damaged = [], []
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
    try:
        settings, about = content["settings"], content["about"]
        own = {name: settings.get(name) for name in ("method", "delta", "seed", "expected_length")}
        found = {name: content[name] for name in content if name in Run.model_fields} | own
        found |= {"directory": str(directory), "model": settings.get("model", "")}
        found |= {name: about.get(name) for name in ("paper", "matched", "changes")}
        found["machine"] = about.get("machine", "")
        run = Run.model_validate(found | {"data": about.get("data", {}).get("preset")})
    except (KeyError, TypeError, AttributeError, ValidationError) as problem:
        raise TemperaError(
            f"{path} is not an evaluation's result ({_misfit(problem)}): run it again."
        ) from None
    table.include(run.metrics)
    frame = _prompts(directory / "results.parquet")
    run.texts = dict(zip(frame["id"], frame["text"], strict=True))
    run.values, run.weights = _paired(frame.set_index("id"), int(np.prod(run.grid)))
    return run


def _misfit(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return (
        f"{problem} is missing" if isinstance(problem, KeyError) else "it is another kind of file"
    )


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
    values, weights = {}, {}
    for metric in table.METRICS:
        columns = [name for name in metric.columns if name in frame]
        if metric.paired and columns:
            found = frame[columns].astype(float).mean(axis=1)
            values[metric.key] = found / tokens if metric.per_token else found
            weights[metric.key] = frame[metric.weight].astype(float) if metric.weight else 1.0
    return pd.DataFrame(values, frame.index), pd.DataFrame(weights, frame.index)


def _order(run: Run) -> tuple[Any, ...]:
    exact = run.method != "eagle"
    return (run.model, not run.plain, exact, run.family, run.delta or 0, str(run.seed or 0),
            run.directory)  # fmt: skip


def results(runs: Sequence[Run], part: str = "metrics") -> pd.DataFrame:
    """One row a run: what it is, its settings, and per metric its value, interval and count, in the
    columns `key`, `key_low`, `key_high` and `key_n`.

    Args:
        part: `metrics` or `differences`.
    """
    keys = [metric.key for metric in table.report_order()]
    names = [f"{key}{end}" for key in keys for end in ("", "_low", "_high", "_n")]
    rows = []
    for run in runs:
        known: Mapping[str, Values] = getattr(run, part)
        own = {name: getattr(run, name) for name in ("directory", "name", "family", "plain")}
        about = {"images": run.images, "machine": run.machine, "data": run.data}
        found = {
            f"{key}{end}": known[key].get(name)
            for key in keys
            if key in known
            for end, name in (("", "value"), ("_low", "low"), ("_high", "high"), ("_n", "n"))
        }
        settings = {  # LANTERN has an option and a metric `proximity`
            f"option_{name}" if name in names else name: value
            for name, value in run.settings.items()
        }
        rows.append({**own, "model": run.model, **settings, **about, **found})
    frame = pd.DataFrame(rows, dtype=object)
    last = [name for name in names if name in frame]
    return frame[[*(name for name in frame if name not in last), *last]].astype(
        dict.fromkeys(last, float)
    )
