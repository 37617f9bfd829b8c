"""Heads of published scores that are linear layers one after the other."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tempera.metrics.weights import filled, not_of


def linear_chain(state: Mapping[str, Tensor], prefix: str, path: Path, what: str) -> nn.Module:
    """Linear layers one after the other, from a checkpoint that numbers them with the dropouts in
    between.

    Args:
        state: tensors by name.
        prefix: before the layers' numbers.
        path: the file they are from.
        what: whose weights they should be, for errors.
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
