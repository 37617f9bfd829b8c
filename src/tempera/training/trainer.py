"""The training loop of a draft. A step depends only on weights, optimiser state, seed and step
number, so a run that is killed and resumed ends with the same weights.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import TemperaError
from tempera.runtime.distributed import uses_fsdp
from tempera.runtime.files import read_json, writable_directory, write_json, write_text
from tempera.runtime.network_directory import CONFIG, WEIGHTS
from tempera.runtime.tracking import NoTracker, Tracker
from tempera.targets.transformer import TransformerTarget
from tempera.training import fsdp
from tempera.training.checkpoint import State, TrainingProgress, keep_record, load_state, save_state
from tempera.training.dataset import Codes
from tempera.training.losses import TOTAL, Head, Loss, Parts, described
from tempera.training.lr_schedules import set_rate
from tempera.training.recipe import Recipe
from tempera.training.teacher_forcing import add_noise, null_conditioned, teach
from tempera.training.validation import accepted_length, imitation, metrics_of

DRAFT = "draft"
"""Where a run directory keeps its best draft."""
METRICS = "metrics.json"
"""What describes the draft, beside it."""
FILES = (CONFIG, WEIGHTS)
"""The files of a saved draft."""
_SHOWN = ("accepted_length", "top3", "tv")
"""Validation metrics beside the progress bar."""


def train(
    target: TransformerTarget,
    draft: DraftNetwork,
    codes: Codes,
    loss: Loss,
    recipe: Recipe,
    directory: Path,
    start_tracker: Callable[[], Tracker],
    record: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a draft for a frozen target, or resume the run in `directory`.

    Args:
        target: the frozen target; with FSDP either already split (`fsdp.split_target`) or whole in
            every process.
        draft: the initial draft (the same in all processes).
        codes: training and held-out images.
        loss: the loss to minimise.
        recipe: the training options.
        directory: the run directory; it holds `draft/` (the best draft so far, in the form that its
            `from_pretrained` reads, with metrics.json and README.md), `last.safetensors` (to resume
            from) and `training.json` (the configuration).
        start_tracker: called if any steps remain; the tracker receives the parts of the loss and
            the validation metrics.
        record: further configuration that must not change when a run is resumed.
        quiet: no progress bar and no messages.

    Returns:
        The contents of `draft/metrics.json`.

    Raises:
        TemperaError: the directory holds a run with another configuration, cannot be written or is
            damaged; the batch does not divide evenly; the loss is not finite.
    """
    draft.check(target)
    directory = writable_directory(directory)
    sharded = uses_fsdp()
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    recipe.part(accelerator.num_processes)
    keep_record(
        directory,
        {
            **(record or {}),
            "loss": described(loss),
            "recipe": asdict(recipe),
            "target": target.identity,
        },
        write=accelerator.is_main_process,
    )
    draft = draft.to(target.device)
    run = TrainingRun(target, draft, codes, loss, recipe, directory, accelerator, quiet, sharded)
    run.data = (record or {}).get("data") or {}
    run.resume()
    remaining = run.state.progress.step < recipe.steps
    run.finish(start_tracker if accelerator.is_main_process and remaining else NoTracker)
    return dict(read_json(directory / DRAFT / METRICS))


@dataclass
class TrainingStep:
    """One step's parts of the loss, averaged over its images, and the gradient's norm before
    clipping.
    """

    losses: dict[str, float]
    norm: float


