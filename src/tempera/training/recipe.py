"""How a draft is trained: every number that decides the weights."""

import math
from dataclasses import dataclass
from typing import Literal

from tempera.errors import TemperaError
from tempera.training.lr_schedules import SCHEDULES, Decay, Schedule


@dataclass(frozen=True)
class Recipe:
    """Defaults are those of EAGLE, LANTERN and Cool-SD for 100k images: 20 epochs of batches of 16.

    Attributes:
        steps: optimiser steps.
        batch_size: images per optimiser step, over all processes and accumulated parts.
        gradient_accumulation: parts that a process takes a batch in, one after the other, to save
            memory; it does not change the gradients.
        lr: peak learning rate, reached linearly over `warmup_steps` steps, then decayed as `decay`
            says: linear, cosine, constant or trapezoid (`tempera.training.lr_schedules`).
        grad_clip: largest norm of the gradient; 0 does not clip.
        hidden_noise: uniform noise in ± this is added to the input hidden states.
        ttt_steps: unrolled training steps after the first, each from the draft's own predictions of
            the step before (HASS, EAGLE-3; 0 is EAGLE-1). With k of them the pass that has a
            gradient runs over 1 + k copies of the images, after k passes without gradient over 1 …
            k copies.
        ttt_decay: step i of the unrolled steps, counted from 0, has the weight ttt_decay^i in the
            loss (EAGLE-3: 0.8; 1 weighs all steps alike). Weights are divided by their sum.
        cfg_dropout: probability that an image becomes null-conditioned, for target and draft alike.
            A loss after guidance takes every image with and without its condition instead.
        ema: decay of the moving average of the weights, which is then what is validated and saved;
            0 keeps none.
        mixed_precision: "no" or "bf16".
        validate_every, checkpoint_every: in steps.
        holdout: held-out images per validation; `decodes`: how many of their captions are drawn
            with the draft at `depth`.
        logit_chunk: positions whose logits are held in memory at a time.
    """

    steps: int = 125_000
    batch_size: int = 16
    gradient_accumulation: int = 1
    lr: float = 1e-4
    warmup_steps: int = 2000
    decay: Decay = "linear"
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 0.5
    hidden_noise: float = 0.1
    ttt_steps: int = 0
    ttt_decay: float = 1.0
    cfg_dropout: float = 0.1
    ema: float = 0.0
    mixed_precision: Literal["no", "bf16"] = "no"
    seed: int = 0
    validate_every: int = 1000
    checkpoint_every: int = 500
    log_every: int = 10
    holdout: int = 64
    decodes: int = 4
    depth: int = 5
    logit_chunk: int = 4096

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "gradient_accumulation",
            "validate_every",
            "checkpoint_every",
            "log_every",
            "holdout",
            "depth",
            "logit_chunk",
        ):
            if getattr(self, name) < 1:
                raise TemperaError(f"{name}={getattr(self, name)} is too small: give at least 1.")
        for name in (
            "warmup_steps",
            "weight_decay",
            "grad_clip",
            "hidden_noise",
            "ttt_steps",
            "decodes",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise TemperaError(f"{name}={getattr(self, name)} is not possible: give 0 or more.")
        for name in ("cfg_dropout", "ema", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise TemperaError(
                    f"{name}={getattr(self, name)} is not possible: give a number in [0, 1)."
                )
        if not 0 < self.lr < math.inf:
            raise TemperaError(f"lr={self.lr} is not possible: give a positive number.")
        if not 0 < self.ttt_decay <= 1:
            raise TemperaError(
                f"ttt_decay={self.ttt_decay} is not possible: give a number above 0, at most 1."
            )
        for name, choices in (
            ("decay", tuple(SCHEDULES)),
            ("mixed_precision", ("no", "bf16")),
        ):
            if getattr(self, name) not in choices:
                raise TemperaError(
                    f"{name}={getattr(self, name)} is unknown: choose one of {', '.join(choices)}."
                )

    @property
    def schedule(self) -> Schedule:
        """The learning rate of a step (from 0), as a multiple of `lr`."""
        return SCHEDULES[self.decay](self.warmup_steps, self.steps)

    @property
    def step_weights(self) -> list[float]:
        """The weights of the unrolled steps, which sum to 1."""
        weights = [self.ttt_decay**step for step in range(1 + self.ttt_steps)]
        return [weight / sum(weights) for weight in weights]

    def part(self, processes: int) -> int:
        """Images in one forward pass of one process.

        Raises:
            TemperaError: the batch does not divide.
        """
        parts = self.gradient_accumulation * processes
        if self.batch_size % parts:
            raise TemperaError(
                f"batch_size={self.batch_size} does not divide into "
                f"gradient_accumulation={self.gradient_accumulation} × {processes} processes: "
                f"give a multiple of {parts}."
            )
        return self.batch_size // parts

    def positions(self, step: int, part: int, process: int, processes: int) -> list[int]:
        """Numbers, in the endless stream of training images, of those in part `part` of a step on
        one process.

        Whatever the accumulation and the number of processes, step s covers images s·batch_size …
        (s + 1)·batch_size − 1.
        """
        size = self.part(processes)
        first = step * self.batch_size + (part * processes + process) * size
        return list(range(first, first + size))
