"""Heads of published scores that are a chain of linear layers."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tempera.metrics.weights import filled, not_of


def linear_chain(state: Mapping[str, Tensor], prefix: str, path: Path, what: str) -> nn.Module:
    """A chain of linear layers, from a checkpoint whose numbering also counts the dropout layers
    between them.

    Args:
        state: tensors by name.
        prefix: the part of the names before the layers' numbers.
        path: the file that they come from, for errors.
        what: what the weights should be, for errors.
    """
    numbers = sorted(
        int(name[len(prefix) : -len(".weight")])
        for name in state
        if name.startswith(prefix) and name.endswith(".weight")
    )
    if not numbers:
        raise not_of(path, what, f"it has no {prefix}0.weight")

    def make() -> nn.Module:
        sizes = [state[f"{prefix}{number}.weight"].shape for number in numbers]
        return nn.Sequential(*(nn.Linear(size[1], size[0]) for size in sizes))

    own = {
        f"{place}.{kind}": state[f"{prefix}{number}.{kind}"]
        for place, number in enumerate(numbers)
        for kind in ("weight", "bias")
    }
    return filled(make, own, path, what)
