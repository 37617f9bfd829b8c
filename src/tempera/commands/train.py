"""`tempera-train`: train the draft of a model."""

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tempera.commands.costs import dry_training, read_with_files
from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import accepted, from_options, instantiate, parsed
from tempera.config.options import Role, role_of
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes, started_as_main
from tempera.runtime.files import writable_directory
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import draft_directory
from tempera.runtime.pretrained import Taken, recording_taken
from tempera.runtime.processor import tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import Tracker
from tempera.training.dataset import Codes, ShardCodes
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import DRAFT, TrainingRun


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    build.check_discrete(cfg, f"`{command('train')}` trains drafts of discrete tokens")
    recipe = build_recipe(cfg)
    loss: Loss = instantiate(cfg.loss)
    for part in (cfg.tracking, cfg.train_data, cfg.draft):
        parsed(part)
    _check_drafts(cfg)
    device = build.parse_device(cfg.device, dry=cfg.dry_run)
    processes = Processes(cpu=device.type == "cpu")
    if processes.is_main and recipe.mixed_precision == "bf16":
        tell_slow_bfloat16("mixed_precision=bf16", "mixed_precision=no", device)
    if cfg.dry_run:
        return dry_training(cfg, recipe) if processes.is_main else {}
    directory = writable_directory(Path(str(cfg.directory)))
    offered: dict[str, Any] = {"processes": processes}
    if "source" in cfg:
        read = partial(instantiate, cfg.source)
        offered["source"] = read_with_files(cfg, _networks, read)
        offered["captions"] = build.build_captions(cfg)
        offered["source"].fetch(processes)
    with recording_taken() as taken:
        target: Any = build.build_target(cfg)
        tokenizer: Any = build.build_tokenizer(cfg)
    codes = instantiate(
        cfg.train_data,
        target=target,
        tokenizer=tokenizer,
        directory=directory,
        **accepted(cfg.train_data, offered),
    )
    recipe = replace(recipe, steps=_steps(cfg, codes, recipe.batch_size))
    torch.manual_seed(recipe.seed)
    draft = instantiate(cfg.draft, target=target, model=cfg.model.name)
    record = _record(cfg, recipe, codes, taken)

    def start_tracker() -> Tracker:
        chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        notes = {"data": record.get("data"), "target": target.identity}
        return build.start_tracker(cfg, directory, "train_draft", chosen, notes)

    run = TrainingRun(target, draft, codes, loss, recipe, directory, record, tokenizer.decode_codes)
    metrics = run.train(start_tracker)
    if processes.is_main:
        place = pasted("drafter.path", directory / DRAFT)
        if cfg.push_to_hub is not None:
            with side_service("{why}."):
                Repository(str(cfg.push_to_hub)).upload(directory / DRAFT)
                place = f"drafter.path={cfg.push_to_hub}"
        print(
            f"the draft is in {directory / DRAFT}: {command('eval')} model={draft.config.model} "
            f"drafter={draft.drafter} {place}"
        )
    return metrics


def _record(cfg: DictConfig, recipe: Recipe, codes: Codes, taken: Taken) -> dict[str, Any]:
    """What must be the same when the training is resumed, beside the recipe."""
    recorded = [
        str(key)
        for key in cfg
        if Role.IDENTITY in role_of(str(key), "train_draft") and key not in asdict(recipe)
    ]
    record: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, recorded))
    if taken:
        record["taken"] = taken
    if isinstance(codes, ShardCodes):
        record["data"] = codes.described
    return dict(record)


def build_recipe(cfg: DictConfig) -> Recipe:
    """The recipe of the top-level options. Its `steps` are 1 if epochs will set them;
    mixed_precision=auto means bfloat16 where dtype=auto does.
    """
    decided: dict[str, Any] = {}
    if cfg.steps is None:
        decided["steps"] = 1
    if cfg.mixed_precision == "auto":
        dtype = build.parse_dtype("auto", build.parse_device(cfg.device, dry=cfg.dry_run))
        decided["mixed_precision"] = "bf16" if dtype == torch.bfloat16 else "no"
    return from_options(cfg, Recipe, **decided)


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


def _networks(cfg: DictConfig) -> tuple[Any, Any]:
    return build.build_target(cfg), build.build_tokenizer(cfg)


def _steps(cfg: DictConfig, codes: Codes, batch_size: int) -> int:
    """The option `steps`, or the number of steps in `epochs` passes over the images."""
    if cfg.steps is not None:
        return int(cfg.steps)
    if not isinstance(codes, ShardCodes):
        raise TemperaError("this stream of training images is endless: give steps= for epochs=.")
    return max(1, math.ceil(float(cfg.epochs) * len(codes.kept) / batch_size))
