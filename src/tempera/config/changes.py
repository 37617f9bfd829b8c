"""What a run changes in its method's preset. Runs are named by it."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tempera.config.compose import composed
from tempera.config.nodes import plain
from tempera.config.options import Role, role_of

GROUPS = ("drafter", "tree", "rule", "schedule")
"""Hydra groups of a method, in the order in which one can bring in the next."""


def changes(cfg: DictConfig, choices: Mapping[str, str | None]) -> dict[str, Any]:
    """Every choice and value in which a run differs from what `method=X` composes on its model.

    Args:
        cfg: the run's configuration, of conf/eval.yaml.
        choices: Hydra's choice in each group; without one of `method` nothing can be compared.

    Returns:
        Choices by group, and values by option, such as {"drafter": "sjd", "floor": 1}.
    """
    if not choices.get("method"):
        return {}
    options = [f"{group}={choices[group]}" for group in ("model", "method") if choices.get(group)]
    usual = composed("eval", options)
    found: dict[str, Any] = {}
    for group in GROUPS:
        chosen = choices.get(group)
        if chosen and chosen != usual.choices.get(group):
            found[group] = chosen
            options.append(f"{group}={chosen}" if group in usual.choices else f"+{group}={chosen}")
            usual = composed("eval", options)
    before = dict(_leaves(usual))
    for name, value in _leaves(cfg):
        if name not in before or before[name] != value:
            now = OmegaConf.select(cfg, name)
            if name not in before or OmegaConf.select(usual, name) != now:
                found[name] = OmegaConf.to_container(now) if OmegaConf.is_config(now) else now
    return found


def _leaves(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """The options that runs are named by, and the values in the nodes of which this is true,
    interpolations unresolved.
    """
    for name, value in plain(cfg).items():
        if Role.NAME in role_of(name):
            if isinstance(value, dict):
                yield from _inside(name, value)
            else:
                yield name, value


def _inside(name: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _inside(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", value
