"""What a run needs: printed by `dry_run=true` and at the start on CUDA, and checked before weights
are read. A dry run also measures the time, if the weights are on this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from tempera.config.build import without_weights
from tempera.config.instantiate import check_value
from tempera.errors import MissingWeights, TemperaError
from tempera.runtime.cost import Cost, Time, largest_batch
from tempera.runtime.distributed import Processes
from tempera.runtime.hub import CannotReach
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.processor import computes_bfloat16

AUTO = "auto"
"""What an option is set to for a size that fits the device."""


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


def chosen_batch(
    cfg: DictConfig,
    estimate: Callable[[DictConfig, int], Cost],
    device: torch.device,
    most: int,
    processes: Processes,
) -> int:
    """The option `batch_size`; for `auto` the largest batch that fits the device, which is printed.

    Args:
        cfg: the composed configuration.
        estimate: the cost of a batch, from a configuration whose networks have sizes but no data.
        device: of the networks.
        most: largest batch of use.
        processes: the main one prints it.

    Raises:
        TemperaError: the option is no number, the device's memory is unknown or too small.
    """
    if cfg.batch_size != AUTO:
        return int(check_value(cfg, "batch_size", cfg.batch_size, int))
    with without_weights(cfg) as (sized, _):
        size = largest_batch(lambda size: estimate(sized, size).peak, most, device, processes.count)
    if processes.is_main:
        print(f"batch_size=auto: {size} prompts at a time")
    return size


def dry(cost: Cost | None, measure: Callable[[], Time], tell: bool) -> dict[str, float]:
    """The result of a dry run: bytes of `memory` and `disk`, and the seconds of `time` unless they
    cannot be measured. Downloads nothing.

    Args:
        cost: of the run.
        measure: builds the networks and times a part of the run.
        tell: whether this process prints the time, or why it is unknown.
    """
    assert cost is not None  # a dry run is always weighed
    found = {"memory": float(cost.peak), "disk": float(cost.written)}
    line = "not measured, as the weights are not on this machine"
    try:
        if not cost.download:
            time = measure()
            found["time"], line = time.total, str(time)
    except MissingWeights:
        pass
    except TemperaError as problem:
        line = f"not measured: {problem}"
    if tell:
        print(f"time: {line}")
    return found


def tell_slow_bfloat16(option: str, instead: str, device: torch.device) -> None:
    """Print that an option makes a processor compute what it is slow at; nothing on others.

    Args:
        option: that asks for bfloat16, as `name=value`.
        instead: what to give for float32.
        device: of the networks.
    """
    if not computes_bfloat16(device):
        print(f"{option} is several times as slow as {instead} on this processor, without AVX-512")


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
