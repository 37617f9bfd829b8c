"""`dry_run=true`: how long a run takes, by what was timed on this device before."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ValidationError

from tempera.config.compose import option_name, typed
from tempera.config.parts import Parts
from tempera.errors import TemperaError
from tempera.runtime.files import read_json
from tempera.runtime.installation import command
from tempera.runtime.processor import Place, name_of
from tempera.training.recipe import Recipe

PLACE = {"device", "dtype", "compile", "weights", "outputs"}
"""Options that a benchmark of plain autoregression takes, too."""
STEP = ("batch_size", "gradient_accumulation", "mixed_precision", "ttt_steps", "logit_chunk")
"""Options of the recipe that the time of a step depends on."""


class Column(BaseModel):
    """What is read of a benchmark's column; see `evaluation.benchmark.BenchmarkColumn`."""

    batch_size: int
    images: float
    ratio: float
    method: dict[str, dict[str, float]]


class Bench(BaseModel):
    """What is read of a bench.json; see `evaluation.benchmark.BenchmarkReport`."""

    model: str
    round: Any
    device: str
    dtype: str
    steps: int
    bandwidth: float | None
    columns: list[Column]


@dataclass(frozen=True)
class Timing:
    """Where decoding is timed.

    Attributes:
        method: its name; None for one whose rounds no benchmark times.
        options: those of a `tempera-bench` that times it, or else plain autoregression.
        benches: where benchmarks have left what they found.
    """

    method: str | None
    options: list[str]
    benches: Path

    @classmethod
    def of_plain(cls, cfg: DictConfig, *, has_files: bool) -> "Timing":
        """Of plain autoregression on the place of a configuration of discrete tokens."""
        place = [option for option in typed(cfg) if option_name(option) in PLACE]
        options = [f"model={cfg.model.name}", "method=scd", *place]
        made = cls(None, options, Path(str(cfg.outputs)) / "bench")
        return made if has_files else made.without_weights

    @property
    def without_weights(self) -> "Timing":
        """The same with random weights, which take as long."""
        kept = [
            option
            for option in self.options
            if not option.startswith(("weights=", "drafter.path="))
        ]
        return replace(self, options=[*kept, "weights=random"])


def decoding_time(parts: Parts, timing: Timing, images: int | None, batch_size: int) -> str:
    """How long decoding takes by the last fitting benchmark: by the method where it was timed, else
    by plain autoregression; or how it is timed.

    Args:
        parts: model and method.
        timing: where it is timed.
        images: how many; None: an unknown number.
        batch_size: images decoded together.
    """
    bench = shlex.join([*timing.options, f"batch_sizes=[{batch_size}]"])
    times_it = f"`{command('bench')} {bench}` times"
    fitting = list(_fitting(parts, timing.benches, batch_size))
    if not fitting:
        return f"unknown; {times_it} rounds for the next dry_run"
    own = timing.method and [one for one in fitting if one[1].round == parts.round]
    file, found, column = (own or fitting)[0]
    plain = _clock((images or 1) / column.images)
    what = "each image" if images is None else "the images"
    place = f"on {found.device} ({file})"
    if own:
        by_method = f"{_by_method(found, column, images or 1)} by {timing.method}"
        return f"about {by_method}, {plain} by plain autoregression (h:mm:ss) for {what} {place}"
    advice = "" if timing.method is None else f"; {times_it} rounds of {timing.method}"
    return f"about {plain} (h:mm:ss) for {what} by plain autoregression {place}{advice}"


def _fitting(parts: Parts, benches: Path, batch_size: int) -> Iterator[tuple[Path, Bench, Column]]:
    """Benchmarks of the model in its place, each with its column of a batch size; latest first."""
    for file in _newest(benches, "bench.json"):
        try:
            bench = Bench.model_validate(read_json(file))
        except (TemperaError, ValidationError):  # of an earlier version, or of another program
            continue
        fits = bench.model == parts.model and bench.dtype == parts.place.dtype_name
        if not fits or not _is_of(parts.place, bench.device):
            continue
        for column in bench.columns:
            if column.batch_size == batch_size:
                yield file, bench, column


def _by_method(bench: Bench, column: Column, images: int) -> str:
    """How long the benchmark's method takes: for discrete tokens from … to, since that depends on
    how many drafts are accepted.
    """
    if bench.bandwidth is None:  # continuous tokens: whole images were decoded
        return _clock(images * column.method["whole"]["median"] / 1000 / column.batch_size)
    most = images / (column.images * column.ratio)
    least = most / (1 + bench.steps)
    return f"{_clock(least)} (all drafts accepted) to {_clock(most)} (none)"


def training_time(
    place: Place, facts: Mapping[str, Any], recipe: Recipe, steps: int | None, trainings: Path
) -> str | None:
    """How long the steps of a training take by the last fitting one; None if there is none.

    Args:
        place: of the target.
        facts: what else the time of a step depends on, as training.json records it.
        recipe: the recipe.
        steps: how many; None: an unknown number.
        trainings: where trainings have left what they took.
    """
    from tempera.training.checkpoint import RECORD  # half a second, which evaluations do not need
    from tempera.training.trainer import DRAFT, METRICS

    computed = str(place.arithmetic).removeprefix("torch.")
    for file in _newest(trainings, f"{DRAFT}/{METRICS}"):
        try:
            done: Any = read_json(file)
            record: Any = read_json(file.parents[1] / RECORD)
            fits = all(record[name] == value for name, value in facts.items())
            fits = fits and all(record["recipe"][name] == getattr(recipe, name) for name in STEP)
            if not fits or done["dtype"] != computed or not _is_of(place, done["device"]):
                continue
            each = done["seconds"] / done["steps"]
        except (TemperaError, KeyError):  # of an earlier version, or of another program
            continue
        together = "" if done["processes"] == 1 else f" in {done['processes']} processes"
        told = f"{each:.3g} seconds for each step"
        if steps is not None:
            told = f"about {_clock(steps * each)} (h:mm:ss) for {steps:,} steps"
        return f"{told} on {done['device']}{together}, by {done['steps']:,} steps ({file})"
    return None


def _newest(place: Path, name: str) -> list[Path]:
    """Files of this name, the latest first."""
    return sorted(place.rglob(name), key=lambda file: file.stat().st_mtime, reverse=True)


def _is_of(place: Place, device: str) -> bool:
    """Whether what was timed on a device holds at a place; of a GPU elsewhere, that of any GPU."""
    if place.device.type == "cuda" and not torch.cuda.is_available():
        return not device.startswith("cpu")
    return device == name_of(place.device)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(seconds)))
