"""Run directories as rows of a report: settings, metrics, and each prompt's own values."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tempera.errors import TemperaError, misfit
from tempera.metrics import table
from tempera.reporting.baseline import compare
from tempera.reporting.run_names import family_name, is_plain
from tempera.runtime.files import read_json
from tempera.runtime.installation import command
from tempera.runtime.row_store import read_table

ReportRow = dict[str, Any]
HIDDEN = ("target", "draft", "verification", "branching", "diagnostics")
"""Settings that identify a run but tell a reader nothing; reports leave them out."""


def find_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """Run directories at or below the paths: finished and unfinished ones.

    Raises:
        TemperaError: a path is not a directory, or there is no finished run.
    """
    places = [Path(path) for path in paths]
    if not places:
        raise TemperaError("the list of runs is empty: give run directories.")
    for path in places:
        if not path.is_dir():
            raise TemperaError(
                f"{path} is not a directory: give run directories, or a directory that contains "
                "some."
            )
    runs = sorted({found.parent for path in places for found in path.rglob("run.json")})
    finished = [run for run in runs if (run / "metrics.json").is_file()]
    if not finished:
        shown = ", ".join(map(str, places))
        raise TemperaError(
            f"there is no finished run in {shown}: run `{command('eval')}` first, or give another "
            "directory."
        )
    return finished, [run for run in runs if run not in finished]


def collect(
    directories: Sequence[Path], baseline: str | None = None
) -> tuple[list[ReportRow], list[str]]:
    """One sorted row per run: its name, settings, metrics with intervals, and differences from the
    baseline.

    Args:
        directories: finished runs.
        baseline: the runs to compare with, by name, family or directory; plain autoregression by
            default.

    Returns:
        The rows, and a sentence about each run that is left out because one of its files is
        damaged.

    Raises:
        TemperaError: all runs are damaged, or no run matches `baseline`.
    """
    rows, damaged = [], []
    for directory in directories:
        try:
            rows.append(_row(directory))
        except TemperaError as problem:
            damaged.append(str(problem))
    if damaged and not rows:
        raise TemperaError(f"no run can be read; the first problem: {damaged[0]}")
    compare(rows, baseline)
    return sorted(rows, key=_order), damaged


def _row(directory: Path) -> ReportRow:
    return row_of(
        directory,
        read_json(directory / "metrics.json"),
        read_table(directory / "results.parquet"),
    )


def single(
    directory: Path, content: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
) -> list[ReportRow]:
    """The rows of a report on one run alone; arguments as in `row_of`."""
    row = row_of(directory, content, prompts)
    compare([row])
    return [row]


def row_of(
    directory: Path, content: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
) -> ReportRow:
    """A run's row, without its differences from others.

    Args:
        directory: the run's directory.
        content: the content of its metrics.json.
        prompts: the rows of its results.parquet.

    Raises:
        TemperaError: one of the two was not written by an evaluation.
    """
    try:
        settings = content["settings"]
        row = {
            "directory": str(directory),
            "name": content["name"],
            "method": settings["method"],
            "model": settings.get("model", ""),
            "delta": settings.get("delta"),
            "seed": settings.get("seed"),
            "settings": {name: value for name, value in settings.items() if name not in HIDDEN},
            "images": content["images"],
            "machine": content["about"].get("machine", ""),
            "data": content["about"].get("data", {}).get("preset", ""),
            "metrics": dict(content["metrics"]),
            "acceptance_by_depth": content.get("acceptance_by_depth", []),
            "acceptance_by_tenth": content.get("acceptance_by_tenth", []),
            "tv_by_depth": content.get("tv_by_depth", []),
            "proximity_by_place": content.get("proximity_by_place", []),
            "grid": content.get("grid"),
            "time": content.get("time", {}),
            "paper": content["about"].get("paper"),
            "matched": _matched(content["about"].get("matched"), settings),
        }
        row["changes"] = dict(content["about"]["changes"])
        row["family"] = family_name(row["method"], row["changes"], row["matched"])
        _check_types(row)
        table.include(row["metrics"])
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise TemperaError(
            f"{directory / 'metrics.json'} is not an evaluation's result ({misfit(problem)}): "
            "run it again."
        ) from None
    try:
        row["texts"] = {str(prompt["id"]): str(prompt["text"]) for prompt in prompts}
        row["prompts"] = {str(prompt["id"]): _values(prompt) for prompt in prompts}
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise TemperaError(
            f"{directory / 'results.parquet'} is not an evaluation's result ({misfit(problem)}): "
            "run it again."
        ) from None
    return row


def _matched(found: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the run records about a search for its accepted length (`expected_length=`): the free
    parameter (`option`), its `value`, and its `length` on calibration prompts.
    """
    if found is None:
        return None
    float(settings["expected_length"])
    numbers = {name: float(found[name]) for name in ("value", "length")}
    return {"option": str(found["option"]), **numbers}


def _check_types(row: ReportRow) -> None:
    """Raise TypeError if a value has a type that no evaluation writes."""
    number = int | float | None
    kinds: dict[str, Any] = {"name": str, "method": str, "model": str, "machine": str}
    kinds |= {"delta": number, "seed": int | str | None, "images": int, "time": dict}
    kinds |= {name: list for name in row if name.startswith(("acceptance_by", "tv_by"))}
    for name, kind in kinds.items():
        if not isinstance(row[name], kind):
            raise TypeError(f"{name} is {row[name]!r}")
    for name, interval in row["metrics"].items():
        if not all(isinstance(value, number) for value in interval.values()):
            raise TypeError(f"{name} is {interval!r}")


def _values(prompt: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """A prompt's value and weight of each paired metric, by key."""
    values = {metric.key: metric.of_prompt(prompt) for metric in table.METRICS if metric.paired}
    return {key: value for key, value in values.items() if value is not None}


def _order(row: ReportRow) -> tuple[Any, ...]:
    return (
        row["model"],
        not is_plain(row["settings"]),
        row["method"] != "eagle",
        row["family"],
        row["delta"] or 0,
        row["seed"] or 0,
        row["directory"],
    )
