"""The training loop of a draft. A step depends only on weights, optimiser state, seed and step
number, so a run that is killed and resumed ends with the same weights.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from tempera.drafters.draft_files import check_target, save_draft
from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes, check_launch
from tempera.runtime.files import read_json, reason, writable_directory, write_json, write_text
from tempera.runtime.image_files import write_picture
from tempera.runtime.installation import command
from tempera.runtime.network_directory import CONFIG, WEIGHTS, weights_hash
from tempera.runtime.preemption import Preemption
from tempera.runtime.processor import name_of
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import Tracker
from tempera.targets.transformer import TransformerTarget
from tempera.training.averaging import moving_average
from tempera.training.checkpoint import Checkpoints, TrainingProgress, fix_record
from tempera.training.conditions import store_conditions
from tempera.training.dataset import Codes, ShardCodes
from tempera.training.losses import TOTAL, Head, Loss, Parts, described
from tempera.training.recipe import Recipe
from tempera.training.teacher_forcing import add_noise, null_conditioned, teach
from tempera.training.validation import accepted_length, decoded, imitation, metrics_of

DRAFT = "draft"
"""Where a run directory keeps its best draft."""
METRICS = "metrics.json"
"""What describes the draft, beside it."""
SAMPLES = "samples.png"
"""Pictures that were drawn with the draft at the last validation, side by side."""
SHOWN = 8
"""Most of these pictures."""
CONDITIONS = "conditions"
"""Where it keeps the text encoder's features of all captions."""


