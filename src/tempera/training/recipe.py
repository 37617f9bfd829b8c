"""The training recipe of a draft: every number that affects its weights."""

import math
from dataclasses import dataclass
from typing import Literal

from tempera.errors import TemperaError
from tempera.training.lr_schedules import SCHEDULES, Decay, Schedule


@dataclass(frozen=True)
class Recipe:
    """Training options. The defaults are those of EAGLE, LANTERN and Cool-SD for 100,000 images: 20
    epochs in batches of 16.

    Attributes:
        steps: optimiser steps.
        batch_size: images per optimiser step, over all processes and accumulated parts.
        gradient_accumulation: each process splits its share of a batch into this many parts and
            computes them one after another, to save memory; the gradients do not change.
        lr: peak learning rate, reached linearly over `warmup_steps` steps and then decayed by
            `decay`: linear, cosine, constant or trapezoid (`tempera.training.lr_schedules`).
        matrix_lr: peak learning rate of Muon (Jordan et al. 2024) for the matrices, whose updates
            have AdamW's scale; `lr` is then AdamW's for everything else. 0 uses AdamW for all.
        grad_clip: largest norm of the gradient; 0 disables clipping.
        hidden_noise: amplitude a of the uniform noise in [−a, a] added to the input hidden states.
        ttt_steps: number k of unrolled training steps after the first; each reads the draft's own
            predictions from the step before (HASS, EAGLE-3; 0 is EAGLE-1). The pass with gradient
            then runs over 1 + k copies of the images, after k passes without gradient over 1 … k
            copies. A draft of several slots learns all of them in one pass, and k is not used.
        ttt_decay: the loss weighs step i = 0 … k, or slot i, by ttt_decay^i, divided by the sum of
            these weights (EAGLE-3: 0.8; 1 weighs all alike).
        cfg_dropout: probability that an image becomes null-conditioned, for target and draft alike.
            A loss after guidance instead takes every image with and without its condition.
        ema: decay of the weights' moving average, which is then validated and saved in their place;
            0 keeps no average.
        mixed_precision: "no" or "bf16".
        validate_every, checkpoint_every: in steps.
        holdout: held-out images per validation; `decodes`: how many of their captions are decoded
            with the draft, with chains of `depth` tokens.
        logit_chunk: number of positions whose logits are in memory at a time.
    """

    steps: int = 125_000
    batch_size: int = 16
    gradient_accumulation: int = 1
    lr: float = 1e-4
    matrix_lr: float = 0.0
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
            "matrix_lr",
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

    def step_weights(self, count: int) -> list[float]:
        """The weights of `count` unrolled steps, the first included, or slots; they sum to 1."""
        weights = [self.ttt_decay**step for step in range(count)]
        return [weight / sum(weights) for weight in weights]

    def part(self, processes: int) -> int:
        """Images in one forward pass of one process.

        Raises:
            TemperaError: the batch does not divide evenly.
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
        """The numbers of the training images that one process takes in part `part` of a step.

        Step s always covers images s·batch_size … (s + 1)·batch_size − 1, whatever the accumulation
        and the number of processes.
        """
        size = self.part(processes)
        first = step * self.batch_size + (part * processes + process) * size
        return list(range(first, first + size))
