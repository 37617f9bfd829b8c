"""What the options at the top of the configuration are for. What an option may be is said by the
signature that takes it, and its default by conf/.
"""

from enum import Flag, auto
from typing import Any

from omegaconf import DictConfig, ListConfig


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
