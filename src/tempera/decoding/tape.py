"""Rounds recorded on a CPU: a tape repeats the operations of a step without the code that made
them.

In a round of a small model, Python and operations that only make views take as much time as those
that compute. A tape keeps the latter alone. Each of them writes its result where the recorded one
lay, so that views exist already and nothing is allocated. Results are the same to the bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.round_graph import Recording
from tempera.decoding.timing import PartTimer

ALIGNMENT = 64
"""Bytes that addresses are multiples of, as PyTorch's own are."""

_READS = {"item", "is_nonzero", "equal", "_local_scalar_dense"}
_INDEXING = {"index", "index_put", "index_put_"}
_BLANK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FILLED = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}

_MODULES = (torch, Tensor, torch._C._nn, torch._C._linalg)  # type: ignore[attr-defined]
"""Where PyTorch's Python functions are."""

_NAMED: dict[tuple[OpOverload, str], Callable[..., Any]] = {}
"""What calls an operation with arguments of some kinds; see `_bound`."""


class TapeRecorder:
    """Records steps on a CPU as tapes. Implements `round_graph.GraphRecorder`."""

    warm_up = 8
    """Fewer plays would be enough; recordings cost time, which rare kinds of rounds do not earn."""
    runs_ahead = False
    times_parts = True

    def __init__(self) -> None:
        self._memory = torch.UntypedStorage(0)

    def run(self, step: Callable[[PartTimer], None], clock: PartTimer) -> None:
        """Run a step."""
        step(clock)

    def record(self, step: Callable[[PartTimer], None], before: Recording | None) -> "Tape | None":
        """Run a step and record it; None if it cannot be repeated. That is so if it reads numbers
        or its shapes depend on them, or if an earlier tape had other operations, constants or
        addresses: then a Python value changes from step to step, or some memory is not static.
        """
        with _Copies() as copies, _Listener() as heard:
            step(heard.part)
        tape = Tape(heard.calls, heard.sizes, self._room, confirmed=before is not None)
        agrees = not isinstance(before, Tape) or tape.script() == before.script()
        return tape if heard.repeats and agrees and not copies.made else None

    def send(self, numbers: Tensor) -> Callable[[], list[int]]:
        """The numbers; nothing has to be waited for."""
        found: list[int] = numbers.tolist()
        return lambda: found

    def _room(self, size: int) -> torch.UntypedStorage:
        """Memory of at least this many bytes, which tapes share, since they never run at the same
        time. If it grows, earlier tapes keep what they have.
        """
        if size > self._memory.nbytes():
            self._memory = torch.UntypedStorage(size)
        return self._memory


class Tape:
    """A recorded step.

    Args:
        calls: its operations.
        sizes: bytes of each storage that they make.
        room: gives memory for these.
        confirmed: see `round_graph.Recording`.
    """

    def __init__(
        self,
        calls: list["_Call"],
        sizes: list[int],
        room: Callable[[int], torch.UntypedStorage],
        confirmed: bool,
    ) -> None:
        self._calls, self._sizes, self._room = calls, sizes, room
        self.confirmed = confirmed

    def script(self) -> list[Any]:
        """The operations with their constants, and with addresses in place of tensors."""
        return [
            (_script(call.function, call.args, call.kwargs), call.made, call.part)
            for call in self._calls
        ]

    @torch.inference_mode()
    def replay(self, clock: PartTimer) -> None:
        """Repeat the operations."""
        for part, calls in self._parts:
            with clock(part):
                for call in calls:
                    call()

    @cached_property
    def _parts(self) -> list[tuple[str, list[Callable[[], Any]]]]:
        """The operations with their memory, by part of the round. Those that make constants run
        here, once.
        """
        constants = _constants(self._calls)
        own = {number: torch.UntypedStorage(self._sizes[number]) for number in constants}
        calls = [call for call in self._calls if not _only_makes(call, constants)]
        offsets, size = _plan(calls, self._sizes, constants)
        memory = self._room(size)

        @lru_cache(None)
        def tensor(place: _Place) -> Tensor:
            storage = own.get(place.storage, memory)
            first = offsets.get(place.storage, 0) // place.dtype.itemsize + place.offset
            blank = torch.empty(0, dtype=place.dtype)
            return blank.set_(storage, first, place.size, place.stride)

        for call in self._calls:
            if _only_makes(call, constants):
                _repeated(call, tensor)()
        return [
            (part, [_repeated(call, tensor) for call in some])
            for part, some in groupby(calls, lambda call: call.part)
        ]


