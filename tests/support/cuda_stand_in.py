"""A CPU's stand-in for CUDA graphs: a step's operations, recorded with their memory and repeated
without the Python code that made them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from host_reads import HostReads
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tempera.decoding.round_graph import Recording
from tempera.decoding.timing import PartTimer, no_clock


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Call:
    """One operation: what it was given, what it made, and the storages that it wrote to."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]
    written: list[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        return [part for part in tree_leaves((self.args, self.kwargs)) if isinstance(part, Tensor)]


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to, by its schema."""
    found = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [part for part in tree_leaves(value) if isinstance(part, Tensor)]
    return found


class Tape(HostReads):
    """Records operations as a CUDA graph does: their memory and every number among their arguments
    is that of the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_by(function, args, kwargs)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        call = Call(function, args, kwargs, [], written)
        known = {storage(part) for part in call.inputs}
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and storage(part) not in known:
                call.made.append(part)
                self.own[storage(part)] = part.untyped_storage()
        self.calls.append(call)
        return result

    @torch.inference_mode()
    def replay(self, clock: PartTimer = no_clock) -> None:
        """Repeat the operations. What the last replay left in the tape's own memory is spoilt."""
        for memory in self.own.values():
            memory.fill_(0xFF)  # type: ignore[arg-type]
        for call in self.calls:
            if call.written:
                call.function(*call.args, **call.kwargs)
            elif call.made:
                result = call.function(*call.args, **call.kwargs)
                new = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
                for place, value in zip(call.made, new, strict=True):
                    place.copy_(value)

    def outside(self) -> dict[int, torch.UntypedStorage]:
        """The storages that the operations use and did not make."""
        return {
            storage(part): part.untyped_storage()
            for call in self.calls
            for part in call.inputs
            if storage(part) not in self.own
        }

    def script(self) -> list[Any]:
        """The operations with their constants and shapes, and where their memory is: outside by its
        address, own by the number of the operation that made it.
        """
        made: dict[int, int] = {}
        script = []

        def described(tensor: Tensor) -> tuple[Any, ...]:
            number = storage(tensor)
            where = ("own", made[number]) if number in made else ("outside", tensor.data_ptr())
            return *where, tensor.dtype, tuple(tensor.shape), tensor.stride()

        for number, call in enumerate(self.calls):
            given = tree_map_only(Tensor, described, (call.args, call.kwargs))
            made |= {storage(part): number for part in call.made}
            script.append((str(call.function), given))
        return script


class StandInRecorder:
    """Implements `round_graph.GraphRecorder` with tapes, which it keeps."""

    warm_up = 2
    runs_ahead = True
    times_parts = False

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.played = self.replayed = 0

    def run(self, step: Callable[[PartTimer], None], clock: PartTimer) -> None:
        self.played += 1
        step(clock)

    def record(
        self,
        step: Callable[[PartTimer], None],
        before: Recording | None,
        carried: Sequence[Tensor],
    ) -> Recording:
        with Tape() as tape:
            step(no_clock)
        self.tapes.append(tape)
        return Counted(self, tape)

    def send(self, numbers: Tensor) -> Callable[[], list[list[float]]]:
        return numbers.clone().tolist


class Counted:
    """Counts the replays of a tape."""

    confirmed = True

    def __init__(self, recorder: StandInRecorder, tape: Tape) -> None:
        self.recorder, self.tape = recorder, tape

    def replay(self, clock: PartTimer) -> None:
        self.recorder.replayed += 1
        self.tape.replay()
