"""Time of a training run, from a few seconds of it in a directory that is thrown away."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import Accelerator
from tqdm import tqdm

from tempera.decoding import timing
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.none import NoDraft
from tempera.rules.standard import Exact
from tempera.runtime.cost import Time
from tempera.runtime.distributed import Processes, uses_fsdp
from tempera.targets.transformer import TransformerTarget
from tempera.training.dataset import SHARD_BATCHES, Codes
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import TrainingRun

SECONDS = 10.0
"""How long steps are taken, and images drawn, in seconds; at least one step after a warm-up."""


@dataclass(frozen=True)
class Drawing:
    """Training images that the target generates first. count: how many; caption: stands for every
    caption; batch_size: images generated at a time.
    """

    count: int
    caption: str
    batch_size: int


def run_time(
    target: TransformerTarget,
    draft: DraftNetwork,
    codes: Codes,
    loss: Loss,
    recipe: Recipe,
    drawing: Drawing | None = None,
    excluded: str = "downloads",
    seconds: float = SECONDS,
    clock: Callable[[], float] | None = None,
    processes: Processes | None = None,
) -> Time:
    """Take steps until the time is up, validate and save once, and extrapolate.

    Args:
        target, draft, codes, loss, recipe: as for `tempera.training.trainer.train`.
        drawing: the images that the target generates first.
        excluded: what else comes before the first step.
        seconds: how long steps are taken, and how long images are drawn.
        clock: the time in seconds; by default that of the target's device.
        processes: those that train together; each must call this function. By default only this
            one.
    """
    clock, cpu = clock or partial(timing.now, target.device), target.device.type == "cpu"
    processes = processes or Processes(cpu)
    drawn = _drawn(target, drawing, clock, seconds, processes.count) if drawing else 0.0
    with TemporaryDirectory() as directory:
        run = TrainingRun(
            target, draft.to(target.device), codes, loss, recipe, Path(directory),
            Accelerator(mixed_precision=recipe.mixed_precision, cpu=cpu), quiet=True,
            sharded=uses_fsdp(),
        )  # fmt: skip
        run.step(0)  # to warm up
        steps, begin = 0, clock()
        # all take as many steps as the main process
        while not steps or (
            steps < recipe.steps and processes.gather(clock() - begin < seconds)[0]
        ):
            steps += 1
            run.step(steps)
        stepped = clock()
        run.validate(tqdm(disable=True))
        validated = clock()
        run.save()
        saved = clock()
    return Time(
        {
            "training images": drawn,
            "steps": recipe.steps * (stepped - begin) / steps,
            "validation": ceil(recipe.steps / recipe.validate_every) * (validated - stepped),
            "checkpoints": ceil(recipe.steps / recipe.checkpoint_every) * (saved - validated),
        },
        f"{steps} steps",
        excluded,
        processes.count,
    )


def _drawn(
    target: TransformerTarget,
    drawing: Drawing,
    clock: Callable[[], float],
    seconds: float,
    processes: int,
) -> float:
    """Seconds that the target takes to draw the images, whose shards the processes share."""
    size = min(drawing.batch_size, drawing.count)
    streams = RandomStreams(0, [str(number) for number in range(size)], target.device)

    def draw(progress: Callable[[int, int], None]) -> object:
        captions = [drawing.caption] * size
        return decode(
            target,
            NoDraft(),
            Exact(),
            streams,
            captions,
            observe=lambda images, *_: progress(images.rounds, images.written),
        )

    timing.batch_seconds(draw, size * target.length, clock, 0.0)  # to warm up
    batches = drawing.count / size * ceil(SHARD_BATCHES / processes) / SHARD_BATCHES
    return batches * timing.batch_seconds(draw, size * target.length, clock, seconds)
