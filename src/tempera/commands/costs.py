"""What a run will take, told by `dry_run=true` and at the start on CUDA, and checked before weights
are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from tempera.config.build import without_weights
from tempera.config.instantiate import check_value
from tempera.runtime.cost import Cost
from tempera.runtime.hub import CannotReach
from tempera.runtime.pretrained import PretrainedFiles


def is_dry(cfg: DictConfig) -> bool:
    """The option `dry_run`."""
    check_value(cfg, "dry_run", cfg.dry_run, bool)
    return bool(cfg.dry_run)


def weigh(
    cfg: DictConfig,
    estimate: Callable[[DictConfig], Cost],
    device: torch.device,
    directory: Path,
    tell: bool,
) -> Cost | None:
    """Estimate a published model's run, or any in a dry run, and refuse what does not fit. Returns
    None for a shipped model or one of your own, which is small or not known to run without data.

    Args:
        cfg: the composed configuration.
        estimate: the cost, given the configuration whose networks have sizes alone.
        device, directory: of the run.
        tell: print it, on CUDA and in a dry run.

    Raises:
        TemperaError: the device or the disk is too small, or the hub refuses a file.
    """
    if not is_dry(cfg) and (cfg.get("family") is None or cfg.family.toy is not False):
        return None
    with without_weights(cfg) as (sized, files):
        cost = estimate(sized)
    cost = replace(cost, download=to_download(files))
    if tell and (is_dry(cfg) or device.type == "cuda"):
        print(cost)
    cost.check(device, directory)
    return cost


def to_download(files: Sequence[PretrainedFiles]) -> int | None:
    """Bytes that the hub's cache lacks of these files; None if the hub cannot be reached.

    Raises:
        TemperaError: the hub refuses one.
    """
    different = {(one.weights, *one.files): one for one in files}
    try:
        return sum(one.to_download() for one in different.values())
    except CannotReach:
        return None
