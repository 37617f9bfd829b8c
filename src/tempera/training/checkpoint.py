"""The training state in one safetensors file, written atomically: weights, optimiser moments and
moving average, with the counters in the metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.files import (
    check_same,
    create_json,
    fingerprint,
    read_json,
    reason,
    regular_file,
    replacing,
)

FORMAT = 2
"""Raise it where a training that an earlier version began cannot go on to the same weights."""
LAST = "last.safetensors"
RECORD = "training.json"
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class TrainingProgress:
    """Counters of a training run.

    Attributes:
        step: optimiser steps taken.
        seconds: time spent, over all restarts.
        best: validation metrics of the best checkpoint so far, with its step.
        latest: the latest validation metrics.
    """

    step: Annotated[int, Field(ge=0)] = 0
    seconds: Amount = 0.0
    best: dict[str, Amount] = field(default_factory=dict)
    latest: dict[str, Amount] = field(default_factory=dict)


@dataclass
class State:
    """The state that a training step changes. Learning rates are not included, because a schedule
    sets them at every step.

    Attributes:
        network: what is trained.
        optimisers: Adam, AdamW or Muon, of its parameters; their moments are made here.
        beside: other tensors that change in place, such as those of a moving average.
        progress: the counters.
    """

    network: nn.Module
    optimisers: Sequence[torch.optim.Optimizer]
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def __post_init__(self) -> None:
        for optimiser in self.optimisers:
            muon = isinstance(optimiser, torch.optim.Muon)
            for weight in (one for group in optimiser.param_groups for one in group["params"]):
                names = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
                steps = {} if muon else {"step": torch.tensor(0.0)}
                optimiser.state[weight] = {name: torch.zeros_like(weight) for name in names} | steps

    def tensors(self) -> dict[str, Tensor]:
        """Weights, the tensors beside them and the moments, by their names in the file."""
        named = {f"network/{name}": value for name, value in self.network.state_dict().items()}
        named |= {f"beside/{name}": value for name, value in self.beside.items()}
        for number, optimiser in enumerate(self.optimisers):
            for index, moments in optimiser.state_dict()["state"].items():
                place = f"optimiser/{number}/{index}"
                named |= {f"{place}/{name}": value for name, value in moments.items()}
        return named


def save_state(directory: Path, state: State, made_by: str) -> None:
    """Write `directory/last.safetensors`, with what `keep_record` returned."""
    facts = {"progress": json.dumps(asdict(state.progress)), "made_by": made_by}
    kept = {name: value.detach().cpu().contiguous() for name, value in state.tensors().items()}
    with replacing(directory / LAST) as temporary:
        save_file(kept, temporary, metadata=facts)


def load_state(directory: Path, state: State, steps: int, made_by: str) -> bool:
    """Fill `state` from `directory/last.safetensors`; False if there is not such a file.

    Raises:
        TemperaError: the file is damaged, belongs to another training or network, or has more than
            `steps` steps.
    """
    path = directory / LAST
    if not path.exists():
        return False
    own = state.tensors()
    try:
        with safe_open(regular_file(path), "pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if facts.get("made_by") != made_by:
            raise ValueError("it belongs to another training")
        told = facts.get("progress", "null")
        progress = TypeAdapter(TrainingProgress).validate_json(told, strict=True)
        if progress.step > steps:
            raise ValueError(f"step {progress.step} of {steps}")
        if unpaired := sorted(own.keys() ^ tensors.keys()):
            raise ValueError(f"{unpaired[0]} is {'missing' if unpaired[0] in own else 'unknown'}")
        for name, value in tensors.items():
            if value.shape != own[name].shape or value.dtype != own[name].dtype:
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)}")
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{name} is not finite")
    except (SafetensorError, OSError, ValueError) as problem:
        raise TemperaError(
            f"training cannot resume from {path} ({reason(problem)}): delete {directory} to start "
            "anew."
        ) from problem
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    state.progress = progress
    return True


def keep_record(directory: Path, record: dict[str, Any], write: bool) -> str:
    """Record a run's configuration in its directory; refuse to resume it with another one.

    Returns:
        What the other parts of the training carry.

    Raises:
        TemperaError: the directory holds a run with another configuration.
    """
    path = directory / RECORD
    record = {"format": FORMAT, **record}
    if not (write and create_json(path, record)) and path.exists():
        check_same(directory, read_json(path), record)
    return fingerprint(record)
