"""The operations of a tape, and what they read and write."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload


class Place(NamedTuple):
    """A tensor that the step made: its storage's number, and what part of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Call:
    """An operation that computes.

    Attributes:
        function, args, kwargs: the operation; tensors that the step made are `Place`s.
        made: its results in new storages.
        part: of the round.
    """

    function: OpOverload
    args: Any
    kwargs: dict[str, Any]
    made: list[Place]
    part: str

    @cached_property
    def name(self) -> str:
        """Of the operation, without its overload."""
        return name_of(self.function)

    @cached_property
    def storages(self) -> set[int]:
        """Numbers of the new storages that it reads or writes."""
        return {place.storage for place in [*self._given, *self.made]}

    @cached_property
    def reads(self) -> set[int]:
        """Numbers of the new storages among its arguments."""
        return {place.storage for place in self._given}

    @cached_property
    def outside(self) -> set[int]:
        """Addresses of the storages among its arguments that the step did not make."""
        return {address_of(tensor) for tensor in tensors_in((*self.args, *self.kwargs.values()))}

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def is_mutable(self) -> bool:
        """Whether it changes an argument."""
        found: bool = self.function._schema.is_mutable
        return found

    @cached_property
    def changed(self) -> list[Any]:
        """The arguments that it changes: `Place`s, and tensors that the step did not make."""
        schema = self.function._schema.arguments
        given = {one.name: value for one, value in zip(schema, self.args, strict=False)}
        given |= self.kwargs
        changed = (one.name for one in schema if one.alias_info and one.alias_info.is_write)
        return parts_of([given.get(name) for name in changed], (Place, Tensor))

    @property
    def written(self) -> set[int]:
        """Numbers of the new storages that it changes."""
        return {one.storage for one in self.changed if isinstance(one, Place)}

    @property
    def written_outside(self) -> set[int]:
        """Addresses of the other storages that it changes."""
        return {address_of(one) for one in self.changed if isinstance(one, Tensor)}

    @cached_property
    def _given(self) -> list[Place]:
        return parts_of([self.args, self.kwargs], Place)

    def script(self) -> Any:
        """The operation, in a form that can be compared."""
        return script_of(self.function, self.args, self.kwargs), self.made, self.part

    def with_storages(self, numbers: dict[int, int]) -> "Call":
        """The same with other storages for those among `numbers`."""
        if self.storages.isdisjoint(numbers):
            return self

        def renamed(place: Place) -> Place:
            return place._replace(storage=numbers.get(place.storage, place.storage))

        return Call(
            self.function,
            mapped(renamed, self.args, Place),
            mapped(renamed, self.kwargs, Place),
            self.made,
            self.part,
        )


def script_of(function: OpOverload, args: Any, kwargs: Any) -> Any:
    """An operation with its arguments in a form that can be compared."""
    return function, mapped(_comparable, [args, kwargs], (Tensor, float))


def _comparable(part: Tensor | float) -> tuple[Any, ...]:
    """Where a tensor lies that the step did not make; a number as text, since NaN differs from
    itself.
    """
    if isinstance(part, float):
        return (repr(part),)
    if not has_storage(part):
        return (id(part),)
    return part.data_ptr(), part.dtype, tuple(part.shape), part.stride()


def name_of(function: OpOverload) -> str:
    """The name of an operation without its overload."""
    name: str = function.overloadpacket.__name__
    return name


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def has_storage(part: Any) -> bool:
    """Whether this is a tensor with memory of its own; weights that oneDNN packed have none."""
    return isinstance(part, Tensor) and part.layout == torch.strided


def tensors_in(parts: Iterable[Any]) -> list[Tensor]:
    """The tensors with storages among arguments or results, and in lists of them."""
    return [one for one in parts_of(list(parts), Tensor) if has_storage(one)]


def parts_of(parts: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """All objects of a kind among arguments."""
    found: list[Any] = []
    mapped(found.append, parts, kind)
    return found


def mapped(change: Callable[[Any], Any], part: Any, kind: type | tuple[type, ...] = Tensor) -> Any:
    """Arguments with each object of a kind changed; they can be lists of lists."""
    if type(part) in (list, tuple):  # a `Place` is a tuple, too
        return [mapped(change, one, kind) for one in part]
    if isinstance(part, dict):
        return {name: mapped(change, one, kind) for name, one in part.items()}
    return change(part) if isinstance(part, kind) else part
