"""The numbers of finished runs into results.json, from which render.py makes the pages. With them
stand each run's command, commit, machine and date, so collect on the machine that ran.

    python docs/results/collect.py rows             # of outputs/results and outputs/results_mar
    python docs/results/collect.py speed SESSION    # of outputs/SESSION, timed on this machine
    python docs/results/collect.py study            # new rows of the report in outputs/study_report

What is not there keeps the numbers that it has.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from tempera.reporting import baseline
from tempera.reporting.collect import find_runs, read_run
from tempera.reporting.finished_run import Run
from tempera.runtime.files import read_json

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("results.json")
RUNS = (ROOT / "outputs" / "results", ROOT / "outputs" / "results_mar")
METRICS = (
    "accepted_length",
    "fid",
    "kid",
    "clip_score",
    "attribute_accuracy",
    "broken",
    "tv",
    "tv_bound",
    "kl_per_token",
    "top1",
    "top10",
    "entropy",
    "shape_accuracy",
    "colour_accuracy",
)
UNNAMED = (
    *("experiment", "outputs", "tracking", "device", "launcher", "model"),
    *("weights", "dtype", "batch_sizes", "repeats", "statistics"),
)
"""Options that a row's name leaves out."""
PAIRED = ("broken", "attribute_accuracy", "shape_accuracy", "colour_accuracy", "clip_score")
SPEED = "python eval/run.py -m experiment=results_speed outputs=outputs/{}"
TABLES = {
    "overview": "Study: relaxations at equal accepted length",
    "losses": "Study: difference from plain autoregression",
    "differences": "Study: difference from uniform_rsd at equal length",
    "correlations": "Study: which divergence predicts the loss",
}


def read() -> dict[str, Any]:
    """The content of results.json."""
    results: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return results


def write(results: dict[str, Any]) -> None:
    """Write results.json, a line for each list."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda inner: f"[{' '.join(inner[1].split())}]", text)
    FILE.write_text(text + "\n", encoding="utf-8")


def row_of(directory: Path) -> str:
    """A run's row: its method and options as its command line gives them, after `mar` for the model
    of continuous tokens.
    """
    overrides = OmegaConf.load(directory / ".hydra" / "overrides.yaml")
    named = dict(str(override).split("=", 1) for override in overrides)
    model = OmegaConf.load(directory / ".hydra" / "config.yaml").model.name
    parts = ["mar"] if model == "shapes_mar" else []
    for name, value in named.items():
        if name == "method":
            parts.append(value)
        elif name not in UNNAMED:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def directories(*places: Path) -> dict[str, Path]:
    """The finished runs at or below the places, by their rows."""
    finished = find_runs([place for place in places if place.is_dir()]).finished
    return {row_of(directory): directory for directory in finished}


def rows() -> None:
    """Write the finished rows, with their differences from plain autoregression by prompt."""
    found = directories(*RUNS)
    done = {row: read_run(directory) for row, directory in found.items()}
    baseline.compare(list(done.values()))
    results = read()
    results["rows"] |= {row: numbers(run) for row, run in done.items()}
    results["runs"] |= {row: origin(directory) for row, directory in found.items()}
    write(results)


def origin(directory: Path) -> list[str]:
    """A run's command, commit, machine and date."""
    about: Any = read_json(directory / "run.json")
    command = f"python eval/run.py {shlex.join(about['overrides'])}"
    commit = about["commit"] or "installed"
    return [command, commit[:8] + commit[40:], processor(), about["started"][:10]]


def numbers(run: Run) -> dict[str, list[float]]:
    """A run's metrics, and its differences from plain autoregression."""
    values = {key: interval(run.metrics[key]) for key in METRICS if key in run.metrics}
    if run.differences:
        for key in PAIRED:
            values[f"{key}_minus_ar"] = interval(run.differences[key])
    return values


def interval(metric: Any) -> list[float]:
    """A value and its interval, or the value three times, to five digits."""
    rounded = []
    for part in ("value", "low", "high"):
        number = metric["value"] if metric[part] is None else metric[part]
        rounded.append(float(f"{number:.5g}"))
    return rounded


def speed(session: str) -> None:
    """Write what a session timed: of each row the cost of a round in rounds of plain AR with its
    interval, and of LlamaGen-XL milliseconds of AR's round, of the method's and of its drafting.
    """
    timed: dict[str, Any] = {}
    place = ROOT / "outputs" / session
    for row, directory in directories(place).items():
        efficiency = read_run(directory).metrics["efficiency"]
        ends = (efficiency["value"], efficiency["high"], efficiency["low"])
        timed["run"] = [SPEED.format(session), *origin(directory)[1:]]
        timed[row] = [round(1 / float(end or math.nan), 3) for end in ends]
    for path in place.rglob("bench.json"):
        (column,) = json.loads(path.read_text(encoding="utf-8"))["columns"]
        parts = (column["ar"]["round"], column["method"]["round"], column["method"]["draft"])
        timed[f"{row_of(path.parent)} on XL"] = [round(part["median"], 1) for part in parts]
    results = read()
    results["sessions"][session] = results["sessions"].get(session, {}) | timed
    write(results)


def processor() -> str:
    """The processor's name."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*: (.*)", facts)
    return re.sub(r"\(R\)|\(TM\)| Processor", "", name[1]) if name else "unknown processor"


def study() -> None:
    """Add the runs that the study lacks, with where they come from. Those that it has keep their
    numbers: a row's intervals belong to all comparisons of its own report.
    """
    cells = pd.read_csv(ROOT / "outputs" / "study_report" / "tables.csv")
    results = read()
    stored: dict[str, dict[str, Any]] = results.setdefault("study", {})
    added = by_row(cells, TABLES["overview"]).keys() - stored.get("overview", {}).keys()
    for table, title in TABLES.items():
        lines = by_row(cells, title)
        if table in stored:
            lines = {row: line for row, line in lines.items() if row in added}
        stored[table] = stored.get(table, {}) | lines
    for directory in directories(ROOT / "outputs" / "study").values():
        if (name := read_run(directory).name) in added:
            results["runs"][f"study, {name}"] = origin(directory)
    write(results)


def by_row(cells: pd.DataFrame, title: str) -> dict[str, dict[str, Any]]:
    """A report's table by row and column: a text, a value, or a value with its interval and whether
    it is significant.
    """
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells[cells["table"] == title].itertuples():
        row = rows.setdefault(cell.row, {})
        if isinstance(cell.text, str):
            row[cell.column] = cell.text
            continue
        if math.isnan(cell.value):
            continue
        stored: list[float | bool] = [float(f"{cell.value:.5g}")]
        if not math.isnan(cell.low):
            stored += [float(f"{cell.low:.5g}"), float(f"{cell.high:.5g}")]
            stored.append(cell.significant is True or cell.significant == "True")
        row[cell.column] = stored
    return rows


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"rows": rows, "speed": speed, "study": study}
    commands[sys.argv[1]](*sys.argv[2:])
