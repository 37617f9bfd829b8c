"""The identity of a run: the options that its results depend on, and the networks behind them."""

import platform
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from tempera.evaluation.latency import machine
from tempera.evaluation.pipeline import Pipeline
from tempera.runtime.installation import commit
from tempera.runtime.network_identity import identity_of

PACKAGES = ("tempera-decoding", "torch", "transformers")
"""Distributions whose versions are recorded with a run."""
FILES = ("_target_", "path", "directory")
"""Names inside a part that the identities of its weights stand for."""


def run_identity(
    options: Mapping[str, Any],
    choices: Mapping[str, str | None],
    pipeline: Pipeline,
    verification: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The run's identity: the options that its numbers depend on, and the networks. Differences
    from another identity are reported in its order.

    Args:
        options: those with `tempera.config.options.Role.IDENTITY`.
        choices: Hydra's choice in each group.
        pipeline: target, method and image decoder, built.
        verification: how drafts are verified (`tempera.config.parts.Parts.verification`).
        dtype: of the target's weights.
    """
    target = pipeline.target
    decoder = pipeline.image_decoder
    method = pipeline.method.describe()
    scalars = {name: value for name, value in options.items() if _is_value(value)}
    parts = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    chosen = {part: choices[part] for part in parts if choices.get(part)}
    return {
        "method": choices.get("method") or method["method"],
        **chosen,
        **scalars,
        **_values_inside(parts, scalars),
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": target.compiled or None,
        "target": target.identity,
        "draft": method["draft"],
        "verification": dict(verification),
        "branching": method["branching"],
        "image_decoder": identity_of(decoder) if isinstance(decoder, nn.Module) else None,
    }


def _values_inside(
    parts: Mapping[str, Mapping[str, Any]], scalars: Collection[str]
) -> dict[str, Any]:
    """The values inside the parts, as `part.name`, but for those of the model, those that are also
    options of their own, and those that name files.
    """
    inside = {}
    for part, values in parts.items():
        for name, value in values.items():
            if part != "model" and name not in (*scalars, *FILES) and _is_value(value):
                inside[f"{part}.{name}"] = value
    return inside


def _is_value(value: object) -> bool:
    """Whether this is one value or a list of values."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    return isinstance(value, str | int | float | None)


def about(device: torch.device, overrides: list[str]) -> dict[str, Any]:
    """Further facts about a start of a run: command line, machine, versions, commit and time."""
    return {
        "overrides": overrides,
        "machine": machine(device),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
