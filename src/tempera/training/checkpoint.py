"""The training state in one safetensors file, written atomically: weights, optimiser moments and
moving average, with the counters in the metadata.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import create_json, read_json, regular_file, replacing
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
    """The state that a training step changes. `average` is empty without a moving average. Learning
    rates are not included, because a schedule sets them at every step.
    """

    network: nn.Module
    optimisers: Sequence[torch.optim.Optimizer]
    average: dict[str, Tensor]
    progress: TrainingProgress


_DAMAGES = (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError)


def save_state(directory: Path, state: State, write: bool = True) -> None:
    """Write `directory/last.safetensors`, which holds whole tensors. All processes of a split
    network must call this together, since they gather its tensors one by one; only the process with
    `write` writes.
    """
    tensors = {f"network/{name}": value for name, value in state.network.state_dict().items()}
    tensors |= {f"average/{name}": value for name, value in state.average.items()}
    for number, optimiser in enumerate(state.optimisers):
        for index, moments in optimiser.state_dict()["state"].items():
            place = f"optimiser/{number}/{index}"
            tensors |= {f"{place}/{name}": value for name, value in moments.items()}
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
    """Fill `state` from `directory/last.safetensors`; False if there is no such file.

    Raises:
        TemperaError: the file is damaged or belongs to another network.
    """
    path = directory / LAST
    if not path.exists():
        return False
    regular_file(path)
    try:
        with safe_open(path, "pt") as file:
            progress = json.loads((file.metadata() or {})["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        now = state.network.state_dict()
        saved = _under("network/", tensors).items()
        state.network.load_state_dict({name: as_split(value, now[name]) for name, value in saved})
        for number, optimiser in enumerate(state.optimisers):
            moments = _moments(_under(f"optimiser/{number}/", tensors), _parameters(optimiser))
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        if set(average := _under("average/", tensors)) != set(state.average):
            raise KeyError("moving average")
        for name, value in average.items():
            state.average[name].copy_(as_split(value, state.average[name]))
        state.progress = TrainingProgress(**progress)
    except (*_DAMAGES, RuntimeError) as problem:
        reason = shortened(str(problem))
        raise TemperaError(
            f"training cannot resume from {path} ({reason}): delete {directory} to start anew."
        ) from problem
    return True


def keep_record(directory: Path, record: dict[str, Any], write: bool) -> None:
    """Record a run's configuration in its directory; refuse to resume it with another one.

    Raises:
        TemperaError: the directory holds a run with another configuration.
    """
    path = directory / RECORD
    now: dict[str, Any] = json.loads(json.dumps(record))
    if write and create_json(path, now):
        return
    if not path.exists():
        return
    before, after = _flat(read_json(path)), _flat(now)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise TemperaError(
                f"{directory} was started with {name}={before.get(name)}, now it is "
                f"{after.get(name)}: give another run directory, delete this one, or use the "
                "original options."
            )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _moments(tensors: dict[str, Tensor], parameters: list[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Every parameter's moments, split in the same way as the parameter; scalar counters are not
    split.
    """
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
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
