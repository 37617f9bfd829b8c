"""What all trainings of the build share: their steps, which continue where they were stopped, and
the moving average of the weights.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from tempera.training.checkpoint import State, load_state, save_state
from tempera.training.lr_schedules import Schedule, set_rate


class Steps(Protocol):
    """Settings of a training: its steps, and after how many of them it is saved each time."""

    @property
    def steps(self) -> int:
        """All steps."""

    @property
    def save_every(self) -> int:
        """Steps from one checkpoint to the next."""


def remaining_steps(
    directory: Path, state: State, settings: Steps, schedule: Schedule
) -> Iterator[int]:
    """The steps that `directory` does not have yet, counted from 0, each with its learning rates
    set. Fills `state` from the directory first, and saves it there after every `save_every` steps.

    Raises:
        TemperaError: what was saved is damaged or of another network.
    """
    load_state(directory, state)
    while state.progress.step < settings.steps:
        set_rate(state.optimisers, schedule(state.progress.step))
        yield state.progress.step
        state.progress.step += 1
        if state.progress.step % settings.save_every == 0:
            save_state(directory, state)


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Move the average of a network's weights towards them; faster in the first steps."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - decay)


def take_step(optimisers: Sequence[torch.optim.Optimizer]) -> None:
    """A step of every optimiser; gradients are None afterwards."""
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()
