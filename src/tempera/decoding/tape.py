"""Rounds recorded on a CPU: a tape repeats the operations of a step without the code that made
them.

In a round of a small model, Python and operations that only make views take as much time as those
that compute. A tape keeps the latter alone. Each of them writes its result where the recorded one
lay, so that views exist already and nothing is allocated. Results are the same to the bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.round_graph import Recording
from tempera.decoding.tape_calling import repeated
from tempera.decoding.tape_calls import (
    Call,
    Place,
    has_storage,
    mapped,
    name_of,
    storage_of,
    tensors_in,
)
from tempera.decoding.tape_shortening import ShortTape, shortened
from tempera.decoding.timing import PartTimer

ALIGNMENT = 64
"""Bytes that addresses are multiples of, as PyTorch's own are."""

_READS = {"item", "is_nonzero", "equal", "_local_scalar_dense"}
_INDEXING = {"index", "index_put", "index_put_"}
_BLANK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


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

    def record(
        self,
        step: Callable[[PartTimer], None],
        before: Recording | None,
        carried: Sequence[Tensor],
    ) -> "Tape | None":
        """Run a step and record it; None if it cannot be repeated. That is so if it reads numbers
        or its shapes depend on them, or if an earlier tape had other operations, constants or
        addresses: then a Python value changes from step to step, or some memory is not static.
        """
        with _Copies() as copies, _Listener() as heard:
            step(heard.part)
        tape = Tape(heard.calls, heard.sizes, carried, self._room, confirmed=before is not None)
        agrees = not isinstance(before, Tape) or tape.script() == before.script()
        return tape if heard.repeats and agrees and not copies.made else None

    def send(self, numbers: Tensor) -> Callable[[], list[list[float]]]:
        """The numbers; nothing has to be waited for."""
        found: list[list[float]] = numbers.tolist()
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
        carried: see `tape_shortening.shortened`.
        room: gives memory for these.
        confirmed: see `round_graph.Recording`.
    """

    def __init__(
        self,
        calls: list[Call],
        sizes: list[int],
        carried: Sequence[Tensor],
        room: Callable[[int], torch.UntypedStorage],
        confirmed: bool,
    ) -> None:
        self._calls, self._sizes, self._carried, self._room = calls, sizes, carried, room
        self.confirmed = confirmed

    def script(self) -> list[Any]:
        """The operations with their constants, and with addresses in place of tensors."""
        return [call.script() for call in self._calls]

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
        short = shortened(self._calls, self._sizes, self._carried)
        own = {number: torch.UntypedStorage(self._sizes[number]) for number in short.constants}
        own |= {number: there.untyped_storage() for number, there in short.elsewhere.items()}
        offsets, size = _plan(short, self._sizes)
        memory = self._room(size)

        @lru_cache(None)
        def tensor(place: Place) -> Tensor:
            storage = own.get(place.storage, memory)
            first = offsets.get(place.storage, 0) // place.dtype.itemsize + place.offset
            blank = torch.empty(0, dtype=place.dtype)
            return blank.set_(storage, first, place.size, place.stride)

        for call in short.once:
            repeated(call, tensor)()
        return [
            (part, [repeated(call, tensor) for call in some])
            for part, some in groupby(short.calls, lambda call: call.part)
        ]


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
        self.calls: list[Call] = []
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
        given = {storage_of(part) for part in tensors_in((*args, *kwargs.values()))}
        results = tensors_in((result,))
        made = [part for part in results if storage_of(part) not in given]
        writes = function._schema.is_mutable
        self.repeats &= writes or len(made) in (0, len(results))
        if name_of(function) in _BLANK:
            for blank in made:
                self._place(blank)
        elif writes or made:
            self._keep(function, args, kwargs, made)
        return result

    def _keep(self, function: OpOverload, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        def described(tensor: Tensor) -> Tensor | Place:
            own = has_storage(tensor) and storage_of(tensor) in self._numbers
            return self._place(tensor) if own else tensor

        args, kwargs = mapped(described, args), mapped(described, kwargs)
        results = [self._place(part) for part in made]
        self.calls.append(Call(function, args, kwargs, results, self._part))

    def _place(self, tensor: Tensor) -> Place:
        """Where a tensor lies that the step made."""
        address = storage_of(tensor)
        if address not in self._numbers:
            storage = tensor.untyped_storage()
            # the reference keeps another storage from getting the same address
            reference = StorageWeakRef(storage)
            self._numbers[address] = len(self.sizes), reference
            self.sizes.append(storage.nbytes())
        return Place(
            self._numbers[address][0],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )


def _plan(short: ShortTape, sizes: list[int]) -> tuple[dict[int, int], int]:
    """Where each new storage lies in one memory, by its number, and the size of that memory, in
    bytes. Storages share a place if one is no longer used when the other is first used.
    """
    used = [call.storages - short.constants - short.elsewhere.keys() for call in short.calls]
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


def _reads(function: OpOverload, args: Any) -> bool:
    """Whether the host must know the result of an operation before it can go on."""
    name = name_of(function)
    if name in _INDEXING:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return name in _READS or torch.Tag.dynamic_output_shape in function.tags
