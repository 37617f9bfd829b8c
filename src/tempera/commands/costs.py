"""What a run needs: printed by `dry_run=true` and at the start on CUDA, and checked before weights
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
    """Estimate the run of a published model, or any dry run, and refuse what does not fit. Other
    runs, of the shipped models or of your own, are not estimated and return None: they are small,
    or may not run without data.

    Args:
        cfg: the composed configuration.
        estimate: the cost, from a configuration whose networks have sizes but no data.
        device, directory: of the run.
        tell: whether this process prints it, on CUDA and in a dry run.

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
    """Bytes of these files that the hub's cache lacks; None if the hub cannot be reached.

    Raises:
        TemperaError: the hub refuses one.
    """
    different = {(one.weights, *one.files): one for one in files}
    try:
        return sum(one.to_download() for one in different.values())
    except CannotReach:
        return None
