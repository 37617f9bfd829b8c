"""Finished runs, found and read from their directories."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from tempera.errors import TemperaError, shortened
from tempera.evaluation.run_directory import PROMPTS, check_format
from tempera.metrics.table import Metric
from tempera.reporting.finished_run import Run, metrics_of
from tempera.runtime.files import (
    directories_with,
    fingerprint,
    read_json,
    regular_file,
    sha256_file,
)
from tempera.runtime.installation import command
from tempera.runtime.row_store import read_table


class Found(NamedTuple):
    """Run directories, each once, in order.

    Attributes:
        finished, unfinished: directories.
        again: other names by which they were given, each with that of its run.
    """

    finished: list[Path]
    unfinished: list[Path]
    again: dict[Path, Path]


def find_runs(paths: Iterable[str | Path]) -> Found:
    """Run directories at or below the paths, links followed.

    Raises:
        TemperaError: a path is not a directory, or has no run; or no run is finished.
    """
    roots = [Path(path) for path in paths]
    for root in roots:
        if not root.is_dir():
            raise TemperaError(
                f"{root} is not a directory: give directories of runs.", option="runs"
            )
    names: dict[Path, list[Path]] = {}
    for root in roots:
        runs = directories_with(root, "run.json")
        if not runs and len(roots) > 1:
            raise TemperaError(f"there is no run in {root}: leave it out.", option="runs")
        for run in runs:
            names.setdefault(run.resolve(), []).append(run)
    # of several names the one without links
    chosen = {
        min(given, key=lambda name: (name.absolute() != real, name)): given
        for real, given in names.items()
    }
    runs = sorted(chosen)
    again = {name: run for run in runs for name in chosen[run] if name.absolute() != run.absolute()}
    finished = [run for run in runs if (run / "metrics.json").is_file()]
    if not finished:
        shown = ", ".join(map(str, roots))
        raise TemperaError(
            f"there is no finished run in {shown}: run `{command('eval')}` first, or give another "
            "directory.",
            option="runs",
        )
    return Found(finished, [run for run in runs if run not in finished], again)


def collect(directories: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, sorted, and a sentence about each one that is left out because one of its files is
    damaged.

    Raises:
        TemperaError: all runs are damaged.
    """
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
        if "format" in identity:
            check_format(directory, identity)
        why = "it is another kind of file"
        if isinstance(problem, ValidationError):
            why = "{loc}: {msg}".format_map(problem.errors()[0])
        raise TemperaError(
            f"{path} is not an evaluation's result ({why}): run the evaluation again."
        ) from None
    results = directory / "results.parquet"
    frame = _prompts(results)
    if content.get("results") != sha256_file(results):
        raise TemperaError(f"{results} does not match {path.name}: run the evaluation again.")
    run.begun = _begun(directory, {*frame["id"]})
    spread = [name for name in ("accepted_length", "latency") if name in frame]
    run.deviations = frame[spread].astype(float).std().to_dict()
    by_prompt = frame.set_index(["id", "text"])
    run.values, run.weights = _paired(by_prompt, run.length, metrics_of([run]))
    for key, total in run.values.sum(skipna=True).items():  # JSON has no infinite numbers
        if np.isinf(total) and run.metrics.get(str(key), {}).get("value", 0) is None:
            run.metrics[str(key)]["value"] = float(total)
    return run


def _begun(directory: Path, ids: set[str]) -> int:
    """How many prompts the last start was asked for; 0 if the results are of these."""
    path = directory / PROMPTS
    asked = {row["id"] for row in read_table(path, {"id": None})} if path.is_file() else ids
    return 0 if asked == ids else len(asked)


def _identity(directory: Path, content: Any) -> dict[str, Any]:
    """The identity that a run directory was claimed with.

    Raises:
        TemperaError: its metrics.json is another run's.
    """
    recorded = read_json(directory / "run.json").get("identity")
    identity: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    settings = {name: value for name, value in identity.items() if name != "format"}
    if settings != content.get("settings"):
        raise TemperaError(
            f"{directory / 'metrics.json'} belongs to another run: run this evaluation again."
        )
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
            f"{path} is damaged ({shortened(str(problem))}): delete it, and run the evaluation "
            "again."
        ) from None


def _paired(
    frame: pd.DataFrame, tokens: float, metrics: Sequence[Metric]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Each prompt's values and weights of the paired ones of these metrics, for images of so many
    tokens.
    """
    values = {}
    weights = {}
    for metric in metrics:
        columns = [name for name in metric.columns if name in frame]
        if metric.paired and columns:
            means = frame[columns].astype(float).mean(axis=1)
            values[metric.key] = means / tokens if metric.per_token else means
            weights[metric.key] = frame[metric.weight].astype(float) if metric.weight else 1.0
    return pd.DataFrame(values, frame.index), pd.DataFrame(weights, frame.index)


def _order(run: Run) -> tuple[Any, ...]:
    """A sort key: by model, plain autoregression first, then EAGLE, then the other methods."""
    first = (run.model, not run.plain, run.method != "eagle")
    return (*first, run.family, run.delta or 0, str(run.seed or 0), run.directory)
