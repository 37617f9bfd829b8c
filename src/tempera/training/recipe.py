"""The training recipe of a draft: every number that affects its weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tempera.errors import TemperaError
from tempera.training.lr_schedules import SCHEDULES, Decay, Schedule

AtLeast1 = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Recipe:
    """Training options; their ranges are checked where a configuration is read. The defaults stand
    in conf/train_draft.yaml: those of EAGLE, LANTERN and Cool-SD for 100,000 images.

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
        noise_length: with n, a is for sequences of n tokens, and of S tokens it is a·n/S, as in the
            public code of EAGLE and LANTERN, with n = 512; None: a for all.
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

    steps: AtLeast1
    batch_size: AtLeast1
    gradient_accumulation: AtLeast1
    lr: Annotated[float, Field(gt=0)]
    matrix_lr: AtLeast0
    warmup_steps: Annotated[int, Field(ge=0)]
    decay: Decay
    beta1: Share
    beta2: Share
    weight_decay: AtLeast0
    grad_clip: AtLeast0
    hidden_noise: AtLeast0
    noise_length: AtLeast1 | None
    ttt_steps: Annotated[int, Field(ge=0)]
    ttt_decay: Annotated[float, Field(gt=0, le=1)]
    cfg_dropout: Share
    ema: Share
    mixed_precision: Literal["no", "bf16"]
    seed: Seed
    validate_every: AtLeast1
    checkpoint_every: AtLeast1
    log_every: AtLeast1
    holdout: AtLeast1
    decodes: Annotated[int, Field(ge=0, le=256)]
    depth: AtLeast1
    logit_chunk: AtLeast1

    def noise(self, length: int) -> float:
        """Amplitude of the noise on the hidden states of a sequence of `length` tokens."""
        return self.hidden_noise * (self.noise_length or length) / length

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
                f"training.batch_size={self.batch_size} is not divisible by "
                f"training.gradient_accumulation={self.gradient_accumulation} × {processes} "
                f"processes: give a multiple of {parts}."
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
