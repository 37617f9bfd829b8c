"""Memory of a training run, from a rehearsal of two steps and a validation without data."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from tempera.data.shards import CodedImages
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.none import NoDraft
from tempera.rules.standard import Exact
from tempera.runtime.cost import Cost
from tempera.runtime.rehearsal import Meter, Rehearsal
from tempera.targets.transformer import TransformerTarget
from tempera.training.losses import TOTAL, Loss
from tempera.training.recipe import Recipe
from tempera.training.split_rehearsal import SplitRehearsal
from tempera.training.trainer import TrainingRun
from tempera.training.validation import accepted_length, imitation

_VALIDATED = 4
"""Held-out images in one pass of `validation.imitation`."""


def estimate(
    make: Callable[[], tuple[TransformerTarget, DraftNetwork]],
    loss: Loss,
    recipe: Recipe,
    caption: str,
    processes: int = 1,
    drawn: int = 0,
    split: bool = False,
) -> Cost:
    """Rehearse two steps with a validation between them, in one of the processes.

    Activations count as float32, even if `mixed_precision` makes them bfloat16. The image tokenizer
    is not counted.

    Args:
        make: builds target and draft with networks on the meta device.
        loss, recipe: as for `tempera.training.trainer.train`.
        caption: stands for every caption.
        processes: number of processes.
        drawn: number of training images that the target generates at a time; 0 for none.
        split: the processes split target and draft (FSDP).

    Returns:
        the cost, without its download.
    """
    with Meter() as meter:
        target, draft = make()
        fsdp = SplitRehearsal(meter, processes) if split else None
        weights, cache = meter.live, 0
        if fsdp is not None:
            fsdp.split_target(target.network)
            size = sum(parameter.nbytes for parameter in draft.parameters())
            weights = meter.live - size + fsdp.part_size(draft.parameters())
        with Rehearsal(max(drawn, recipe.decodes, 1) * target.length):
            if drawn:
                with torch.inference_mode():
                    cache = _draw(target, [caption] * drawn)
            run = _run(target, draft, loss, recipe, caption, processes)
            if fsdp is not None:
                fsdp.split_draft(run)
            cache = max(cache, _train(run, fsdp, min(recipe.gradient_accumulation, 2)))
        size = sum(parameter.nbytes for parameter in draft.parameters())
    images = recipe.steps * recipe.batch_size
    return Cost(
        f"{recipe.steps:,} steps of {recipe.batch_size} images of {target.length:,} tokens, "
        f"{images * target.length:,} tokens in all",
        weights,
        cache,
        meter.peak,
        written=size * (2 + 2 * (4 if recipe.ema else 3)),  # each file beside the one it replaces
        download=None,
    )


def _draw(target: TransformerTarget, captions: list[str]) -> int:
    """Decode one round of these images; returns the bytes of the KV cache."""
    names = [str(number) for number in range(len(captions))]
    decode(target, NoDraft(), Exact(), RandomStreams(0, names, target.device), captions)
    return target.session.cache.nbytes()


def _run(
    target: TransformerTarget,
    draft: DraftNetwork,
    loss: Loss,
    recipe: Recipe,
    caption: str,
    processes: int,
) -> TrainingRun:
    """One process's part of the training, with one part of a batch."""
    codes, alone = BlankCodes(caption, target.length), cast(Accelerator, _Alone())
    part = replace(recipe, batch_size=recipe.part(processes), gradient_accumulation=1)
    part = replace(part, holdout=_VALIDATED, hidden_noise=0.0)
    return TrainingRun(target, draft, codes, loss, part, Path(), alone, quiet=True)


def _train(run: TrainingRun, fsdp: SplitRehearsal | None, parts: int) -> int:
    """Two steps with a validation between them; returns the bytes of its KV cache."""
    target, recipe, cache = run.target, run.recipe, 0
    _step(run, fsdp, parts)
    if fsdp is not None:
        fsdp.gather_draft()
    imitation(run.kept(), target, run.held, _VALIDATED)
    if recipe.decodes:
        accepted_length(run.kept(), target, run.captions, recipe.depth)
        cache = target.session.cache.nbytes()
    _step(run, fsdp, parts)
    return cache


def _step(run: TrainingRun, fsdp: SplitRehearsal | None, parts: int) -> None:
    """A step; under FSDP, gradients are whole until those of all parts are summed."""
    if fsdp is not None:
        fsdp.begin_step()
    for _ in range(1 if fsdp is None else parts):
        run.losses(run.recipe.positions(0, 0, 0, 1))[TOTAL].backward()
        if fsdp is not None:
            fsdp.end_backward()
    if fsdp is not None:
        fsdp.reduce()
    for optimiser in run.state.optimisers:
        optimiser.step()


class BlankCodes:
    """Training images that all look alike."""

    def __init__(self, caption: str, length: int) -> None:
        self.caption, self.length = caption, length

    def train(self, positions: list[int]) -> CodedImages:
        """See `tempera.training.dataset.Codes`."""
        count = len(positions)
        codes = np.zeros((count, self.length), np.int32)
        return CodedImages(["0"] * count, [self.caption] * count, codes)

    def holdout(self, positions: list[int]) -> CodedImages:
        """See `tempera.training.dataset.Codes`."""
        return self.train(positions)


class _Alone:
    """Accelerate's part in a step of one process; the real one has a global state that can be
    set up only once.
    """

    is_main_process, process_index, num_processes = False, 0, 1

    def prepare_model(self, model: Any) -> Any:
        """The model as it is."""
        return model

    def autocast(self) -> AbstractContextManager[None]:
        """Everything stays in its dtype."""
        return nullcontext()

    def reduce(self, value: Tensor, how: str) -> Tensor:
        """One process's value."""
        return value
