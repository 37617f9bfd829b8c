"""What the stages share: a training loop that continues where it was stopped, batches that are made
ahead, and the record of how a network was made.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from tempera.runtime.files import fingerprint, read_json, write_json
from tempera.runtime.installation import commit
from tempera.runtime.network_directory import write_network
from tempera.training.averaging import moving_average
from tempera.training.checkpoint import Checkpoints, TrainingProgress
from tempera.training.lr_schedules import Schedule, set_rate

log = logging.getLogger(__name__)

RECORD = "training.json"
Losses = Iterable[Mapping[str, Tensor]]
"""The parts of a batch's loss, to be added up; `loss` is minimised, the others are logged."""


Batch = TypeVar("Batch")


class Settings(Protocol):
    """What every training has."""

    steps: int
    seed: int
    save_every: int


def minimise(
    network: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    schedule: Schedule,
    losses: Callable[[int], Losses],
    settings: Settings,
    run: Path,
    clip: float = torch.inf,
    ema: float = 0.0,
) -> nn.Module:
    """Train a network in place, from where `run` left off; a step depends on the seed and its
    number alone, so that an interrupted training ends with the same weights.

    Args:
        network: with its initial weights.
        optimisers: of its parameters.
        schedule: of their learning rates.
        losses: of a step.
        settings: its steps, seed, and after how many steps a checkpoint is written.
        run: the directory of checkpoints.
        clip: largest norm of the gradient.
        ema: decay of the moving average of the weights; 0 keeps none.

    Returns:
        the moving average, or without one the network, in evaluation mode.
    """
    average = moving_average(network, ema) if ema else None
    extra = {} if average is None else average.state_dict()
    accelerator = Accelerator(device_placement=False)
    accelerator.prepare(network, *optimisers)
    checkpoints = Checkpoints(run, accelerator, network, extra)
    made_by = fingerprint({"network": run.name, "seed": settings.seed})
    progress = checkpoints.load(settings.steps, made_by) or TrainingProgress()
    while progress.step < settings.steps:
        step = progress.step
        set_rate(optimisers, schedule(step))
        torch.manual_seed(settings.seed * 1_000_003 + step)
        network.zero_grad()
        values: dict[str, float] = {}
        for part in losses(step):
            part["loss"].backward()
            for name, value in part.items():
                values[name] = values.get(name, 0.0) + value.item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        for optimiser in optimisers:
            optimiser.step()
        if average is not None:
            average.update_parameters(network)
        progress.step += 1
        if step % 50 == 0:
            log.info("%s, step %d: %s", run.name, step, values)
        if progress.step % settings.save_every == 0:
            checkpoints.save(progress, made_by)
    trained = network if average is None else average.module
    return trained.eval().requires_grad_(False)


def device() -> torch.device:
    """Where the discrete model is trained: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Ahead(Dataset[Batch], Generic[Batch]):
    """The batches of a training's steps, in turn. Where a GPU trains, other processes make them
    ahead.

    Args:
        make: a step's batch of tensors on the CPU.
        steps: of the training.
    """

    def __init__(self, make: Callable[[int], Batch], steps: int) -> None:
        self.make = make
        self.steps = steps
        self._batches: Iterator[Batch] | None = None

    @override
    def __getitem__(self, step: int) -> Batch:
        return self.make(step)

    def batch(self, step: int) -> Batch:
        """That of the next step; the first call begins at any."""
        if self._batches is None:
            workers = (os.cpu_count() or 1) - 1 if device().type == "cuda" else 0
            # its own generator: the loader's seed must not move the steps' random numbers
            options: dict[str, Any] = {"num_workers": workers, "generator": torch.Generator()}
            loader = DataLoader(self, None, sampler=range(step, self.steps), **options)
            self._batches = iter(loader)
        return next(self._batches)


@contextmanager
def arithmetic(bf16: bool, device_type: str = "cpu") -> Iterator[None]:
    """Forward passes of a training, in bfloat16 autocast if asked. On a CPU the backward pass of
    fused attention takes twice as long.
    """
    kernels = [SDPBackend.MATH]
    if device_type != "cpu":
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, *kernels]
    with sdpa_kernel(kernels), torch.autocast(device_type, torch.bfloat16, enabled=bf16):
        yield


def muon(parameters: Iterable[nn.Parameter], lr: float, decay: float) -> torch.optim.Optimizer:
    """Muon for matrices (Jordan et al. 2024), and for convolutions [out, in, h, w] as matrices
    [out, in·h·w] in the same memory.
    """
    weights = list(parameters)
    flat = [nn.Parameter(weight.data.flatten(1)) for weight in weights]
    optimiser = torch.optim.Muon(flat, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    def hand_over(*_: Any) -> None:
        for weight, matrix in zip(weights, flat, strict=True):
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)

    optimiser.register_step_pre_hook(hand_over)
    return optimiser


def write_half(
    directory: Path, network: nn.Module | Mapping[str, Tensor], config: Any, prefix: str = ""
) -> None:
    """Write a network, with its floats as float16."""
    state = network.state_dict() if isinstance(network, nn.Module) else network
    half = {}
    for name, value in state.items():
        half[name] = (value.half() if value.is_floating_point() else value).clone()
    sizes = config if isinstance(config, dict) else asdict(config)
    write_network(directory, half, sizes, prefix)


def record(directory: Path, settings: Any, metrics: Mapping[str, float], began: float) -> None:
    """Write beside a network how it was made; seconds are those since it was last started."""
    facts = {
        "commit": commit(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "settings": asdict(settings),
        "metrics": dict(metrics),
    }
    write_json(directory / RECORD, facts)
    log.info("%s: %s", directory, facts)


def is_built(directory: Path, settings: Any) -> bool:
    """Whether a stage with these settings left its record here."""
    path = directory / RECORD
    return path.is_file() and read_json(path)["settings"] == asdict(settings)
