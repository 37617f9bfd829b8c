"""`tempera-score`: score pictures, of runs and of other code, without the model that drew them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic import PositiveInt

from tempera.config.instantiate import from_options
from tempera.config.scorers import build_scorers
from tempera.config.tracking import Tracking
from tempera.errors import TemperaError
from tempera.evaluation.import_pictures import Folders, runs_at
from tempera.evaluation.score import Pictured, score
from tempera.evaluation.summary import pictured, summarise
from tempera.metrics.evaluators import Evaluator, NoEvaluator
from tempera.runtime.files import read_json
from tempera.runtime.processor import parse_device


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/score.yaml says what each is."""

    runs: str | list[str]
    output: str | None
    outputs: str
    captions: str | None
    grid: PositiveInt
    drawn_by: str | None
    scores: str | None
    against: str | None
    device: str
    verbose: bool


def main(cfg: DictConfig) -> dict[str, dict[str, float]]:
    """Score each run, print its metrics, and return them by directory."""
    options, scorers = read_options(cfg)
    tracking = Tracking.of(cfg, "eval")
    device = parse_device(options.device)
    directories = list(_directories(options, scorers))
    found = [(directory, pictured(directory)) for directory in directories]
    for directory, own in found:
        _check(directory, own, scorers)
    for scorer in scorers:
        scorer.fetch()
    metrics = {}
    for directory, own in found:
        name = str(read_json(directory / "run.json")["name"])
        with tracking.start(directory, name=name) as tracker:
            metrics[str(directory)] = _scored(own, scorers, device, tracker, options.verbose)
    return metrics


def read_options(cfg: DictConfig) -> tuple[Options, list[Evaluator]]:
    """What this command reads itself.

    Raises:
        TemperaError: also if nothing is to be scored with.
    """
    if "runs" not in cfg:
        raise TemperaError("give runs=DIR: a run, or a folder of pictures", option="runs")
    options = from_options(cfg, Options)
    scorers = build_scorers(cfg, options.scores, options.against)
    if all(isinstance(scorer, NoEvaluator) for scorer in scorers):
        raise TemperaError(
            "there is no metric to score with: give metrics=real, torchmetrics=NAME or scores=FILE",
            option="metrics",
        )
    return options, scorers


def _directories(options: Options, scorers: list[Evaluator]) -> Iterator[Path]:
    """The run directories to score: those at or below `runs`, and those that are made of folders of
    pictures, unless a scorer is not for these.
    """
    sources = [options.runs] if isinstance(options.runs, str) else options.runs
    folders = Folders(
        options.outputs, options.captions, options.grid, options.drawn_by, options.output
    )
    for source in map(Path, sources):
        if runs := runs_at(source):
            yield from runs
            continue
        for scorer in scorers:
            scorer.check(options.drawn_by or "")
        yield folders.run_of(source)


def _check(directory: Path, own: Pictured, scorers: list[Evaluator]) -> None:
    """Raise TemperaError for what would be in the way of scoring, before anything is scored."""
    run: Any = read_json(directory / "run.json")
    model = run["identity"].get("model") or run.get("drawn_by") or ""
    own.check()
    for scorer in scorers:
        scorer.check(model)
        scorer.check_prompts(own.prompts)


def _scored(
    own: Pictured, scorers: list[Evaluator], device: torch.device, tracker: Any, verbose: bool
) -> dict[str, float]:
    """Score a run's pictures, and show what the run holds then."""
    from tempera.reporting import run_report  # matplotlib takes a second to import

    score(own, scorers, device)
    result = summarise(own.directory)
    run_report.write(own.directory, tracker, verbose)
    values = {key: interval["value"] for key, interval in result["metrics"].items()}
    return {key: value for key, value in values.items() if value is not None}
