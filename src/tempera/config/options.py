"""The options at the top of the configuration: their types and ranges, which are checked before
torch is imported, and what each is for. Defaults stand in conf/ alone. Other options of a group,
such as `drafter.path`, are checked by the objects that they make.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import Field

from tempera.config.instantiate import fitting
from tempera.errors import TemperaError

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Prompts = Annotated[int, Field(ge=1, le=10**7)]
"""A number of prompts, which are held in memory."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Role(Flag):
    """What an option is for. An option without any role may differ between two starts of a run."""

    IDENTITY = auto()
    """A run's numbers depend on it: its directory is refused to a run with another value."""
    NAME = auto()
    """A run that changes it is named by it."""
    PAIRED = auto()
    """Runs are compared prompt by prompt only if they share it."""
    UNTRACKED = auto()
    """The tracker does not record it."""
    LITERAL = auto()
    """Its text is taken as it is typed, commas and quotes included."""
    OWN = auto()
    """It is of a script that starts evaluations, and not passed on to them."""


FREE = Role(0)
METHOD = Role.IDENTITY | Role.NAME
"""The role of what decides how images are decoded, and of options that only a user's own YAML
has.
"""


@dataclass(frozen=True)
class Option:
    """The type of an option's value, None for a node of the configuration; and what it is for."""

    kind: object
    role: Role = FREE


NODES = {
    "model": Option(None, Role.IDENTITY | Role.PAIRED),
    **dict.fromkeys(("drafter", "tree", "rule", "schedule", "neighbours"), Option(None, METHOD)),
    "decoding": Option(None, Role.IDENTITY),
    "tracking": Option(None, Role.UNTRACKED),
    **dict.fromkeys(
        ("data", "metrics", "torchmetrics", "speed", "matching", "free_parameter"), Option(None)
    ),
    **dict.fromkeys(("family", "pipeline", "paper", "study", "measured_with"), Option(None)),
    **dict.fromkeys(("draft", "loss", "train_data", "source"), Option(None, Role.IDENTITY)),
    "encoder": Option(None),
}
"""Parts of the configuration that are made into objects."""
MODELS = {
    "guidance": Option(float, METHOD | Role.PAIRED),
    "temperature": Option(float, METHOD | Role.PAIRED),
    "top_k": Option(Count, METHOD | Role.PAIRED),
    "top_p": Option(Annotated[float, Field(gt=0, le=1)], METHOD | Role.PAIRED),
    "min_p": Option(Annotated[float, Field(ge=0, le=1)], METHOD | Role.PAIRED),
    "entropy_temperature": Option(list[float] | None, METHOD | Role.PAIRED),
    "guidance_schedule": Option(str, METHOD),
    "denoising_steps": Option(Positive, METHOD),
    "denoising_start": Option(Count, METHOD),
    "image_size": Option(Positive, METHOD),
    "weights": Option(str, Role.NAME),  # its identity is that of the network
    "revision": Option(str | int | None),
}
"""Options that some models have."""
METHODS = {
    "alignment": Option(bool, METHOD),
    "branches": Option(Positive, METHOD),
    "ceiling": Option(float | None, METHOD),
    "continuation": Option(bool, METHOD),
    "coupling": Option(str, METHOD),
    "decay": Option(float, METHOD),
    "delta": Option(float | None, METHOD),
    "depth": Option(int, METHOD),
    "difference": Option(float, METHOD),
    "distance": Option(float, METHOD),
    "ell": Option(int, METHOD),
    "expected_length": Option(float | None, Role.IDENTITY),
    "exponent_temperature": Option(float, METHOD),
    "floor": Option(float, METHOD),
    "free": Option(Count, METHOD),
    "gamma": Option(Positive, METHOD),
    "initialisation": Option(str, METHOD),
    "k": Option(float, METHOD),
    "lam": Option(float, METHOD),
    "last_noise": Option(bool, METHOD),
    "levels": Option(Positive, METHOD),
    "measure": Option(str, METHOD),
    "nodes": Option(Positive, METHOD),
    "nu": Option(float, METHOD),
    "prefill": Option(float, METHOD),
    "price": Option(float | None, METHOD),
    "proactive": Option(bool, METHOD),
    "proximity": Option(str, METHOD),
    "ranks": Option(Count | None, METHOD),
    "refinement": Option(bool, METHOD),
    "residual": Option(str, METHOD),
    "reuse": Option(float | None, METHOD),
    "reuse_label": Option(str, METHOD),
    "round_length": Option(float | None, METHOD),
    "scale": Option(float, METHOD),
    "shape": Option(str, METHOD),
    "steps": Option(Positive | None, METHOD),
    "tokens": Option(Literal["discrete", "continuous", "any"]),
    "trials": Option(Positive, METHOD),
    "window": Option(Positive, METHOD),
}
"""Options that some methods have."""
EXPERIMENTS = {
    **dict.fromkeys(("captions", "masked", "rank", "replace"), Option(Count, METHOD)),
    "changed": Option(float, METHOD),
}
"""Options that some presets have."""
PLACES = {
    "path": Option(str | None),
    "statistics": Option(Path),
    "outputs": Option(str),
}
"""Where something lies."""
RUN = {
    "directory": Option(None, Role.UNTRACKED),
    "choices": Option(None, Role.UNTRACKED),
    "overrides": Option(None, Role.UNTRACKED),
}
"""What Hydra knows about a run."""
OPTIONAL = NODES | MODELS | METHODS | EXPERIMENTS | PLACES | RUN
"""Options that a configuration need not have."""

