"""`tempera-env`: what a bug report says about the machine, also of a broken installation."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from tempera.runtime.files import cache_directory, free_at, reason
from tempera.runtime.installation import commit, conf_directory, installed_version, version_of
from tempera.runtime.terminal import take_all_text

PACKAGES = (
    *("torch", "torchvision", "transformers", "huggingface-hub", "accelerate", "diffusers"),
    *("hydra-core", "datasets", "numpy", "wandb"),
)
"""Packages whose versions are told."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_ENDPOINT")
"""Environment variables that are told where they are set."""


def main() -> None:
    """Print versions, device, cores, caches and variables, a line each, to be copied."""
    take_all_text()
    facts = {
        "tempera": f"{installed_version()}, {commit() or 'no checkout'}",
        "conf/": str(conf_directory()),
        "Python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
    }
    facts |= {name: version_of(name) for name in PACKAGES}
    facts["cores"] = _cores()
    for name, tell in (("device", _device), ("bfloat16", _bfloat16), ("hub's cache", _hub_cache)):
        facts[name] = _told(tell)
    facts["tempera's cache"] = _described(cache_directory())
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    for name, fact in facts.items():
        print(f"{name}: {fact}")


def _told(tell: Callable[[], str]) -> str:
    """A fact, or why it cannot be had."""
    try:
        return tell()
    except Exception as problem:  # of a broken installation, anything
        return f"unknown ({type(problem).__name__}: {reason(problem)})"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} of {os.cpu_count()} {platform.machine()}"


def _device() -> str:
    import torch

    from tempera.runtime.processor import name_of, parse_device, tell_device

    tell_device()
    device = parse_device("auto")
    told = f"{name_of(device)}, PyTorch {torch.__version__}"
    if device.type != "cuda":
        return told
    memory = torch.cuda.get_device_properties(device).total_memory
    return f"{told}, {memory / 2**30:.0f} GiB"


def _bfloat16() -> str:
    from tempera.runtime.processor import computes_bfloat16, parse_device

    return "fast" if computes_bfloat16(parse_device("auto")) else "slow"


def _hub_cache() -> str:
    from huggingface_hub import constants

    return _described(Path(constants.HF_HUB_CACHE))


def _described(directory: Path) -> str:
    """A directory with the free space around it."""
    absent = "" if directory.exists() else " (does not exist yet)"
    return f"{directory}{absent}, {free_at(directory) / 1e9:.0f} GB free"
