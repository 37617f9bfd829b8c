"""The training state in one safetensors file, written atomically: weights, optimiser moments and
moving average, with the counters in the metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import check_same, create_json, read_json, regular_file, replacing

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
        optimisers: Adam, AdamW or Muon, of its parameters.
        beside: other tensors that change in place, such as those of a moving average.
        progress: the counters.
    """

    network: nn.Module
    optimisers: Sequence[torch.optim.Optimizer]
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and the tensors beside them, by their names in the file."""
        network = {f"network/{name}": value for name, value in self.network.state_dict().items()}
        return network | {f"beside/{name}": value for name, value in self.beside.items()}


def save_state(directory: Path, state: State) -> None:
    """Write `directory/last.safetensors`."""
    tensors = state.tensors()
    for number, optimiser in enumerate(state.optimisers):
        for index, moments in optimiser.state_dict()["state"].items():
            place = f"optimiser/{number}/{index}"
            tensors |= {f"{place}/{name}": value for name, value in moments.items()}
    kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with replacing(directory / LAST) as temporary:
        save_file(kept, temporary, metadata={"progress": json.dumps(asdict(state.progress))})


def load_state(directory: Path, state: State, steps: int) -> bool:
    """Fill `state` from `directory/last.safetensors`; False if there is no such file.

    Raises:
        TemperaError: the file is damaged, belongs to another network, or has more than `steps`
            steps.
    """
    path = directory / LAST
    if not path.exists():
        return False
    regular_file(path)
    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get("progress", "null")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        progress = TypeAdapter(TrainingProgress).validate_json(told, strict=True)
        if progress.step > steps:
            raise ValueError(f"step {progress.step} of {steps}")
        _check(state, tensors)
    except (SafetensorError, OSError, ValueError) as problem:
        raise TemperaError(
            f"training cannot resume from {path} ({_reason(problem)}): delete {directory} to start "
            "anew."
        ) from problem
    with torch.no_grad():
        for name, value in state.tensors().items():
            value.copy_(tensors[name])
    for number, optimiser in enumerate(state.optimisers):
        found: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            if name.startswith(f"optimiser/{number}/"):
                index, moment = name.split("/")[2:]
                found.setdefault(int(index), {})[moment] = tensors[name]
        optimiser.load_state_dict({**optimiser.state_dict(), "state": found})
    state.progress = progress
    return True


def _check(state: State, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a file's tensors are those of the state, with the moments of no
    parameter (it had no gradient yet) or all of them.
    """
    own = state.tensors()
    begun = {name.rpartition("/")[0] for name in tensors if name.startswith("optimiser/")}
    expected = dict(own)
    for number, optimiser in enumerate(state.optimisers):
        parameters = [one for group in optimiser.param_groups for one in group["params"]]
        for index, parameter in enumerate(parameters):
            if (place := f"optimiser/{number}/{index}") in begun:
                if isinstance(optimiser, torch.optim.Muon):
                    expected[f"{place}/momentum_buffer"] = parameter
                else:
                    expected |= {f"{place}/exp_avg{end}": parameter for end in ("", "_sq")}
                    expected[f"{place}/step"] = torch.tensor(0.0)
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in expected or name not in tensors:
            raise ValueError(f"{name} is {'missing' if name in expected else 'unknown'}")
        found, wanted = tensors[name], expected[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            shapes = [f"{one.dtype} {list(one.shape)}" for one in (found, wanted)]
            raise ValueError(f"{name} is {shapes[0]}, not {shapes[1]}")
        if found.is_floating_point() and not found.isfinite().all():
            raise ValueError(f"{name} is not finite")


def _reason(problem: Exception) -> str:
    if not isinstance(problem, ValidationError):
        return shortened(str(problem))
    first = problem.errors()[0]
    return shortened(f"{'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}")


def keep_record(directory: Path, record: dict[str, Any], write: bool) -> None:
    """Record a run's configuration in its directory; refuse to resume it with another one.

    Raises:
        TemperaError: the directory holds a run with another configuration.
    """
    path = directory / RECORD
    if not (write and create_json(path, record)) and path.exists():
        check_same(directory, read_json(path), record)