COMPUTED = {
    "seed": Option(Seed, Role.IDENTITY | Role.PAIRED),
    "device": Option(str),
    "dtype": Option(DType, Role.NAME | Role.PAIRED),
}
"""Of every script that runs networks."""
GENERATE = COMPUTED | {
    "compile": Option(bool | Literal["auto"], Role.NAME),
    "plain_rows": Option(Count | Literal["auto"]),
    "batch_size": Option(Positive | Literal["auto"]),
    "truncate": Option(bool),
    "diagnostics": Option(bool, Role.IDENTITY),
}
EVAL = GENERATE | {
    "prompt": Option(str | None, Role.LITERAL),
    "limit": Option(Prompts | None),
    "offset": Option(Count),
    "replays": Option(Count),
    "scores": Option(str | None),
    "against": Option(str | None),
    "expected_length": Option(float | None, Role.IDENTITY),
    "matching": Option(dict[str, Any]),
    "speed": Option(dict[str, Any]),
    "speed.prompts": Option(Count),
    "speed.warmup": Option(Count),
    "speed.batches": Option(list[Positive]),
    "matching.prompts": Option(Prompts),
    "matching.offset": Option(Count),
    "matching.seed": Option(Seed),
    "verbose": Option(bool),
    "dry_run": Option(bool),
}
BENCH = COMPUTED | {
    "batch_sizes": Option(list[Positive]),
    "compile": Option(bool | Literal["auto"]),
    "repeats": Option(Positive),
    "bandwidth": Option(float | None),
}
CALIBRATE = COMPUTED | {
    "batch_size": Option(Positive),
    "truncate": Option(bool),
    "limit": Option(Prompts | None),
    "offset": Option(Count),
    "statistics": Option(Path),
}
TUNE = COMPUTED | {
    "budget": Option(str, Role.OWN),
    "batch_size": Option(Positive, Role.OWN),
    "depths": Option(list[int], Role.OWN),
    "trees": Option(list[str], Role.OWN),
    "prices": Option(list[float], Role.OWN),
    "deltas": Option(list[float], Role.OWN),
    "limit": Option(Prompts | None, Role.OWN),
    "offset": Option(Count, Role.OWN),
    "repeats": Option(Positive, Role.OWN),
    "runs": Option(Positive, Role.OWN),
    "images": Option(Positive, Role.OWN),
    "timed": Option(Positive, Role.OWN),
    "directory": Option(None, Role.OWN),
    "overrides": Option(None, Role.OWN),
    "compile": Option(bool | Literal["auto"]),
    "truncate": Option(bool),
}
TRAIN = COMPUTED | {
    "seed": Option(Seed),  # this, and what is not here, stands in the record of the recipe
    "dtype": Option(DType, Role.IDENTITY),
    "mixed_precision": Option(Literal["no", "bf16", "auto"]),
    "start": Option(str | None, Role.IDENTITY),
    "push_to_hub": Option(str | None),
    "decay": Option(str),
    "steps": Option(Positive | None),
    "epochs": Option(Annotated[float, Field(gt=0)] | None, Role.IDENTITY),
    "gradient_accumulation": Option(Positive),
    "limit": Option(Positive | None, Role.IDENTITY),
    "weights": Option(str, Role.IDENTITY),
    "cross_entropy": Option(float, Role.IDENTITY),
    "truncate": Option(bool),
    "dry_run": Option(bool),
}
PREPARE = COMPUTED | {
    "shard_size": Option(Positive),
    "batch_size": Option(Positive),
    "limit": Option(Positive | None),
    "max_broken": Option(Count),
    "dry_run": Option(bool),
    "truncate": Option(bool),
}
REPORT = {
    "runs": Option(str | int | list[str]),
    "output": Option(Path),
    "baseline": Option(str | None, Role.LITERAL),
    "publish": Option(bool),
    "project": Option(str),
    "entity": Option(str | None),
}
GPU_CHECK = {
    "device": Option(str),
    "families": Option(list[str]),
    "real": Option(list[str]),
    "compile": Option(bool),
    "batch_sizes": Option(list[Positive]),
    "repeats": Option(Positive),
    "minutes": Option(Annotated[float, Field(ge=0)]),
}
SCRIPTS: dict[str, Mapping[str, Option]] = {
    "generate": GENERATE,
    "eval": EVAL,
    "bench": BENCH,
    "calibrate": CALIBRATE,
    "tune": TUNE,
    "train_draft": TRAIN,
    "prepare": PREPARE,
    "report": REPORT,
    "gpu_check": GPU_CHECK,
}
"""By script, the options that it always has."""


