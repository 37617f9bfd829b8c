"""Fewer operations on a tape, with the same results to the bit: constants are made once; an
operation that repeats an earlier one is left out, as is one whose result nothing reads; and what is
copied to static memory is made there.

Two tensors that the step did not make share memory if their storages begin at the same address.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tempera.decoding.tape_calls import Call, Place, address_of, has_storage

_FILLED = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
"""Operations that read the shapes of tensors alone."""


@dataclass(frozen=True)
class ShortTape:
    """What remains of a step.

    Attributes:
        calls: operations of every replay.
        once: operations that make constants.
        constants: numbers of the new storages that hold these.
        elsewhere: numbers of the new storages that lie in memory that the step did not make, and
            that memory.
    """

    calls: list[Call]
    once: list[Call]
    constants: set[int]
    elsewhere: dict[int, Tensor]


def shortened(calls: Sequence[Call], sizes: Sequence[int], carried: Sequence[Tensor]) -> ShortTape:
    """Shorten a step.

    Args:
        calls: its operations.
        sizes: bytes of each storage that they make.
        carried: memory whose numbers change between steps; what the step itself writes to need not
            be named. All other memory that the step did not make holds constants.
    """
    written = set[int]().union(*(call.written for call in calls))
    written_outside = set[int]().union(*(call.written_outside for call in calls))
    changing = written_outside | {address_of(tensor) for tensor in carried}
    constants = _constants(calls, written, changing)
    once = [call for call in calls if _only_makes(call, constants)]
    rest = [call for call in calls if not _only_makes(call, constants)]
    rest = _used(_without_repeats(rest, written, written_outside))
    rest, elsewhere = _made_in_place(rest, sizes, constants)
    read = set[int]().union(*(call.storages for call in rest))
    once = _used(once, read)
    return ShortTape(rest, once, constants, elsewhere)


def _constants(
    calls: Sequence[Call], written: Collection[int], changing: Collection[int]
) -> set[int]:
    """The new storages that hold the same numbers in every replay: what makes them reads constants
    alone, and nothing else writes to them.

    Args:
        calls: of the step.
        written: the new storages that it writes to.
        changing: addresses of the other storages whose numbers change.
    """
    constants: set[int] = set()
    for call in calls:
        made = {place.storage for place in call.made}
        if made.isdisjoint(written) and _is_constant(call, constants, changing):
            constants |= made
    return constants


def _is_constant(call: Call, constants: set[int], changing: Collection[int]) -> bool:
    """Whether an operation makes the same in every replay."""
    if call.name in _FILLED:
        return True
    changes = call.is_random or not call.outside.isdisjoint(changing)
    return constants.issuperset(call.reads) and not changes


def _only_makes(call: Call, constants: Collection[int]) -> bool:
    return bool(call.made) and all(place.storage in constants for place in call.made)


def _without_repeats(
    calls: Sequence[Call], written: Collection[int], written_outside: Collection[int]
) -> list[Call]:
    """Without operations that make what an earlier one has made, of memory that the step does not
    write to.
    """
    first: dict[str, Call] = {}
    same: dict[int, int] = {}
    kept = []
    for given in calls:
        call = given.with_storages(same)
        steady = call.storages.isdisjoint(written) and call.outside.isdisjoint(written_outside)
        if call.made and steady and not call.is_random:
            shapes = [place._replace(storage=-1) for place in call.made]
            earlier = first.setdefault(repr((call.script()[0], shapes)), call)
            if earlier is not call:
                pairs = zip(call.made, earlier.made, strict=True)
                same |= {mine.storage: theirs.storage for mine, theirs in pairs}
                continue
        kept.append(call)
    return kept


def _used(calls: Sequence[Call], read: Collection[int] = ()) -> list[Call]:
    """Without operations whose results nothing reads.

    Args:
        calls: operations.
        read: new storages that are read after them.
    """
    needed, kept = set(read), list[Call]()
    for call in reversed(calls):
        results = call.written | {place.storage for place in call.made}
        if call.written_outside or call.is_random or not needed.isdisjoint(results):
            needed |= call.storages
            kept.append(call)
    return kept[::-1]


def _made_in_place(
    calls: Sequence[Call], sizes: Sequence[int], constants: Collection[int]
) -> tuple[list[Call], dict[int, Tensor]]:
    """Without copies of whole new storages to other memory, which holds the storage from the start
    instead, provided that nothing touches that memory before the copy, or changes it or the storage
    afterwards.
    """
    begins: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number in call.storages:
            begins.setdefault(number, index)
    elsewhere: dict[int, Tensor] = {}
    kept = []
    for index, call in enumerate(calls):
        pair = _whole_copy(call, sizes)
        if pair is not None and pair[0].storage not in {*constants, *elsewhere}:
            place, memory = pair
            address = address_of(memory)
            before, after = calls[begins[place.storage] : index], calls[index + 1 :]
            touched = any(address in other.outside for other in before)
            changed = any(
                address in other.written_outside or place.storage in other.written
                for other in after
            )
            if not touched and not changed:
                elsewhere[place.storage] = memory
                continue
        kept.append(call)
    return kept, elsewhere


def _whole_copy(call: Call, sizes: Sequence[int]) -> tuple[Place, Tensor] | None:
    """The new storage that an operation copies as a whole, and the memory that it copies it to;
    None if it does something else.
    """
    if call.name != "copy_":
        return None
    memory, place = call.args[:2]
    if not (isinstance(place, Place) and has_storage(memory)):
        return None
    whole = memory.storage_offset() == 0 and memory.nbytes == sizes[place.storage]
    like: Any = (memory.dtype, tuple(memory.shape), memory.stride(), 0)
    return (place, memory) if whole and tuple(place[1:]) == like else None
