"""`tempera-train`: train the draft of a model."""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tempera.commands.costs import dry_training, read_with_files
from tempera.config import build
from tempera.config.compose import option_name, pasted, typed
from tempera.config.instantiate import Part, from_options, instantiate, part
from tempera.config.nodes import plain
from tempera.config.options import Role, role_of
from tempera.config.tracking import Tracking
from tempera.data.entries import Source
from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes, started_as_main
from tempera.runtime.files import writable_directory
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import draft_directory
from tempera.runtime.pretrained import Taken, recording_taken
from tempera.runtime.processor import Place, parse_device, parse_dtype, tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.training.dataset import Codes, ShardCodes
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import DRAFT, TrainingRun


@dataclass(frozen=True)
class Checked:
    """A training whose options are right, before anything is read.

    Attributes:
        recipe: its `steps` are 1 if epochs will set them.
        loss: the loss to minimise.
        draft: makes the network to train.
        codes: makes the training images.
        place: of the target.
        processes: share the work.
        tracking: where the numbers go.
    """

    recipe: Recipe
    loss: Loss
    draft: Part[DraftNetwork]
    codes: Part[Codes]
    place: Place
    processes: Processes
    tracking: Tracking


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    checked = _check(cfg)
    if cfg.dry_run:
        is_main = checked.processes.is_main
        return dry_training(cfg, checked.place, checked.recipe) if is_main else {}
    run = _build(cfg, checked)
    notes = {"data": run.record.get("data"), "target": run.target.identity}
    metrics = run.train(partial(checked.tracking.start, run.directory, notes))
    if checked.processes.is_main:
        _publish(run, cfg.push_to_hub)
    return metrics


def _check(cfg: DictConfig) -> Checked:
    """Check the options, and the places of drafts that are read or written."""
    tracking = Tracking.of(cfg, "train_draft")
    build.check_discrete(cfg, f"`{command('train')}` trains drafts of discrete tokens")
    recipe = build_recipe(cfg)
    loss: Loss = instantiate(cfg.loss)
    codes: Part[Codes] = part(cfg.train_data)
    draft: Part[DraftNetwork] = part(cfg.draft)
    _check_effect(cfg, loss, draft)
    _check_drafts(cfg)
    place = build.place_of(cfg, dry=cfg.dry_run)
    processes = Processes(cpu=place.device.type == "cpu")
    if processes.is_main and recipe.mixed_precision == "bf16":
        tell_slow_bfloat16("mixed_precision=bf16", "mixed_precision=no", place.device)
    return Checked(recipe, loss, draft, codes, place, processes, tracking)


def _build(cfg: DictConfig, checked: Checked) -> TrainingRun:
    """Read the target and the images, and make the draft."""
    directory = writable_directory(Path(str(cfg.directory)))
    offered: dict[str, object] = {"processes": checked.processes}
    if "source" in cfg:
        source: Source = read_with_files(cfg, _networks, part(cfg.source).make)
        source.fetch(checked.processes)
        offered |= {"source": source, "captions": build.build_captions(cfg)}
    with recording_taken() as taken:
        target = build.build_discrete_target(cfg)
        tokenizer = build.build_tokenizer(cfg)
    codes = checked.codes.make_with(
        offered, target=target, tokenizer=tokenizer, directory=directory
    )
    steps = _steps(cfg, codes, checked.recipe.batch_size)
    recipe = replace(checked.recipe, steps=steps)
    torch.manual_seed(recipe.seed)
    return TrainingRun(
        target=target,
        draft=checked.draft.make(target=target, model=cfg.model.name),
        codes=codes,
        loss=checked.loss,
        recipe=recipe,
        directory=directory,
        record=_record(cfg, recipe, codes, taken),
        decode_codes=tokenizer.decode_codes,
    )


def _publish(run: TrainingRun, repository: str | None) -> None:
    """Upload the best draft, if that is wanted, and say how to decode with it."""
    place = pasted("drafter.path", run.directory / DRAFT)
    if repository is not None:
        with side_service("{why}."):
            Repository(str(repository)).upload(run.directory / DRAFT)
            place = f"drafter.path={repository}"
    print(
        f"the draft is in {run.directory / DRAFT}: {command('eval')} "
        f"model={run.draft.config.model} drafter={run.draft.drafter} {place}"
    )


def _record(cfg: DictConfig, recipe: Recipe, codes: Codes, taken: Taken) -> dict[str, Any]:
    """What must be the same when the training is resumed, beside the recipe."""
    recorded = [
        str(key)
        for key in cfg
        if Role.IDENTITY in role_of(str(key), "train_draft") and key not in asdict(recipe)
    ]
    record = plain(OmegaConf.masked_copy(cfg, recorded))
    if taken:
        record["taken"] = taken
    if isinstance(codes, ShardCodes):
        record["data"] = codes.described
    return record


def build_recipe(cfg: DictConfig) -> Recipe:
    """The recipe of the top-level options. Its `steps` are 1 if epochs will set them;
    mixed_precision=auto means bfloat16 where dtype=auto does.
    """
    decided: dict[str, Any] = {}
    if cfg.steps is None:
        decided["steps"] = 1
    if cfg.mixed_precision == "auto":
        dtype = parse_dtype("auto", parse_device(cfg.device, dry=cfg.dry_run))
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


def _check_drafts(cfg: DictConfig) -> None:
    """Raise TemperaError for a place of a draft that cannot be read, or written on the hub."""
    if cfg.push_to_hub is not None:
        repository = Repository.named(str(cfg.push_to_hub))
        if repository is None or repository.revision:
            raise TemperaError(
                f"push_to_hub={cfg.push_to_hub} is not a repository: give owner/name."
            )
        if started_as_main() and not cfg.dry_run:
            repository.check_upload()
    if cfg.start is not None:
        advice = "give a trained draft's directory with start=DIR, or leave it out"
        draft_directory(str(cfg.start), advice)


def _networks(cfg: DictConfig) -> None:
    build.build_target(cfg)
    build.build_tokenizer(cfg)


def _steps(cfg: DictConfig, codes: Codes, batch_size: int) -> int:
    """The option `steps`, or the number of steps in `epochs` passes over the images."""
    if cfg.steps is not None:
        return int(cfg.steps)
    if not isinstance(codes, ShardCodes):
        raise TemperaError("this stream of training images is endless: give steps= for epochs=.")
    return max(1, math.ceil(float(cfg.epochs) * len(codes.kept) / batch_size))