@dataclass
class TrainingRun:
    """A draft's training for a frozen target, in one of its processes.

    Attributes:
        target: the frozen target, whole in every process.
        draft: the initial draft (the same in all processes); its weights change.
        codes: training and held-out images.
        loss: the loss to minimise.
        recipe: the training options.
        directory: the run directory; it holds `draft/` (the best draft so far, in the form that its
            `from_pretrained` reads, with metrics.json and README.md), `checkpoint-STEP/` (to resume
            from), `conditions/` (features of the captions) and `training.json` (the configuration).
        record: further configuration that must not change when a run is resumed; `data` describes
            the images.
        pictures: tokens [B, T] and their captions → pictures uint8 [B, 3, H, W], by which samples
            are shown.

    Raises:
        TemperaError: the launcher splits networks, the draft is not the target's, or the batch does
            not divide evenly.
    """

    target: TransformerTarget
    draft: DraftNetwork
    codes: Codes
    loss: Loss
    recipe: Recipe
    directory: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    pictures: Callable[[Tensor, Sequence[str]], NDArray[np.uint8]] | None = None
    tracker: Tracker = field(default_factory=Tracker)

    def __post_init__(self) -> None:
        recipe = self.recipe
        target = self.target
        check_launch(asdict(recipe))
        check_target(self.draft, target)
        self.accelerator = _accelerator(target.device, recipe.gradient_accumulation)
        processes = self.accelerator.num_processes
        first = self.accelerator.process_index
        recipe.part(processes)
        self.is_main = self.accelerator.is_main_process
        self.head = Head(
            lambda hidden: target.head.lm_logits(hidden.to(target.dtype)),
            target.sampling,
            recipe.logit_chunk,
        )
        self.model = self.accelerator.prepare_model(self.draft.to(target.device))
        self.average = moving_average(self.draft, recipe.ema) if recipe.ema else None
        extra = self.average.state_dict() if self.average is not None else {}
        optimisers = make_optimisers(self.draft, recipe)
        schedules = [LambdaLR(optimiser, recipe.schedule) for optimiser in optimisers]
        self.optimisers = list(map(self.accelerator.prepare_optimizer, optimisers))
        self.schedules = list(map(self.accelerator.prepare_scheduler, schedules))
        self.checkpoints = Checkpoints(self.directory, self.accelerator, self.draft, extra)
        self.progress = TrainingProgress()
        self.preemption = Preemption()
        self.stopping = False
        mine = list(range(first, max(recipe.holdout, processes), processes))
        self.held = self.codes.holdout(mine)
        numbers = list(range(recipe.decodes))
        self.captions = self.codes.holdout(numbers).captions if numbers else []

    @property
    def averaged(self) -> DraftNetwork:
        """The draft to validate and save: with averaged weights if `ema` keeps an average."""
        return self.draft if self.average is None else cast(DraftNetwork, self.average.module)

    def train(self, start_tracker: Callable[[], Tracker]) -> dict[str, Any]:
        """Take the steps that remain, from the checkpoint if the directory holds one.

        Args:
            start_tracker: called if any steps remain; the tracker receives the parts of the loss
                and the validation metrics.

        Returns:
            The contents of `draft/metrics.json`.

        Raises:
            TemperaError: the directory holds a run with another configuration, cannot be written or
                is damaged; the loss is not finite.
        """
        self.resume()
        if isinstance(self.codes, ShardCodes) and self.progress.step < self.recipe.steps:
            processes = Processes(cpu=self.target.device.type == "cpu")
            captions = self.codes.images.captions
            store_conditions(self.target, captions, self.directory / CONDITIONS, processes)
        if self.is_main and self.progress.step < self.recipe.steps:
            self.tracker = start_tracker()
        try:
            self._walk()
            if self.is_main:
                self.describe(finished=True)
                best = self.progress.best
                self.tracker.summary({f"best/{name}": value for name, value in best.items()})
                name = f"draft-{self.draft.config.model}"
                self.tracker.artifact(name, "model", [self.directory / DRAFT])
        finally:
            self.tracker.finish()
        self.accelerator.wait_for_everyone()
        return dict(read_json(self.directory / DRAFT / METRICS))

    def resume(self) -> None:
        """Read the checkpoint, if there is one. If the best draft was deleted, the next draft that
        is validated takes its place.
        """
        facts = {**self.record, "loss": described(self.loss), "recipe": asdict(self.recipe)}
        facts["target"] = self.target.identity
        directory = writable_directory(self.directory)
        self.made_by = fix_record(directory, facts, write=self.is_main)
        saved = self.checkpoints.load(self.recipe.steps, self.made_by)
        self.accelerator.wait_for_everyone()
        self.progress = saved or TrainingProgress()
        done = self.progress.step
        best = self.directory / DRAFT
        if all((best / name).is_file() for name in (CONFIG, WEIGHTS, METRICS)):
            known = read_json(best / METRICS)
            if [known.get("made_by"), known.get("weights")] != [self.made_by, weights_hash(best)]:
                raise TemperaError(
                    f"{best} is not the draft that this training run wrote: move it away, and the "
                    "next validation writes one."
                )
        else:
            self.progress.best = {}
        if saved and self.is_main:
            finished = done >= self.recipe.steps
            told = f"already trained, {done} steps" if finished else f"resumes after step {done}"
            print(f"{self.directory}: {told}.")

    def _walk(self) -> None:
        progress = self.progress
        recipe = self.recipe
        began = time.monotonic() - progress.seconds
        steps = recipe.steps
        shown = tqdm(
            total=steps, initial=progress.step, desc="train draft", disable=not self.is_main
        )
        with self.preemption, shown as bar:
            if self._validation_is_due() or (progress.step >= steps and not progress.best):
                self.validate(bar)
            if self.stopping:
                self._stop(bar)
            while progress.step < steps:
                losses = self.step(progress.step)
                progress.step += 1
                progress.seconds = time.monotonic() - began
                if self._is_due(recipe.log_every):
                    self.report(losses, bar)
                if self._validation_is_due() and not self.stopping:
                    self.validate(bar)
                if self._is_due(recipe.checkpoint_every) or self.stopping:
                    self.save()
                if self.stopping:
                    self._stop(bar)

    def _is_due(self, every: int) -> bool:
        """Whether something is done after the step just taken."""
        step = self.progress.step
        return step % every == 0 or step == self.recipe.steps

    def _validation_is_due(self) -> bool:
        """Whether the draft is to be validated now, which a run that was stopped may owe."""
        step = self.progress.step
        is_done = self.progress.latest.get("step") == step
        return step > 0 and self._is_due(self.recipe.validate_every) and not is_done

    def _stop(self, bar: "tqdm[Any]") -> None:
        """Let the signal act for which a checkpoint was written; go on if its handler returns."""
        if self.is_main:
            step = self.progress.step
            bar.write(f"{self.directory}: a signal stops this run; it resumes after step {step}.")
        self.stopping = False
        self.preemption.pass_on()
        if self._validation_is_due():
            self.validate(bar)

    def step(self, number: int) -> dict[str, float]:
        """One optimiser step; returns the parts of its loss, averaged over its images, and the
        gradient's norm before clipping.
        """
        recipe = self.recipe
        accelerator = self.accelerator
        losses = []
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        for part in range(recipe.gradient_accumulation):
            mine = recipe.positions(
                number, part, accelerator.process_index, accelerator.num_processes
            )
            with accelerator.accumulate(self.model):
                parts = self.losses(mine)
                accelerator.backward(parts[TOTAL])
            losses.append(torch.stack([value.detach().float() for value in parts.values()]))
        mean = self._agreed(torch.stack(losses).mean(0), "mean")
        limit = recipe.grad_clip or torch.inf
        norm = accelerator.clip_grad_norm_(self.draft.parameters(), limit)
        values = dict(zip(parts, mean.tolist(), strict=True)) | {"gradient_norm": norm.item()}
        if not all(map(math.isfinite, values.values())):
            raise TemperaError(
                f"the loss is not finite at step {number} (loss {values[TOTAL]}, gradient "
                f"{norm.item()}), so training stopped: the last good checkpoint is kept in "
                f"{self.directory}; train in another run directory with a lower training.lr or "
                "more training.warmup_steps."
            )
        for optimiser, schedule in zip(self.optimisers, self.schedules, strict=True):
            optimiser.step()
            schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.draft)
        return values

    def _agreed(self, values: Tensor, how: Literal["sum", "mean"]) -> Tensor:
        """Sums or means over all processes, which with them learn whether a signal stops one."""
        came = values.new_full((1,), float(self.preemption.came))
        reduced: Tensor = self.accelerator.reduce(torch.cat([values, came]), how)
        self.stopping = bool(reduced[-1] > 0)
        return reduced[:-1]

    def losses(self, positions: list[int]) -> Parts:
        """The parts of the loss on these training images, with unrolled steps or slots weighted."""
        recipe = self.recipe
        images = self.codes.train(positions)
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
            amplitude = recipe.noise(lesson.previous.shape[1])
            states = [add_noise(lesson.previous, recipe.seed, positions, amplitude)]
            slots = self.draft.slots
            for _ in range(recipe.ttt_steps if slots == 1 else 0):
                with torch.no_grad():
                    ahead = self.draft(*lesson.unrolled(states, self.draft.visible(len(states))))
                states.append(lesson.before(ahead[:, -lesson.hidden.shape[1] :]))
            copies = max(slots, len(states))
            visible = self.draft.visible(copies)
            predicted = self.model(*lesson.unrolled(states, visible)).float()
            steps = predicted.unflatten(1, (copies, -1))[:, :, lesson.start :].unbind(1)
            true = lesson.hidden[:, lesson.start :]
            parts = [self.loss(mine, true, self.head) for mine in steps]
        weights = torch.tensor(recipe.step_weights(copies), device=self.target.device)
        return {
            name: (weights * torch.stack([part[name] for part in parts])).sum() for name in parts[0]
        }

    def _without_condition(self, positions: list[int]) -> Tensor:
        """Rows with the null condition, bool [R]: those drawn by `cfg_dropout` or, for a loss after
        guidance, the second row of every pair.
        """
        if not self.loss.guided:
            return null_conditioned(self.recipe.seed, positions, self.recipe.cfg_dropout)
        return torch.arange(self.target.sampling.rows * len(positions)) >= len(positions)

    def report(self, losses: Mapping[str, float], bar: "tqdm[Any]") -> None:
        """Log the losses of the step just taken."""
        step = self.progress.step
        values = {**losses, "lr": self.recipe.lr * self.recipe.schedule(step - 1)}
        self.tracker.log({f"train/{name}": value for name, value in values.items()}, step)
        bar.n = step
        bar.set_postfix({name: f"{value:.3f}" for name, value in losses.items()})

    def validate(self, bar: "tqdm[Any]") -> None:
        """Measure the draft on the hold-out, and save it if it is the best so far; a signal that
        came leaves it undone.
        """
        progress = self.progress
        target = self.target
        draft = self.averaged
        sums = imitation(draft, target, self.held, stopped=lambda: self.preemption.came)
        sums = self._agreed(sums, "sum")
        if self.stopping:  # the run that goes on validates
            return
        metrics = metrics_of(sums)
        if self.captions:
            drawn = decoded(draft, target, self.captions, self.recipe.depth)
            metrics["accepted_length"] = accepted_length(drawn)
        progress.latest = {"step": progress.step, **metrics}
        better = metrics["top3"] > progress.best.get("top3", -1.0)
        if better:
            progress.best = progress.latest
        if not self.is_main:
            return
        logged = {f"validation/{name}": value for name, value in metrics.items()}
        self.tracker.log(logged, progress.step)
        told = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        bar.write(f"step {progress.step}: {told}")
        if self.captions and self.pictures is not None:
            with side_service("the sample pictures failed ({why}): training continues."):
                captions = self.captions[:SHOWN]
                self._show(self.pictures(drawn.tokens[:SHOWN], captions), captions)
        if better:
            # after a kill here there is none, instead of one that describes another draft
            (self.directory / DRAFT / METRICS).unlink(missing_ok=True)
            save_draft(draft, self.directory / DRAFT)
            self.describe(finished=False)

    def _show(self, pictures: NDArray[np.uint8], captions: Sequence[str]) -> None:
        """Write and log the pictures of held-out captions, drawn with the draft: always the same
        captions and seeds.
        """
        path = self.directory / SAMPLES
        write_picture(path, np.concatenate(list(pictures), 2), self.made_by)
        self.tracker.image("samples", path, f"step {self.progress.step}: {' · '.join(captions)}")

    def save(self) -> None:
        """Write the checkpoint to resume from."""
        self.checkpoints.save(self.progress, self.made_by)

    def describe(self, finished: bool) -> None:
        """Write the metrics and a README beside the best draft."""
        progress = self.progress
        config = self.draft.config
        values = {
            "made_by": self.made_by,
            "weights": weights_hash(self.directory / DRAFT),
            "finished": finished,
            "model": config.model,
            "target": config.target,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "processes": self.accelerator.num_processes,
            "device": name_of(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "best": progress.best,
            "latest": progress.latest,
            "sampling": asdict(self.target.sampling),
            "architecture": type(self.draft).__name__,
            "drafter": self.draft.drafter,
            "loss": described(self.loss),
            "recipe": asdict(self.recipe),
            "data": self.record.get("data", {}),
        }
        write_json(self.directory / DRAFT / METRICS, values)
        write_text(self.directory / DRAFT / "README.md", _readme(values))


def _accelerator(device: torch.device, parts: int) -> Accelerator:
    """accelerate for a device and batches of so many parts; every setting that it would otherwise
    read from the environment is given.

    Raises:
        TemperaError: this process uses accelerate in another way.
    """
    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",  # the losses are computed under autocast of their own
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=parts),
            # a batch is that of all processes, so schedules take one step for it
            dataloader_config=DataLoaderConfiguration(split_batches=True),
        )
    except ValueError as problem:  # the state of accelerate is one for a process
        raise TemperaError(
            f"accelerate cannot be used for this training run ({reason(problem)}): train in a "
            "separate process."
        ) from problem
    if accelerator.device.type != device.type:
        raise TemperaError(
            f"accelerate is configured for {accelerator.device.type}, but the target is on "
            f"{device.type}: give device={accelerator.device.type}, or launch with torchrun."
        )
    return accelerator


