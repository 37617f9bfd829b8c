"""The identity of a run: the options that its results depend on, and the networks behind them."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from tempera.evaluation.latency import machine
from tempera.evaluation.pipeline import Pipeline
from tempera.runtime.installation import commit, version_of
from tempera.runtime.network_identity import identity_of
from tempera.runtime.processor import Placement

PACKAGES = ("tempera-decoding", "torch", "transformers")
"""Distributions whose versions are recorded with a run."""
DRAWS = (
    *("model", "seed", "dtype", "weights_dtype", "guidance", "temperature"),
    *("top_k", "top_p", "min_p", "entropy_temperature", "text_encoder", "target"),
)
"""Settings that runs share whose draws for a prompt are the same: they are compared prompt by
prompt. `target` names the weights; `text_encoder` is there where its options were given.
"""


def run_identity(
    settings: Mapping[str, Any],
    method: str | None,
    pipeline: Pipeline,
    verification: Mapping[str, Any],
    placement: Placement,
) -> dict[str, Any]:
    """The run's identity: the settings that its numbers depend on, and the networks.

    Args:
        settings: choices and options (`tempera.config.parts.Parts.settings`).
        method: Hydra's choice of a method.
        pipeline: target, method and image decoder, built.
        verification: how drafts are verified (`tempera.config.parts.Parts.verification`).
        placement: of the target, with the dtype of its weights.
    """
    target = pipeline.target
    decoder = pipeline.image_decoder
    described = pipeline.method.describe()
    quantised = {} if placement.quantised is None else {"weights_dtype": placement.quantised}
    return {
        "method": method or described["method"],
        **settings,
        "dtype": placement.dtype_name,
        **quantised,
        "compiled": target.compiled or None,
        "target": target.identity,
        "draft": described["draft"],
        "verification": dict(verification),
        "branching": described["branching"],
        "image_decoder": identity_of(decoder) if isinstance(decoder, nn.Module) else None,
    }


def about(device: torch.device, overrides: list[str]) -> dict[str, Any]:
    """Further facts about a start of a run: command line, machine, versions, commit and time."""
    return {
        "overrides": overrides,
        "machine": machine(device),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