class _Place(NamedTuple):
    """A tensor that the step made: its storage's number, and what part of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Call:
    """An operation that computes.

    Attributes:
        function, args, kwargs: the operation; tensors that the step made are `_Place`s.
        made: its results in new storages.
        storages: numbers of the new storages that it reads or writes.
        part: of the round.
    """

    function: OpOverload
    args: Any
    kwargs: dict[str, Any]
    made: list[_Place]
    storages: set[int]
    part: str


class _Copies(TorchFunctionMode):
    """Whether numbers were copied to Python or NumPy, which is no operation of PyTorch's."""

    made = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.made |= function in (Tensor.tolist, Tensor.numpy, Tensor.__array__)
        return function(*args, **(kwargs or {}))


class _Listener(TorchDispatchMode):
    """Notes the operations of a step that compute, while they run.

    Attributes:
        calls: the operations.
        sizes: bytes of each new storage.
        repeats: whether repeating the operations repeats the step. False once the host has read a
            number, or a shape has depended on one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.sizes: list[int] = []
        self.repeats = True
        self._part = ""
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A `PartTimer` that notes which operations belong to a part."""
        before, self._part = self._part, name
        yield
        self._part = before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.repeats &= not _reads(function, args)
        given = {_storage(part) for part in _tensors((*args, *kwargs.values()))}
        results = _tensors((result,))
        made = [part for part in results if _storage(part) not in given]
        writes = function._schema.is_mutable
        self.repeats &= writes or len(made) in (0, len(results))
        if _name(function) in _BLANK:
            for blank in made:
                self._place(blank)
        elif writes or made:
            self._keep(function, args, kwargs, made)
        return result

    def _keep(self, function: OpOverload, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        found: list[_Place] = []

        def described(tensor: Tensor) -> Tensor | _Place:
            if not _has_storage(tensor) or _storage(tensor) not in self._numbers:
                return tensor
            found.append(self._place(tensor))
            return found[-1]

        args, kwargs = _mapped(described, args), _mapped(described, kwargs)
        results = [self._place(part) for part in made]
        storages = {place.storage for place in found + results}
        self.calls.append(_Call(function, args, kwargs, results, storages, self._part))

    def _place(self, tensor: Tensor) -> _Place:
        """Where a tensor lies that the step made."""
        address = _storage(tensor)
        if address not in self._numbers:
            storage = tensor.untyped_storage()
            # the reference keeps another storage from getting the same address
            reference = StorageWeakRef(storage)
            self._numbers[address] = len(self.sizes), reference
            self.sizes.append(storage.nbytes())
        return _Place(
            self._numbers[address][0],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )


def _constants(calls: list[_Call]) -> set[int]:
    """The new storages that hold the same numbers in every replay: what makes them reads constants
    alone, and nothing else writes to them.
    """
    written = set[int]().union(*map(_written, calls))
    constants: set[int] = set()
    for call in calls:
        made = {place.storage for place in call.made}
        if made.isdisjoint(written) and _is_constant(call, constants | made):
            constants |= made
    return constants


def _is_constant(call: _Call, constants: set[int]) -> bool:
    """Whether an operation makes the same in every replay."""
    if _name(call.function) in _FILLED:  # reads shapes alone
        return True
    outside = _tensors((*call.args, *call.kwargs.values()))
    random = torch.Tag.nondeterministic_seeded in call.function.tags
    return constants.issuperset(call.storages) and not outside and not random


def _writes(call: _Call) -> bool:
    is_mutable: bool = call.function._schema.is_mutable
    return is_mutable


def _written(call: _Call) -> set[int]:
    """The new storages that an operation changes."""
    schema = call.function._schema.arguments
    given = {one.name: value for one, value in zip(schema, call.args, strict=False)} | call.kwargs
    changed = (one.name for one in schema if one.alias_info and one.alias_info.is_write)
    parts = [given.get(name) for name in changed]
    found: set[int] = set()
    _mapped(lambda place: found.add(place.storage), parts, _Place)
    return found


def _only_makes(call: _Call, constants: set[int]) -> bool:
    return bool(call.made) and all(place.storage in constants for place in call.made)


def _plan(calls: list[_Call], sizes: list[int], constants: set[int]) -> tuple[dict[int, int], int]:
    """Where each new storage that is no constant lies in one memory, by its number, and the size of
    that memory, in bytes. Storages share a place if one is no longer used when the other is first
    used.
    """
    used = [call.storages - constants for call in calls]
    last = {number: index for index, numbers in enumerate(used) for number in numbers}
    free: dict[int, list[int]] = defaultdict(list)
    offsets: dict[int, int] = {}
    end = 0
    for index, numbers in enumerate(used):
        for number in numbers - offsets.keys():
            size = -(-sizes[number] // ALIGNMENT) * ALIGNMENT
            if free[size]:
                offsets[number] = free[size].pop()
            else:
                offsets[number], end = end, end + size
        for number in numbers:
            if last[number] == index:
                free[-(-sizes[number] // ALIGNMENT) * ALIGNMENT].append(offsets[number])
    return offsets, end


def _repeated(call: _Call, tensor: Callable[[_Place], Tensor]) -> Callable[[], Any]:
    """A function that repeats an operation."""
    args, kwargs = _mapped(tensor, call.args, _Place), _mapped(tensor, call.kwargs, _Place)
    made = [tensor(place) for place in call.made]
    if _writes(call):
        return _bound(call.function, args, kwargs)
    found = _writing(call.function)
    if found is not None:
        variant, names = found
        return _bound(variant, args, {**kwargs, **dict(zip(names, made, strict=True))})
    results = _bound(call.function, args, kwargs)
    return (lambda: made[0].copy_(results())) if len(made) == 1 else partial(_copied, results, made)


def _bound(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """A call of an operation. PyTorch's Python functions take half of the time of `OpOverload`s to
    find out what they are given, but choose the overload themselves.
    """
    kinds = function, str(_mapped(_kind, [args, kwargs], object))
    if kinds not in _NAMED:
        _NAMED[kinds] = _named(function, args, kwargs) or function._op
    return partial(_NAMED[kinds], *args, **kwargs)


def _named(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """PyTorch's Python function that chooses this operation for such arguments, if there is one."""
    for module in _MODULES:
        named: Callable[..., Any] | None = getattr(module, _name(function), None)
        with _Ear() as ear, suppress(_HeardError, TypeError):
            if named is not None:
                named(*args, **kwargs)
        if ear.heard == _script(function, args, kwargs):
            return named
    return None


def _kind(part: Any) -> Any:
    """What Python functions choose an overload by: the types of arguments; a tensor without
    dimensions can stand for a number.
    """
    return type(part), isinstance(part, Tensor) and part.dim() == 0


class _HeardError(Exception):
    """Keeps an operation from running."""


class _Ear(TorchDispatchMode):
    """Hears which operation is called, and with what; it does not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: Any = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.heard = _script(function, args, kwargs or {})
        raise _HeardError


def _script(function: OpOverload, args: Any, kwargs: Any) -> Any:
    """An operation with its arguments in a form that can be compared."""
    return function, _mapped(_comparable, [args, kwargs], (Tensor, float))


def _copied(function: Callable[[], Any], places: list[Tensor]) -> None:
    """Copy the results of an operation to their places."""
    for place, value in zip(places, _tensors(function()), strict=True):
        place.copy_(value)


@lru_cache(None)
def _writing(function: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The variant of an operation that writes its results to given tensors, and their names; None
    if there is none.
    """
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        variant = getattr(function.overloadpacket, name)
        arguments = variant._schema.arguments
        out = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
        rest = [(one.name, str(one.type)) for one in arguments if one.name not in out]
        # generated variants copy, too, but slowly
        made_for_it = torch.Tag.generated not in variant.tags
        if made_for_it and rest == wanted and len(out) == len(function._schema.returns):
            return variant, out
    return None


def _reads(function: OpOverload, args: Any) -> bool:
    """Whether the host must know the result of an operation before it can go on."""
    name = _name(function)
    if name in _INDEXING:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return name in _READS or torch.Tag.dynamic_output_shape in function.tags


def _name(function: OpOverload) -> str:
    name: str = function.overloadpacket.__name__
    return name


def _comparable(part: Tensor | float) -> tuple[Any, ...]:
    """Where a tensor lies that the step did not make; a number as text, since NaN differs from
    itself.
    """
    if isinstance(part, float):
        return (repr(part),)
    if not _has_storage(part):
        return (id(part),)
    return part.data_ptr(), part.dtype, tuple(part.shape), part.stride()


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _has_storage(part: Any) -> bool:
    """Whether this is a tensor with memory of its own; weights that oneDNN packed have none."""
    return isinstance(part, Tensor) and part.layout == torch.strided


def _tensors(parts: Iterable[Any]) -> list[Tensor]:
    """The tensors with storages among arguments or results, and in lists of them."""
    found = []
    for part in parts:
        if _has_storage(part):
            found.append(part)
        elif isinstance(part, list | tuple):
            found += [one for one in part if _has_storage(one)]
    return found


def _mapped(change: Callable[[Any], Any], part: Any, kind: type | tuple[type, ...] = Tensor) -> Any:
    """Arguments with each object of a kind changed; they can be lists of lists."""
    if type(part) in (list, tuple):  # a `_Place` is a tuple, too
        return [_mapped(change, one, kind) for one in part]
    if isinstance(part, dict):
        return {name: _mapped(change, one, kind) for name, one in part.items()}
    return change(part) if isinstance(part, kind) else part
