"""What a compiled graph takes for constants of the networks that it was made from.

A graph of a network is made once, and its weights are inputs. Everything else of the network is a
constant: its modules, their options and hooks, and shape and dtype of its weights. PyTorch looks at
all of it at every call, which takes longer than most rounds (6,859 guards for 36 layers). Compiled
rounds leave these guards out, and look at the networks once a batch: for each `Structure` there is
another graph.
"""

import functools
import itertools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
CODE = types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType


class Structure:
    """All that an object's networks are, but for the numbers in their weights. Two are equal if a
    graph of the one is a graph of the other.

    Args:
        owner: the object; its networks are the modules that it reaches.

    Attributes:
        modules: of its networks; they are not kept alive.
    """

    def __init__(self, owner: object) -> None:
        self.modules = weakref.WeakSet[nn.Module]()
        self._said: list[Any] = []
        seen: dict[int, tuple[int, object]] = {}  # by address, so they are held meanwhile
        for root in _roots(owner):
            self._describe(root, seen)
        self._key: Hashable = tuple(self._said)
        self._hash = hash(self._key)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    @override
    def __hash__(self) -> int:
        return self._hash

    def _describe(self, x: Any, seen: dict[int, tuple[int, object]]) -> None:
        """Say what x is, by value: the same of objects that differ in nothing but weights."""
        kind = type(x)
        self._said.append(kind)  # 1 is not True
        if isinstance(x, CONSTANTS):
            self._said.append(x)
        elif id(x) in seen:
            self._said.append(seen[id(x)][0])
        else:
            seen[id(x)] = len(seen), x
            if isinstance(x, nn.Module):
                self.modules.add(x)
            parts = list(_parts(x))
            self._said.append(len(parts))
            for part in parts:
                self._describe(part, seen)


def _parts(x: Any) -> Iterable[Any]:
    """What a graph of an object depends on."""
    if isinstance(x, Tensor):
        strides = x.stride() if x.layout == torch.strided else ()
        # PyTorch marks the parameters that it has compiled
        own = [value for name, value in vars(x).items() if not name.startswith("_dynamo")]
        return x.dtype, x.device, *x.shape, *strides, x.requires_grad, *own
    if isinstance(x, dict):
        return itertools.chain.from_iterable(x.items())
    if isinstance(x, list | tuple | set | frozenset):
        return x
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, types.FunctionType):
        return x.__code__, x.__defaults__, *map(_content, x.__closure__ or ())
    if isinstance(x, types.CodeType):
        return x.co_filename, x.co_firstlineno, x.co_code, x.co_consts
    if isinstance(x, nn.Module):
        return type(x).forward, *_attributes(x)
    return vars(x).items() if hasattr(x, "__dict__") else ()


def _attributes(module: nn.Module) -> Iterator[Any]:
    """A module's attributes but for hooks that no call of it runs."""
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            if value and "state_dict" not in name:
                yield name
                yield from value.values()  # numbered in the order of their registration
        else:
            yield name
            yield value


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _roots(owner: object) -> list[nn.Module]:
    """The modules that an object reaches through attributes and containers, and no other module."""
    found: list[nn.Module] = []
    seen: dict[int, object] = {}
    left = [owner]
    while left:
        x = left.pop()
        if isinstance(x, (*CONSTANTS, Tensor, *CODE)) or id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, nn.Module):
            found.append(x)
        else:
            left += reversed(list(_parts(x)))
    return found
