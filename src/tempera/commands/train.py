"""`tempera-train`: train the draft of a model."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tempera.commands.costs import AUTO, dry, is_dry, tell_slow_bfloat16, weigh
from tempera.commands.sources import build_source, fetch
from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import (
    accepted,
    instantiate,
)
from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import NotAClass, TemperaError
from tempera.runtime.cost import Cost, Time, largest_batch
from tempera.runtime.distributed import Processes, uses_fsdp
from tempera.runtime.files import writable_directory
from tempera.runtime.installation import command
from tempera.runtime.tracking import Tracker
from tempera.training.dataset import Codes, ShardCodes
from tempera.training.estimate import BlankCodes, estimate
from tempera.training.fsdp import split_target
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe
from tempera.training.run_time import Drawing, run_time
from tempera.training.trainer import DRAFT, train


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    build.check_training(cfg)
    processes = Processes(cpu=build.parse_device(cfg.device).type == "cpu")
    recipe = build.build_recipe(cfg)
    loss: Loss = instantiate(cfg.loss)
    if processes.is_main and recipe.mixed_precision == "bf16":
        device = build.parse_device(cfg.device)
        tell_slow_bfloat16("mixed_precision=bf16", "mixed_precision=no", device)
    parts = {"recipe": recipe, "loss": loss, "processes": processes.count}
    if is_dry(cfg):
        parts["recipe"] = _split(cfg, parts, processes.is_main)
        cost = _weigh(cfg, parts, processes.is_main)
        return dry(cost, lambda: _measured(cfg, parts, processes), processes.is_main)
    directory = writable_directory(Path(str(cfg.directory)))
    parts["recipe"] = recipe = _split(cfg, parts, processes.is_main)
    _weigh(cfg, parts, processes.is_main)
    offered: dict[str, Any] = {"processes": processes}
    if "source" in cfg:
        offered["source"] = build_source(cfg)
        fetch(offered["source"], processes)
    target: Any = build.build_target(cfg, split_target if uses_fsdp() else None)
    codes = instantiate(
        cfg.train_data,
        target=target,
        tokenizer=build.build_tokenizer(cfg),
        directory=directory,
        **accepted(cfg.train_data, offered),
    )
    recipe = replace(recipe, steps=_steps(cfg, codes, recipe.batch_size))
    torch.manual_seed(recipe.seed)
    draft: DraftNetwork = instantiate(cfg.draft, target=target, model=cfg.model.name)
    apart = {*asdict(recipe), "device", "directory", "tracking", "family", "truncate", "dry_run"}
    record: Any = OmegaConf.to_container(
        OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in apart])
    )

    if isinstance(codes, ShardCodes):
        record["data"] = codes.described

    def start_tracker() -> Tracker:
        chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        notes = {"data": record.get("data"), "target": target.identity}
        return build.start_tracker(cfg, directory, "train_draft", chosen, notes)

    metrics = train(target, draft, codes, loss, recipe, directory, start_tracker, record)
    if processes.is_main:
        print(
            f"the draft is in {directory / DRAFT}: {command('eval')} drafter={draft.drafter} "
            f"{pasted('drafter.path', directory / DRAFT)}"
        )
    return metrics


def _weigh(cfg: DictConfig, parts: dict[str, Any], tell: bool) -> Cost | None:
    """The cost of the run, as `costs.weigh` tells it."""
    recipe: Recipe = parts["recipe"]
    device = build.parse_device(cfg.device)
    return weigh(
        cfg, lambda sized: _cost(sized, parts, recipe), device, Path(str(cfg.directory)), tell
    )


def _split(cfg: DictConfig, parts: dict[str, Any], tell: bool) -> Recipe:
    """The recipe; with `gradient_accumulation=auto`, a process's batch is split into the fewest
    parts that fit its device.
    """
    recipe: Recipe = parts["recipe"]
    if cfg.gradient_accumulation != AUTO:
        return recipe
    processes: int = parts["processes"]
    share = recipe.part(processes)
    several = 2 if uses_fsdp() else 1  # gradients stay whole between the parts of a batch

    def peak(size: int) -> int:
        whole = several * size * processes
        batch = replace(recipe, batch_size=whole, gradient_accumulation=several)
        return _cost(sized, parts, batch).peak

    with build.without_weights(cfg) as (sized, _):
        fits = largest_batch(
            peak,
            share,
            build.parse_device(cfg.device),
            processes,
        )
    count = next(
        count for count in range(1, share + 1) if share % count == 0 and share // count <= fits
    )
    if tell:
        print(f"gradient_accumulation=auto: {count}, {share // count} images at a time")
    return replace(recipe, gradient_accumulation=count)


def _cost(cfg: DictConfig, parts: dict[str, Any], recipe: Recipe) -> Cost:
    """The cost, from a configuration whose networks have sizes but no data."""

    def make() -> tuple[Any, DraftNetwork]:
        target: Any = build.build_target(cfg)
        with target.device:
            return target, instantiate(cfg.draft, target=target, model=cfg.model.name)

    cost = estimate(
        make,
        parts["loss"],
        replace(recipe, steps=_about(cfg, recipe)),
        _caption(cfg),
        parts["processes"],
        drawn=cfg.train_data.batch_size if _draws(cfg) and not uses_fsdp() else 0,
        split=uses_fsdp(),
    )
    return replace(cost, stored=build_source(cfg).to_store()) if _downloads(cfg) else cost


def _draws(cfg: DictConfig) -> bool:
    """Whether the target generates the training images, or a part of them."""
    return str(cfg.train_data._target_).endswith((".generated_codes", ".mixed_codes"))


def _downloads(cfg: DictConfig) -> bool:
    """Whether the training images are those of a source, downloaded if necessary."""
    return str(cfg.train_data._target_).endswith(".encoded_codes")


def _caption(cfg: DictConfig) -> str:
    """One that the model can use."""
    captions = build.build_captions(cfg)
    try:
        if captions is not None:
            captions.check([_CAPTION])
    except NotAClass:
        return "0"
    return _CAPTION


_CAPTION = "a large green star left of a small white ring"


def _about(cfg: DictConfig, recipe: Recipe) -> int:
    """The steps, before it is known how many images can be used: 5% are held out."""
    if cfg.steps is not None or cfg.limit is None:
        return recipe.steps
    return max(1, math.ceil(float(cfg.epochs) * 0.95 * int(cfg.limit) / recipe.batch_size))


def _measured(cfg: DictConfig, parts: dict[str, Any], processes: Processes) -> Time:
    """The time of the run, from a few seconds of it. Images that are made before the first step are
    blank ones here.

    Raises:
        TemperaError: the training data are not here, or training is not possible.
    """
    recipe: Recipe = parts["recipe"]
    target: Any = build.build_target(cfg, split_target if uses_fsdp() else None)
    caption, made = _caption(cfg), "limit" in cfg.train_data
    codes: Codes = (
        BlankCodes(caption, target.length)
        if made
        else instantiate(
            cfg.train_data,
            target=target,
            tokenizer=build.build_tokenizer(cfg),
            directory=Path(str(cfg.directory)),
        )
    )
    drawing = None
    if _draws(cfg) and not uses_fsdp() and cfg.train_data.limit is not None:
        drawing = Drawing(cfg.train_data.limit, caption, cfg.train_data.batch_size)
    draft: DraftNetwork = instantiate(cfg.draft, target=target, model=cfg.model.name)
    steps = _about(cfg, recipe) if made else _steps(cfg, codes, recipe.batch_size)
    later = "downloads and encoding of training images" if made and not drawing else "downloads"
    recipe = replace(recipe, steps=steps)
    return run_time(
        target, draft, codes, parts["loss"], recipe, drawing, later, processes=processes
    )


def _steps(cfg: DictConfig, codes: Codes, batch_size: int) -> int:
    """The option `steps`, or the number of steps in `epochs` passes over the images."""
    if cfg.steps is not None:
        return int(cfg.steps)
    if not isinstance(codes, ShardCodes):
        raise TemperaError("this stream of training images is endless: give steps= for epochs=.")
    return max(1, math.ceil(float(cfg.epochs) * len(codes.kept) / batch_size))