def role_of(name: str, config_name: str = "eval") -> Role:
    """What an option of a script is for."""
    options = {**OPTIONAL, **SCRIPTS.get(config_name, {})}
    return options[name].role if name in options else METHOD


def identity_options(cfg: DictConfig) -> dict[str, Any]:
    """The options of an evaluation that its numbers depend on, by name."""
    names = [name for name in map(str, cfg) if Role.IDENTITY in role_of(name)]
    return {
        name: list(cfg[name]) if isinstance(cfg[name], ListConfig) else cfg[name] for name in names
    }


def names_with(role: Role, config_name: str = "eval") -> list[str]:
    """The options of a script that have a role."""
    options = {**OPTIONAL, **SCRIPTS.get(config_name, {})}
    return [name for name, option in options.items() if role in option.role]


def check_options(cfg: DictConfig, config_name: str) -> None:
    """Check the options, and convert their scalars in place: `"7"` becomes 7.

    Raises:
        TemperaError: an option has no value, or one that does not fit its type.
    """
    required = SCRIPTS.get(config_name, {})
    for name, option in {**OPTIONAL, **required}.items():
        group, _, key = name.rpartition(".")
        node = cfg[group] if group else cfg
        if key not in node and name not in OPTIONAL:
            raise TemperaError(f"`{name}` needs a value: give {name}=VALUE", option=name)
        if key not in node or option.kind is None:
            continue
        fit = fitting(value := node[key], option.kind, name)
        if type(fit) is not type(value) and isinstance(fit, bool | int | float | str):
            OmegaConf.update(cfg, name, fit)
