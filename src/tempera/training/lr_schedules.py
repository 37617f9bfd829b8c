"""Learning-rate schedules: functions from the step (counted from 0) to a multiple of the base rate.

All of them warm up linearly, reaching the base rate at step `warmup` − 1.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

Schedule = Callable[[int], float]
Decay = Literal["linear", "cosine", "constant", "trapezoid"]


def constant(warmup: int, steps: int) -> Schedule:
    """Warm-up, then the base rate."""
    return lambda step: _warming(step, warmup)


def linear(warmup: int, steps: int) -> Schedule:
    """Warm-up, then a straight line that reaches 0 at `steps`."""
    return lambda step: _warming(step, warmup) * (1 - _progress(step, warmup, steps))


def cosine(warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """Warm-up, then half a cosine that reaches `floor` at `steps`."""

    def factor(step: int) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, steps)))
        return _warming(step, warmup) * (floor + (1 - floor) * wave)

    return factor


def trapezoid(warmup: int, steps: int, descent: float = 0.35) -> Schedule:
    """Warm-up, a plateau, then a straight line to 0 over the last `descent` share of `steps`."""

    def factor(step: int) -> float:
        return max(min(_warming(step, warmup), (steps - step) / max(descent * steps, 1)), 0.0)

    return factor


SCHEDULES: Mapping[Decay, Callable[[int, int], Schedule]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "trapezoid": trapezoid,
}
"""The option `decay` → a function of (warm-up steps, all steps) that makes its schedule."""


def set_rate(optimisers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every parameter group's learning rate to `factor` times the rate it was made with."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def _warming(step: int, warmup: int) -> float:
    """Factor that rises linearly to 1 over the first `warmup` steps."""
    return min((step + 1) / warmup, 1.0) if warmup else 1.0


def _progress(step: int, warmup: int, steps: int) -> float:
    """How far the steps after the warm-up have come, in [0, 1]."""
    return min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
