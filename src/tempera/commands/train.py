"""`tempera-train`: train the draft of a model."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import PositiveFloat, PositiveInt

from tempera.commands.costs import dry_training, read_with_files
from tempera.config.compose import option_name, pasted, typed
from tempera.config.instantiate import Part, fitting, from_options, instantiate, part
from tempera.config.nodes import plain
from tempera.config.parts import Parts, check_discrete
from tempera.config.tracking import Tracking
from tempera.data.entries import Source
from tempera.data.shards import is_complete
from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import pictures_of
from tempera.runtime.distributed import Processes, started_as_main
from tempera.runtime.files import writable_directory
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import draft_directory
from tempera.runtime.pretrained import Taken, recording_taken
from tempera.runtime.processor import parse_device, parse_dtype, tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.training.dataset import CODES, Codes, ShardCodes
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe, Seed
from tempera.training.trainer import DRAFT, TrainingRun

APART = (
    *("device", "truncate", "dry_run", "push_to_hub", "tracking", "family", "outputs"),
    *("revision", "directory", "overrides", "seed", "training"),
)
"""Options that may differ when a training is resumed, and those that are in its recipe."""


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/train_draft.yaml says what each is."""

    directory: Path
    start: str | None
    push_to_hub: str | None
    dry_run: bool


