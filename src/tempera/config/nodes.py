"""Nodes of a configuration in plain Python."""

from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.base import Container


def plain(node: Container, *, resolve: bool = False) -> dict[str, Any]:
    """The values of a node in dictionaries and lists, with interpolations as they are written
    unless they are to be resolved.
    """
    return cast("dict[str, Any]", OmegaConf.to_container(node, resolve=resolve))
