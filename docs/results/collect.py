"""The numbers of finished runs into results.json, from which render.py makes the pages.

    python docs/results/collect.py rows             # of outputs/results and outputs/results_mar
    python docs/results/collect.py speed SESSION    # of outputs/SESSION, timed on this machine
    python docs/results/collect.py study            # of the report in outputs/study_report

What is not there keeps the numbers that it has.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from tempera.reporting import baseline
from tempera.reporting.collect import find_runs, read_run
from tempera.reporting.finished_run import Run

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("results.json")
RUNS = (ROOT / "outputs" / "results", ROOT / "outputs" / "results_mar")
METRICS = (
    "accepted_length",
    "fid",
    "kid",
    "clip_score",
    "attribute_accuracy",
    "tv",
    "tv_bound",
    "kl_per_token",
    "top1",
    "top10",
    "entropy",
    "shape_accuracy",
    "colour_accuracy",
)
PAIRED = ("attribute_accuracy", "shape_accuracy", "colour_accuracy", "clip_score")
TABLES = {
    "overview": "Study: relaxations at equal accepted length",
    "losses": "Study: difference from plain autoregression",
    "differences": "Study: difference from uniform_rsd at equal length",
    "correlations": "Study: which divergence predicts the loss",
}


def read() -> dict[str, Any]:
    """The content of results.json."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write(results: dict[str, Any]) -> None:
    """Write results.json, a line for each list."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    FILE.write_text(text + "\n", encoding="utf-8")


def row_of(directory: Path) -> str:
    """A run's row: its method and options as its command line gives them, after `mar` for the model
    of continuous tokens.
    """
    overrides = OmegaConf.load(directory / ".hydra" / "overrides.yaml")
    named = dict(str(override).split("=", 1) for override in overrides)
    model = OmegaConf.load(directory / ".hydra" / "config.yaml").model.name
    options = [
        value if name == "method" else f"{name}={value}"
        for name, value in named.items()
        if name not in ("experiment", "outputs", "tracking", "device", "launcher", "model")
    ]
    return " ".join([*(["mar"] if model == "shapes_mar" else []), *options])


def directories(*places: Path) -> dict[str, Path]:
    """The finished runs at or below the places, by their rows."""
    here = [place for place in places if place.is_dir()]
    return {row_of(directory): directory for directory in find_runs(here)[0]}


def rows() -> None:
    """Write the finished rows, with their differences from plain autoregression by prompt."""
    done = {row: read_run(directory) for row, directory in directories(*RUNS).items()}
    baseline.compare(list(done.values()))
    results = read()
    results["rows"] |= {row: numbers(run) for row, run in done.items()}
    write(results)


def numbers(run: Run) -> dict[str, list[float]]:
    """A run's metrics, and its differences from plain autoregression."""
    found = {key: interval(run.metrics[key]) for key in METRICS if key in run.metrics}
    for key in PAIRED:
        if run.differences:
            found[f"{key}_minus_ar"] = interval(run.differences[key])
    return found


def interval(metric: Any) -> list[float]:
    """A value and its interval, or the value three times, to five digits."""
    ends = [metric[end] for end in ("value", "low", "high")]
    return [float(f"{metric['value'] if end is None else end:.5g}") for end in ends]


def speed(session: str) -> None:
    """Write what a session timed: of each row the cost of a round in rounds of plain AR with its
    interval, and of LlamaGen-XL milliseconds of AR's round, of the method's and of its drafting.
    """
    timed: dict[str, Any] = {"machine": processor()}
    place = ROOT / "outputs" / session
    for row, directory in directories(place).items():
        efficiency = read_run(directory).metrics["efficiency"]
        ends = (efficiency["value"], efficiency["high"], efficiency["low"])
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
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return re.sub(r"\(R\)|\(TM\)| Processor", "", found[1]) if found else "unknown processor"


def study() -> None:
    """Write the study's tables."""
    cells = pd.read_csv(ROOT / "outputs" / "study_report" / "tables.csv")
    write(read() | {"study": {name: by_row(cells, title) for name, title in TABLES.items()}})


def by_row(cells: pd.DataFrame, title: str) -> dict[str, dict[str, Any]]:
    """A report's table by row and column: a text, a value, or a value with its interval and whether
    it is significant.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell in cells[cells["table"] == title].itertuples():
        stored = [float(f"{cell.value:.5g}")]
        if not math.isnan(cell.low):
            stored += [float(f"{end:.5g}") for end in (cell.low, cell.high)]
            stored.append(cell.significant is True or cell.significant == "True")
        is_text = isinstance(cell.text, str)
        found.setdefault(cell.row, {})[cell.column] = cell.text if is_text else stored
    return found


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"rows": rows, "speed": speed, "study": study}
    commands[sys.argv[1]](*sys.argv[2:])
