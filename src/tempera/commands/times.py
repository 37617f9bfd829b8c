"""`dry_run=true`: how long a run takes, by what was timed on this device before."""

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tempera.config.parts import Parts
from tempera.errors import TemperaError
from tempera.runtime.files import read_json
from tempera.runtime.installation import command
from tempera.runtime.processor import Place, name_of
from tempera.training.checkpoint import RECORD
from tempera.training.recipe import Recipe
from tempera.training.trainer import DRAFT, METRICS

STEP = ("batch_size", "gradient_accumulation", "mixed_precision", "ttt_steps", "logit_chunk")
"""Options of the recipe that the time of a step depends on."""


def decoding_time(parts: Parts, images: int | None, batch_size: int, benches: Path) -> str:
    """How long plain autoregression takes by the last fitting timing, or how it is timed."""
    for file in _newest(benches, "bench.json"):
        bench: Any = read_json(file)
        fits = bench["model"] == parts.model and bench["dtype"] == parts.place.dtype_name
        if not fits or not _is_of(parts.place, bench["device"]):
            continue
        for column in bench["columns"]:
            if column["batch_size"] == batch_size:
                told = _clock((images or 1) / column["images"])
                return (
                    f"{told} for {'each image' if images is None else 'the images'} by plain "
                    f"autoregression on {bench['device']} ({file}); divide it by the speed-up of "
                    "your method"
                )
    method = "scd" if parts.is_discrete else "cspd"
    timed = f"{command('bench')} model={parts.model} method={method} batch_sizes=[{batch_size}]"
    return f"unknown; `{timed}` times rounds for the next dry_run"


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
            told = f"{_clock(steps * each)} for {steps:,} steps"
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
    return f"about {timedelta(seconds=math.ceil(seconds))} (h:mm:ss)"
