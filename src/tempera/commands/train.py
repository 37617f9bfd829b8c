"""`tempera-train`: train the draft of a model."""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import PositiveFloat, PositiveInt

from tempera.commands.costs import dry_training, read_with_files
from tempera.config.compose import option_name, pasted, typed
from tempera.config.instantiate import Part, from_options, instantiate, part
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
from tempera.training.recipe import Recipe
from tempera.training.trainer import DRAFT, TrainingRun

APART = (
    *("device", "truncate", "dry_run", "push_to_hub", "tracking", "family", "path", "offset"),
    *("outputs", "revision", "directory", "overrides"),
)
"""Options that may differ when a training is resumed."""


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/train_draft.yaml says what each is."""

    directory: Path
    start: str | None
    push_to_hub: str | None
    steps: PositiveInt | None
    epochs: PositiveFloat | None
    limit: PositiveInt | None
    dry_run: bool

    def __post_init__(self) -> None:
        """Raise TemperaError for a training without an end."""
        if self.steps is None and self.epochs is None:
            raise TemperaError("steps=null needs epochs=N: give one of them", option="epochs")


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    options, recipe, loss, draft = read_options(cfg)
    tracking = Tracking.of(cfg, "train_draft")
    parts = Parts.of(cfg)
    codes: Part[Codes] = part(cfg.train_data)
    processes = Processes(cpu=parts.placement.device.type == "cpu")
    if processes.is_main and recipe.mixed_precision == "bf16":
        tell_slow_bfloat16("mixed_precision=bf16", "mixed_precision=no", parts.placement.device)
    if options.dry_run:
        if not processes.is_main:
            return {}
        drawn = cfg.train_data.batch_size if cfg.train_data.get("draws") else 1
        return dry_training(parts, draft, recipe, drawn, _work(options, recipe))
    directory = writable_directory(options.directory)
    offered: dict[str, object] = {"processes": processes}
    if "source" in cfg:
        make = part(cfg.source).make
        source: Source = make() if cfg.family.toy else read_with_files(parts, _networks, make)
        if not (_is_encoded(cfg, directory) and source.count()):
            source.fetch(processes)
        offered |= {"source": source, "captions": parts.captions()}
    with recording_taken() as taken:
        target = parts.discrete_target()
        tokenizer = parts.tokenizer()
    images = codes.make_with(offered, target=target, tokenizer=tokenizer, directory=directory)
    recipe = replace(recipe, steps=_steps(options, images, recipe.batch_size))
    torch.manual_seed(recipe.seed)
    run = TrainingRun(
        target=target,
        draft=draft.make(target=target, model=parts.model),
        codes=images,
        loss=loss,
        recipe=recipe,
        directory=directory,
        record=_record(cfg, recipe, images, taken),
        pictures=partial(pictures_of, tokenizer, target.grid, target.device),
    )
    notes = {"data": run.record.get("data"), "target": target.identity}
    metrics = run.train(partial(tracking.start, directory, notes))
    if processes.is_main:
        _publish(run, options.push_to_hub)
    return metrics


def read_options(cfg: DictConfig) -> tuple[Options, Recipe, Loss, Part[DraftNetwork]]:
    """What this command reads itself; a sweep reads it of all jobs before the first begins."""
    check_discrete(cfg, f"`{command('train')}` trains drafts of discrete tokens")
    options = from_options(cfg, Options)
    recipe = build_recipe(cfg)
    loss: Loss = instantiate(cfg.loss)
    draft: Part[DraftNetwork] = part(cfg.draft)
    _check_effect(cfg, loss, draft)
    _check_drafts(options)
    return options, recipe, loss, draft


def _is_encoded(cfg: DictConfig, directory: Path) -> bool:
    """Whether all training images are encoded; more of them would be another training."""
    path = cfg.train_data.get("path")
    return is_complete(Path(path) if path else directory / CODES)


def _work(options: Options, recipe: Recipe) -> str:
    """What a training does: `20 epochs of 30,000 images, {tokens} tokens each, 16 at a time`."""
    if options.steps:
        return f"{options.steps:,} steps of {recipe.batch_size} images, {{tokens}} tokens each"
    images = "all images" if options.limit is None else f"{options.limit:,} images"
    return (
        f"{options.epochs:g} epochs of {images}, {{tokens}} tokens each, {recipe.batch_size} at a "
        "time"
    )


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


def _record(cfg: DictConfig, recipe: Recipe, codes: Codes, taken: Taken) -> dict[str, Any]:
    """What must be the same when the training is resumed, beside the recipe."""
    recorded = [str(key) for key in cfg if key not in {*APART, *asdict(recipe)}]
    record = plain(OmegaConf.masked_copy(cfg, recorded))
    if taken:
        record["taken"] = taken
    if isinstance(codes, ShardCodes):
        record["data"] = codes.described
    return record


def build_recipe(cfg: DictConfig) -> Recipe:
    """The recipe of the top-level options. Its `steps` are 1 if epochs will set them;
    mixed_precision=auto means bfloat16 where dtype=auto does, also on a device that is elsewhere.
    """
    decided: dict[str, Any] = {}
    if cfg.steps is None:
        decided["steps"] = 1
    if cfg.mixed_precision == "auto":
        dtype = parse_dtype("auto", parse_device(cfg.device, dry=True))
        decided["mixed_precision"] = "bf16" if dtype == torch.bfloat16 else "no"
    return from_options(cfg, Recipe, **decided)


def _check_effect(cfg: DictConfig, loss: Loss, draft: Part[DraftNetwork]) -> None:
    """Raise TemperaError for an option of the command line that this loss or draft does not use."""
    unused = {
        "cross_entropy": "${cross_entropy}" not in plain(cfg.loss).values(),
        "cfg_dropout": loss.guided,
        "ttt_steps": draft.options.get("length", 1) > 1,
    }
    why = {
        "cross_entropy": "this loss has no such part",
        "cfg_dropout": "this loss takes every image with and without its condition",
        "ttt_steps": "this draft learns all tokens of a chain in one pass",
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


def _steps(options: Options, codes: Codes, batch_size: int) -> int:
    """The option `steps`, or the number of steps in `epochs` passes over the images."""
    if options.steps is not None:
        return options.steps
    assert options.epochs is not None
    if not isinstance(codes, ShardCodes):
        raise TemperaError("this stream of training images is endless: set steps= instead.")
    return max(1, math.ceil(options.epochs * len(codes.train_rows) / batch_size))