class TrainingRun:
    """One process's part of a training run."""

    def __init__(
        self,
        target: TransformerTarget,
        draft: DraftNetwork,
        codes: Codes,
        loss: Loss,
        recipe: Recipe,
        directory: Path,
        accelerator: Accelerator,
        quiet: bool,
        sharded: bool = False,
    ) -> None:
        self.target, self.draft, self.codes = target, draft, codes
        self.loss, self.recipe, self.schedule = loss, recipe, recipe.schedule
        self.head = Head(self._logits, target.sampling, recipe.logit_chunk)
        self.directory, self.accelerator = directory, accelerator
        self.tracker: Tracker = NoTracker()
        self.data: Mapping[str, Any] = {}
        self.quiet = quiet or not accelerator.is_main_process
        self.began = time.monotonic()
        self.whole = copy.deepcopy(draft).requires_grad_(False)
        self.model = (
            fsdp.split_draft(draft, target.device) if sharded else accelerator.prepare_model(draft)
        )
        optimisers = make_optimisers(draft, recipe, sharded)
        average = (
            {name: value.detach().clone() for name, value in draft.state_dict().items()}
            if recipe.ema
            else {}
        )
        self.state = State(draft, optimisers, average, TrainingProgress())
        mine = range(
            accelerator.process_index,
            max(recipe.holdout, accelerator.num_processes),
            accelerator.num_processes,
        )
        self.held = codes.holdout(list(mine))
        self.captions = (
            codes.holdout(list(range(recipe.decodes))).captions if recipe.decodes else []
        )

    def resume(self) -> None:
        """Resume from the checkpoint, if the directory contains one. If the best draft was deleted,
        the next draft that is validated takes its place.
        """
        resumed = load_state(self.directory, self.state)
        self.accelerator.wait_for_everyone()
        done = self.state.progress.step
        lost = resumed and not all((self.directory / DRAFT / name).is_file() for name in FILES)
        if lost:
            self.state.progress.best = {}
        if resumed and not self.quiet:
            told = (
                f"already trained, {done} steps"
                if done >= self.recipe.steps
                else f"resumes after step {done}"
            )
            told += "; its best draft is missing, so a later one takes its place" if lost else ""
            print(f"{self.directory}: {told}.")

    def finish(self, start_tracker: Callable[[], Tracker]) -> None:
        """Take the remaining steps, and describe the result."""
        self.tracker = start_tracker()
        try:
            self._walk()
            if self.accelerator.is_main_process:
                self.describe(finished=True)
                self.tracker.summary(
                    {f"best/{name}": value for name, value in self.state.progress.best.items()}
                )
                self.tracker.artifact(
                    f"draft-{self.draft.config.model}", "model", [self.directory / DRAFT]
                )
        finally:
            self.tracker.finish()
        self.accelerator.wait_for_everyone()

    def _walk(self) -> None:
        progress, recipe = self.state.progress, self.recipe
        self.began = time.monotonic() - progress.seconds
        with tqdm(
            total=recipe.steps,
            initial=progress.step,
            desc="train draft",
            unit="step",
            disable=self.quiet,
            mininterval=1,
        ) as bar:
            if progress.step >= recipe.steps and not progress.best:
                self.validate(bar)
            while progress.step < recipe.steps:
                taken = self.step(progress.step)
                progress.step += 1
                last = progress.step == recipe.steps
                self.report(taken, bar)
                if last or progress.step % recipe.validate_every == 0:
                    self.validate(bar)
                if last or progress.step % recipe.checkpoint_every == 0:
                    self.save()

    def step(self, number: int) -> TrainingStep:
        """One optimiser step."""
        recipe, losses = self.recipe, []
        set_rate(self.state.optimisers, self.schedule(number))
        self.draft.zero_grad()
        for positions, last in self._parts(number):
            with nullcontext() if last else self._gradients_stay():
                parts = self.losses(positions)
                self.accelerator.backward(parts[TOTAL] / recipe.gradient_accumulation)
            losses.append(torch.stack([part.detach().float() for part in parts.values()]))
        mean = self.accelerator.reduce(torch.stack(losses).mean(0), "mean")
        norm = fsdp.whole(
            torch.nn.utils.clip_grad_norm_(self.draft.parameters(), recipe.grad_clip or torch.inf)
        )
        step = TrainingStep(dict(zip(parts, mean.tolist(), strict=True)), norm.item())
        if not all(map(math.isfinite, [*step.losses.values(), step.norm])):
            raise TemperaError(
                f"the loss is not finite at step {number} (loss {step.losses[TOTAL]}, gradient "
                f"{step.norm}), so training stopped: the last good checkpoint is kept in "
                f"{self.directory}; train in another run directory with a lower lr or a longer "
                "warm-up."
            )
        for optimiser in self.state.optimisers:
            optimiser.step()
        self._average(number)
        return step

    def _gradients_stay(self) -> AbstractContextManager[None]:
        """A context in which gradients are not averaged over the processes yet."""
        if isinstance(self.model, FSDPModule):
            return fsdp.gradients_stay(self.model)
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(self.model)
        return waiting

    def _parts(self, number: int) -> Iterator[tuple[list[int], bool]]:
        """This process's parts of a step: the numbers of the training images, and whether it is the
        last part.
        """
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        for part in range(self.recipe.gradient_accumulation):
            yield (
                self.recipe.positions(number, part, process, processes),
                part == self.recipe.gradient_accumulation - 1,
            )

    def losses(self, positions: list[int]) -> Parts:
        """The parts of the loss on these training images, with unrolled steps or slots weighted."""
        recipe, images = self.recipe, self.codes.train(positions)
        rows = self.target.sampling.rows if self.loss.guided else 1
        bf16 = recipe.mixed_precision == "bf16"
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=bf16):
            lesson = teach(
                self.target,
                images.captions * rows,
                images.tokens.repeat(rows, 1),
                self._without_condition(positions),
                self.draft.features,
            )
            states = [add_noise(lesson.previous, recipe.seed, positions, recipe.hidden_noise)]
            slots = self.draft.slots
            for _ in range(recipe.ttt_steps if slots == 1 else 0):
                with torch.no_grad():
                    ahead = self.draft(*_floats(lesson.unrolled(states)))
                states.append(lesson.before(ahead[:, -lesson.hidden.shape[1] :]))
            copies = max(slots, len(states))
            predicted = self.model(*_floats(lesson.unrolled(states, copies)))
            steps = predicted.unflatten(1, (copies, -1))[:, :, lesson.start :].unbind(1)
            true = lesson.hidden[:, lesson.start :]
            parts = [self.loss(mine, true, self.head) for mine in steps]
        weights = recipe.step_weights(copies)
        return {
            name: torch.stack(
                [w * part[name] for w, part in zip(weights, parts, strict=True)]
            ).sum()
            for name in parts[0]
        }

    def _without_condition(self, positions: list[int]) -> Tensor:
        """Rows with the null condition, bool [R]: those drawn by `cfg_dropout` or, for a loss after
        guidance, the second row of every pair.
        """
        if not self.loss.guided:
            return null_conditioned(self.recipe.seed, positions, self.recipe.cfg_dropout)
        return torch.arange(self.target.sampling.rows * len(positions)) >= len(positions)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.target.head.lm_logits(hidden.to(self.target.dtype))

    @torch.no_grad()
    def _average(self, number: int) -> None:
        """Update the moving average; early steps have more weight, so the initial weights decay."""
        decay = min(self.recipe.ema, (1 + number) / (10 + number))
        live = self.draft.state_dict()
        for name, value in self.state.average.items():
            value.lerp_(live[name], 1 - decay)

    def report(self, step: TrainingStep, bar: "tqdm[Any]") -> None:
        """Log the losses of the step just taken."""
        progress = self.state.progress
        if not self.accelerator.is_main_process or (
            progress.step % self.recipe.log_every and progress.step != self.recipe.steps
        ):
            return
        values = {
            **step.losses,
            "gradient_norm": step.norm,
            "lr": self.recipe.lr * self.schedule(progress.step - 1),
        }
        self.tracker.log({f"train/{name}": value for name, value in values.items()}, progress.step)
        shown = {name: f"{value:.4f}" for name, value in step.losses.items()} | {
            name: f"{progress.latest[name]:.2f}" for name in _SHOWN if name in progress.latest
        }
        bar.n = progress.step
        bar.set_postfix(shown)

    def validate(self, bar: "tqdm[Any]") -> None:
        """Measure the draft on the hold-out, and save it if it is the best so far."""
        recipe, progress, accelerator = self.recipe, self.state.progress, self.accelerator
        kept = self.kept()
        with fsdp.in_step(self.target.network):
            sums = imitation(kept, self.target, self.held)
            length = (
                accepted_length(kept, self.target, self.captions, recipe.depth)
                if self.captions
                else None
            )
        metrics = metrics_of(accelerator.reduce(sums, "sum"))
        if length is not None:
            metrics["accepted_length"] = length
        progress.latest = {"step": progress.step, **metrics}
        better = metrics["top3"] > progress.best.get("top3", -1.0)
        if better:
            progress.best = progress.latest
        if not accelerator.is_main_process:
            return
        self.tracker.log(
            {f"validation/{name}": value for name, value in metrics.items()}, progress.step
        )
        if not self.quiet:
            bar.write(
                f"step {progress.step}: "
                + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            )
        if better:
            kept.save_pretrained(self.directory / DRAFT)
            self.describe(finished=False)

    def kept(self) -> DraftNetwork:
        """The draft to validate and save: whole, on this process's device, with averaged weights if
        `ema` keeps an average.
        """
        weights = self.state.average or self.draft.state_dict()
        self.whole.load_state_dict({name: fsdp.whole(value) for name, value in weights.items()})
        return self.whole

    def save(self) -> None:
        """Write the checkpoint to resume from."""
        self.state.progress.seconds = time.monotonic() - self.began
        save_state(self.directory, self.state, write=self.accelerator.is_main_process)
        self.accelerator.wait_for_everyone()

    def describe(self, finished: bool) -> None:
        """Write the metrics and a README beside the best draft."""
        progress, config = self.state.progress, self.draft.config
        values = {
            "finished": finished,
            "model": config.model,
            "target": config.target,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "processes": self.accelerator.num_processes,
            "best": progress.best,
            "latest": progress.latest,
            "sampling": asdict(self.target.sampling),
            "architecture": type(self.draft).__name__,
            "drafter": self.draft.drafter,
            "loss": described(self.loss),
            "recipe": asdict(self.recipe),
            "data": dict(self.data),
        }
        write_json(self.directory / DRAFT / METRICS, values)
        write_text(self.directory / DRAFT / "README.md", _readme(values))