def make_optimisers(draft: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW; or, with `matrix_lr`, Muon for the matrices and AdamW for everything else."""
    matrices = [weight for weight in draft.parameters() if recipe.matrix_lr and weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    decay = recipe.weight_decay
    rest = [weight for weight in draft.parameters() if id(weight) not in chosen]
    betas = float(recipe.beta1), float(recipe.beta2)  # AdamW takes no whole numbers
    adam = torch.optim.AdamW(rest, recipe.lr, betas, weight_decay=decay, foreach=True)
    if not matrices:
        return [adam]
    muon = torch.optim.Muon(matrices, recipe.matrix_lr, decay, adjust_lr_fn="match_rms_adamw")
    return [adam, muon]


def _readme(values: Mapping[str, Any]) -> str:
    """The README.md that is saved beside the weights."""
    best = "\n".join(f"| {name} | {value:.4g} |" for name, value in values["best"].items())
    data = "\n".join(f"- {name}: {value}" for name, value in values["data"].items())
    recipe = "\n".join(f"- {name}: {value}" for name, value in values["recipe"].items())
    state = "finished" if values["finished"] else "not finished"
    use = f"{command('eval')} model={values['model']} drafter={values['drafter']}"
    return f"""---
library_name: tempera
tags: [speculative-decoding, {values["drafter"]}]
---
# A draft for {values["model"]}

{values["architecture"]}, trained by tempera for the target with weights `{values["target"]}`
({state}; steps: {values["steps"]}, processes: {values["processes"]}). Use it with
`{use} drafter.path=DIR`, or `owner/name` of the hub.

Held-out metrics of this checkpoint, the best by top-3 accuracy. Accuracies are after guidance, TV
compares the distributions that decoding draws from, and accepted length is that of exact chains.

| metric | value |
|---|---|
{best}

Training images:

{data or "- generated on demand"}

Recipe:

{recipe}
"""