@dataclass(frozen=True)
class Duration:
    """How long to train: `training.steps` or `training.epochs`."""

    steps: PositiveInt | None
    epochs: PositiveFloat | None

    def __post_init__(self) -> None:
        """Raise TemperaError for a training without an end."""
        if self.steps is None and self.epochs is None:
            raise TemperaError(
                "training.steps=null needs training.epochs=N: give one of them", option="epochs"
            )

    def told(self, batch_size: int, limit: int | None) -> str:
        """What a training does: `20 epochs of 30,000 images, {tokens} tokens each, 16 at a time`.

        Args:
            batch_size: images of a step.
            limit: most training images.
        """
        if self.steps:
            return f"{self.steps:,} steps of {batch_size} images, {{tokens}} tokens each"
        images = "all images" if limit is None else f"{limit:,} images"
        return f"{self.epochs:g} epochs of {images}, {{tokens}} tokens each, {batch_size} at a time"

    def steps_of(self, codes: Codes, batch_size: int) -> int:
        """The steps, or their number in `epochs` passes over the images."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        if not isinstance(codes, ShardCodes):
            raise TemperaError(
                "this stream of training images is endless: set training.steps= instead."
            )
        return max(1, math.ceil(self.epochs * len(codes.train_rows) / batch_size))


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    options, duration, recipe, loss, draft = read_options(cfg)
    tracking = Tracking.of(cfg, "train_draft")
    parts = Parts.of(cfg)
    codes: Part[Codes] = part(cfg.train_data)
    processes = Processes(cpu=parts.placement.device.type == "cpu")
    if processes.is_main and recipe.mixed_precision == "bf16":
        option = "training.mixed_precision"
        tell_slow_bfloat16(f"{option}=bf16", f"{option}=no", parts.placement.device)
    if options.dry_run:
        if not processes.is_main:
            return {}
        drawn = cfg.train_data.batch_size if cfg.train_data.get("draws") else 1
        work = duration.told(recipe.batch_size, codes.options.get("limit"))
        return dry_training(parts, draft, recipe, drawn, work)
    directory = writable_directory(options.directory)
    offered: dict[str, object] = {"processes": processes}
    if "_target_" in (cfg.get("source") or {}):
        make = part(cfg.source).make
        source: Source = make() if cfg.family.toy else read_with_files(parts, _networks, make)
        if not (_is_encoded(cfg, directory) and source.count()):
            source.fetch(processes)
        offered |= {"source": source, "captions": parts.captions()}
    with recording_taken() as taken:
        target = parts.discrete_target()
        tokenizer = parts.tokenizer()
    images = codes.make_with(offered, target=target, tokenizer=tokenizer, directory=directory)
    recipe = replace(recipe, steps=duration.steps_of(images, recipe.batch_size))
    torch.manual_seed(recipe.seed)
    run = TrainingRun(
        target=target,
        draft=draft.make(target=target, model=parts.model),
        codes=images,
        loss=loss,
        recipe=recipe,
        directory=directory,
        record=_record(cfg, images, taken),
        pictures=partial(pictures_of, tokenizer, target.grid, target.device),
    )
    notes = {"data": run.record.get("data"), "target": target.identity}
    metrics = run.train(partial(tracking.start, directory, notes))
    if processes.is_main:
        _publish(run, options.push_to_hub)
    return metrics


def read_options(
    cfg: DictConfig,
) -> tuple[Options, Duration, Recipe, Loss, Part[DraftNetwork]]:
    """What this command reads itself; a sweep reads it of all jobs before the first begins."""
    check_discrete(cfg, f"`{command('train')}` trains drafts of discrete tokens")
    options = from_options(cfg, Options)
    duration = from_options(cfg.training, Duration)
    recipe = build_recipe(cfg)
    loss: Loss = instantiate(cfg.loss)
    draft: Part[DraftNetwork] = part(cfg.draft)
    _check_effect(cfg, loss, draft)
    _check_drafts(options)
    return options, duration, recipe, loss, draft


def _is_encoded(cfg: DictConfig, directory: Path) -> bool:
    """Whether all training images are encoded; more of them would be another training."""
    path = cfg.train_data.get("path")
    return is_complete(Path(path) if path else directory / CODES)


def _publish(run: TrainingRun, repository: str | None) -> None:
    """Upload the best draft, if that is wanted, and say how to decode with it."""
    option = pasted("drafter.path", run.directory / DRAFT)
    if repository is not None:
        with side_service("{why}."):
            Repository(repository).upload(run.directory / DRAFT)
            option = f"drafter.path={repository}"
    print(
        f"the draft is in {run.directory / DRAFT}: {command('eval')} "
        f"model={run.draft.config.model} drafter={run.draft.drafter} {option}"
    )


def _record(cfg: DictConfig, codes: Codes, taken: Taken) -> dict[str, Any]:
    """What must be the same when the training is resumed, beside the recipe."""
    recorded = [str(key) for key in cfg if key not in APART]
    record = plain(OmegaConf.masked_copy(cfg, recorded))
    if taken:
        record["taken"] = taken
    if isinstance(codes, ShardCodes):
        record["data"] = codes.described
    return record


def build_recipe(cfg: DictConfig) -> Recipe:
    """The recipe of `seed` and `training`. Its `steps` are 1 if epochs will set them;
    mixed_precision=auto means bfloat16 where dtype=auto does, also on a device that is elsewhere.
    """
    decided: dict[str, Any] = {"seed": fitting(cfg.seed, Seed, "seed")}
    if cfg.training.steps is None:
        decided["steps"] = 1
    if cfg.training.mixed_precision == "auto":
        dtype = parse_dtype("auto", parse_device(cfg.device, dry=True))
        decided["mixed_precision"] = "bf16" if dtype == torch.bfloat16 else "no"
    return from_options(cfg.training, Recipe, **decided)


def _check_effect(cfg: DictConfig, loss: Loss, draft: Part[DraftNetwork]) -> None:
    """Raise TemperaError for an option of the command line that this loss or draft does not use."""
    unused = {
        "training.cross_entropy": "${training.cross_entropy}" not in plain(cfg.loss).values(),
        "training.cfg_dropout": loss.guided,
        "training.ttt_steps": draft.options.get("length", 1) > 1,
    }
    why = {
        "training.cross_entropy": "this loss has no such term",
        "training.cfg_dropout": "this loss takes every image with and without its condition",
        "training.ttt_steps": "this draft learns all tokens of a chain in one pass",
    }
    for option in typed(cfg):
        if unused.get(name := option_name(option)):
            raise TemperaError(f"{option} has no effect, because {why[name]}: leave it out")


def _check_drafts(options: Options) -> None:
    """Raise TemperaError for a place of a draft that cannot be read, or written on the hub."""
    if options.push_to_hub is not None:
        repository = Repository.named(options.push_to_hub)
        if repository is None or repository.revision:
            raise TemperaError(
                f"push_to_hub={options.push_to_hub} is not a repository: give owner/name."
            )
        if started_as_main() and not options.dry_run:
            repository.check_upload()
    if options.start is not None:
        advice = "give a trained draft's directory with start=DIR, or leave it out"
        draft_directory(options.start, advice)


def _networks(parts: Parts) -> None:
    parts.target()
    parts.tokenizer()
