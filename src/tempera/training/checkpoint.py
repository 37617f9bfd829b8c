"""The training state as one safetensors file, written atomically: weights, optimiser moments,
moving average; counters in the metadata.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import read_json, replacing, write_json
from tempera.training.fsdp import as_split, whole

LAST = "last.safetensors"
RECORD = "training.json"


@dataclass
class TrainingProgress:
    """Counters of a training run.

    Attributes:
        step: optimiser steps taken.
        seconds: time spent, over all restarts.
        best: validation metrics of the best checkpoint so far, with its step.
        latest: the latest validation metrics.
    """

    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)


@dataclass
class State:
    """Everything that a training step changes. `average` is empty without a moving average."""

    draft: nn.Module
    optimiser: torch.optim.Optimizer
    average: dict[str, Tensor]
    progress: TrainingProgress


def save_state(directory: Path, state: State, write: bool = True) -> None:
    """Write `directory/last.safetensors`, whole tensors only: of a split draft all processes gather
    them together, one by one, and one writes.
    """
    tensors = {f"draft/{name}": value for name, value in state.draft.state_dict().items()}
    tensors |= {f"average/{name}": value for name, value in state.average.items()}
    for index, moments in state.optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser/{index}/{name}": value for name, value in moments.items()}
    kept = {}
    for name, value in tensors.items():
        gathered = whole(value)
        if write:
            kept[name] = gathered.detach().cpu().contiguous()
    if not write:
        return
    with replacing(directory / LAST) as temporary:
        save_file(kept, temporary, metadata={"progress": json.dumps(asdict(state.progress))})


def load_state(directory: Path, state: State) -> bool:
    """Fill `state` from `directory/last.safetensors`; False when there is none.

    Raises:
        TemperaError: the file is damaged or belongs to another network.
    """
    path = directory / LAST
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            progress = json.loads((file.metadata() or {})["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        now = state.draft.state_dict()
        state.draft.load_state_dict(
            {name: as_split(value, now[name]) for name, value in _under("draft/", tensors).items()}
        )
        parameters = [
            parameter for group in state.optimiser.param_groups for parameter in group["params"]
        ]
        state.optimiser.load_state_dict(
            {**state.optimiser.state_dict(), "state": _moments(tensors, parameters)}
        )
        if set(average := _under("average/", tensors)) != set(state.average):
            raise KeyError("moving average")
        for name, value in average.items():
            state.average[name].copy_(as_split(value, state.average[name]))
        state.progress = TrainingProgress(**progress)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as problem:
        reason = str(problem).splitlines()[0]
        raise TemperaError(
            f"{path} cannot be resumed from ({reason}): delete {directory} to train from the start."
        ) from problem
    return True


def keep_record(directory: Path, record: dict[str, Any], write: bool) -> None:
    """Remember what a run directory is for, and refuse to continue it as something else.

    Raises:
        TemperaError: the directory was begun with another configuration.
    """
    path = directory / RECORD
    now: dict[str, Any] = json.loads(json.dumps(record))
    if not path.exists():
        if write:
            write_json(path, now)
        return
    before, after = _flat(read_json(path)), _flat(now)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise TemperaError(
                f"{directory} was begun with {name}={before.get(name)}, now it is "
                f"{after.get(name)}: "
                "give another run directory, delete this one, or use the options it was begun with."
            )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _moments(tensors: dict[str, Tensor], parameters: list[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Of every parameter, split as it is; counters, which have no dimensions, are whole."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _under("optimiser/", tensors).items():
        index, _, moment = name.partition("/")
        moments.setdefault(int(index), {})[moment] = (
            as_split(value, parameters[int(index)]) if value.dim() else value
        )
    return moments


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return flat