def make_optimisers(
    draft: torch.nn.Module, recipe: Recipe, sharded: bool
) -> list[torch.optim.Optimizer]:
    """AdamW; or, with `matrix_lr`, Muon for the matrices and AdamW for everything else.

    Raises:
        TemperaError: the draft is split among processes, and Muon needs whole matrices.
    """
    matrices = [weight for weight in draft.parameters() if recipe.matrix_lr and weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    adam = torch.optim.AdamW(
        [weight for weight in draft.parameters() if id(weight) not in chosen],
        lr=recipe.lr,
        betas=(float(recipe.beta1), float(recipe.beta2)),  # AdamW takes no whole numbers
        weight_decay=recipe.weight_decay,
        foreach=True,
    )
    if not matrices:
        return [adam]
    if sharded:
        raise TemperaError(
            f"matrix_lr={recipe.matrix_lr} is not possible with a network that FSDP splits: Muon "
            "needs whole matrices; leave it out."
        )
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.matrix_lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adam, muon]


def _floats(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Floating-point tensors as float32; integers unchanged."""
    return (tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors)


def _readme(values: dict[str, Any]) -> str:
    """The README.md that is saved beside the weights."""
    best = "\n".join(f"| {name} | {value:.4g} |" for name, value in values["best"].items())
    options = {f"loss.{name}": value for name, value in values["loss"].items()} | values["recipe"]
    recipe = "\n".join(f"| {name} | {value} |" for name, value in options.items())
    data = "\n".join(f"| {name} | {value} |" for name, value in values["data"].items())
    data = data or "| source | generated on demand: see training.json |"
    state = "finished" if values["finished"] else "not finished"
    processes = values["processes"]
    return f"""# A draft for {values["model"]}

{values["architecture"]}, trained by tempera for the target with weights `{values["target"]}`
({state}; steps: {values["steps"]}, seconds: {values["seconds"]:.0f}, processes: {processes}).
Use it with `python eval/run.py drafter={values["drafter"]} drafter.path=<this directory>`.

Held-out metrics of this checkpoint, the best by top-3 accuracy. Accuracies are after guidance, TV
compares the distributions that decoding draws from, and accepted length is that of exact chains.

| metric | value |
|---|---|
{best}

Training images:

| | |
|---|---|
{data}

Recipe (also in `metrics.json`):

| option | value |
|---|---|
{recipe}
"""
