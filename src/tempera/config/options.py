"""What the options at the top of the configuration are for. What an option may be is said by the
signature that takes it, and its default by conf/.
"""

from enum import Flag, auto
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import Field

from tempera.config.instantiate import fitting
from tempera.errors import TemperaError

Positive = Annotated[int, Field(ge=1, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


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
    OWN = auto()
    """It is of a script that starts evaluations, and not passed on to them."""


FREE = Role(0)
METHOD = Role.IDENTITY | Role.NAME
"""The role of what decides how images are decoded: of every option that is not in `ROLES`, so of
those of a user's own YAML too.
"""
ROLES: dict[str, Role] = {
    "model": Role.IDENTITY | Role.PAIRED,
    "seed": Role.IDENTITY | Role.PAIRED,
    "dtype": Role.NAME | Role.PAIRED,
    **dict.fromkeys(
        ("guidance", "temperature", "top_k", "top_p", "min_p", "entropy_temperature"),
        METHOD | Role.PAIRED,
    ),
    **dict.fromkeys(
        ("decoding", "draft", "loss", "train_data", "source", "expected_length", "diagnostics"),
        Role.IDENTITY,
    ),
    **dict.fromkeys(("weights", "compile"), Role.NAME),  # their identity is the network's
    **dict.fromkeys(("prompt", "baseline"), FREE),
    **dict.fromkeys(("tracking", "directory", "choices", "overrides"), Role.UNTRACKED),
    **dict.fromkeys(("data", "metrics", "torchmetrics", "speed", "matching", "encoder"), FREE),
    **dict.fromkeys(("family", "pipeline", "paper", "study", "free_parameter", "tokens"), FREE),
    **dict.fromkeys(("path", "statistics", "outputs", "revision", "device"), FREE),
    **dict.fromkeys(("batch_size", "truncate", "limit", "offset", "replays", "scores"), FREE),
    **dict.fromkeys(("against", "verbose", "dry_run", "push_to_hub", "optimized_metric"), FREE),
}
OWN_ROLES: dict[str, dict[str, Role]] = {
    "train_draft": dict.fromkeys(("weights", "dtype", "limit"), Role.IDENTITY),
    "tune": {
        **dict.fromkeys(("budget", "batch_size", "limit", "offset", "repeats", "runs"), Role.OWN),
        **dict.fromkeys(("depths", "trees", "prices", "deltas", "images", "timed"), Role.OWN),
        **dict.fromkeys(("directory", "overrides"), Role.OWN),
    },
}
"""By script, what is for something else there."""
TYPES: dict[str, object] = {
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "device": str,
    "dtype": Literal["auto", "float32", "bfloat16", "float16"],
    "compile": bool | Literal["auto"],
    "batch_size": Positive | Literal["auto"],
    **dict.fromkeys(("truncate", "diagnostics", "verbose", "dry_run"), bool),
    **dict.fromkeys(
        ("prompt", "scores", "against", "start", "push_to_hub", "optimized_metric"), str | None
    ),
    "limit": Annotated[int, Field(ge=1, le=10**7)] | None,  # they are held in memory
    **dict.fromkeys(("offset", "replays"), Count),
    "expected_length": float | None,
    "weights": str,
    "epochs": Annotated[float, Field(gt=0)] | None,
}
"""Of the options that scripts read themselves."""


def role_of(name: str, config_name: str = "eval") -> Role:
    """What an option of a script is for."""
    return OWN_ROLES.get(config_name, {}).get(name, ROLES.get(name, METHOD))


def identity_options(cfg: DictConfig) -> dict[str, Any]:
    """The options of an evaluation that its numbers depend on, by name."""
    names = [name for name in map(str, cfg) if Role.IDENTITY in role_of(name)]
    return {
        name: list(cfg[name]) if isinstance(cfg[name], ListConfig) else cfg[name] for name in names
    }


def names_with(role: Role) -> list[str]:
    """The options with a role."""
    return [name for name, given in ROLES.items() if role in given]


def check_options(cfg: DictConfig) -> None:
    """Check the options that scripts read themselves, and convert them in place: `"7"` becomes 7.

    Raises:
        TemperaError: one does not fit its type.
    """
    for name, kind in TYPES.items():
        if name not in cfg:
            continue
        if OmegaConf.is_missing(cfg, name):
            raise TemperaError(f"`{name}` needs a value: give {name}=VALUE", option=name)
        fit = fitting(value := cfg[name], kind, name)
        if type(fit) is not type(value):
            OmegaConf.update(cfg, name, fit)
