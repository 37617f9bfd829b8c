"""The identity of a run: the options that its results depend on, and the networks behind them."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tempera.evaluation.latency import machine
from tempera.evaluation.pipeline import Pipeline

GROUPS = ("method", "model", "drafter", "tree", "rule", "schedule")
"""Hydra groups whose choices are part of the identity."""
PACKAGES = ("tempera-decoding", "torch", "transformers")
"""Distributions whose versions are recorded with a run."""
FREE = (
    "tokens",
    "directory",
    "limit",
    "offset",
    "prompt",
    "path",
    "truncate",
    "batch_size",
    "device",
    "dtype",
    "weights",
    "run_name",
    "statistics",
    "compile",
    "dry_run",
    "replays",
    "scores",
    "revision",
)
"""Options that may differ between two starts of the same run. They decide which results are
computed, where, and on what device, but not their values. `dtype` and `weights` affect the identity
through the network that they yield.
"""


def run_identity(
    options: Mapping[str, Any],
    choices: Mapping[str, str],
    drafter: Mapping[str, Any],
    pipeline: Pipeline,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The run's identity; differences from another identity are reported in its order.

    Args:
        options: the configuration's top-level values.
        choices: Hydra's choice in each group.
        drafter: the drafter's configuration.
        pipeline: target and method, built.
        dtype: of the target's weights.
    """
    target, method = pipeline.target, pipeline.method.describe()
    scalars = {
        name: value
        for name, value in options.items()
        if isinstance(value, str | int | float | None) and name not in FREE
    }
    own = {
        f"drafter.{name}": value
        for name, value in drafter.items()
        if name not in ("_target_", "path", *scalars)
    }
    return {
        **{group: choices[group] for group in GROUPS if group in choices},
        **({} if "method" in choices else {"method": method["method"]}),
        **scalars,
        **{name: value for name, value in own.items() if isinstance(value, str | int | float)},
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": target.compiled or None,
        "target": target.identity,
        "draft": method["draft"],
        "verification": method["verification"],
        "branching": method["branching"],
    }


def about(device: torch.device, overrides: list[str]) -> dict[str, Any]:
    """Further facts about a start of a run: command line, machine, versions and time."""
    return {
        "overrides": overrides,
        "machine": machine(device),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
