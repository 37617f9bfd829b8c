"""A whole round as one graph.

From the second round of a batch on, all rounds of a static draft are the same operations. They are
recorded once and then replayed, without the Python code that launches them one by one. What one
round leaves for the next lies in static memory: every round ends by writing there. A GPU runs
ahead: the host reads a round's result while the next one already runs. The round that runs after
the last one changes nothing, because complete rows emit no tokens.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tempera.decoding.interfaces import RoundState
from tempera.decoding.timing import PartTimer, no_clock

KINDS = 64
"""How many kinds of rounds are kept; the oldest is forgotten first."""

OneRound = Callable[[PartTimer], Tensor]
"""Plays a round; returns what the host reads after it, [M, B]."""

Read = Callable[[list[list[float]]], tuple[int, int]]
"""Turns that into the number of tokens over all rows and that of the longest row. May raise."""


class Recording(Protocol):
    """A recorded step.

    Attributes:
        confirmed: whether it may be replayed. If not, the next step is recorded as well, and the
            two are compared.
    """

    confirmed: bool

    def replay(self, clock: PartTimer) -> None:
        """Repeat the step's operations on the same memory."""


class GraphRecorder(Protocol):
    """Records steps on a device: `tape.TapeRecorder` on a CPU, `targets.compiled.CudaRecorder` on a
    GPU.

    Attributes:
        warm_up: how often a kind of round is played before it is recorded, at least twice: what is
            made only once, such as a compiled kernel or a table of the tree, is there by then.
        runs_ahead: whether the next step starts before the numbers of the last one are read.
        times_parts: whether replayed steps can be timed part by part.
    """

    warm_up: int
    runs_ahead: bool
    times_parts: bool

    def run(self, step: Callable[[PartTimer], None], clock: PartTimer) -> None:
        """Run a step as it will be recorded, timed by the clock if `times_parts`."""

    def record(
        self,
        step: Callable[[PartTimer], None],
        before: Recording | None,
        carried: Sequence[Tensor],
    ) -> Recording | None:
        """Run a step and record it; None if it cannot be repeated.

        Args:
            step: see `run`.
            before: the recording of an earlier step of this kind that was not confirmed.
            carried: the memory whose numbers change between steps, apart from what the step itself
                writes to.
        """

    def send(self, numbers: Tensor) -> Callable[[], list[list[float]]]:
        """Start to copy numbers, [M, B], to the host; the function returned waits for them."""


@dataclass(frozen=True)
class BatchSize:
    """The rows of a batch, the tokens of an image, and the most tokens a row emits in a round."""

    rows: int
    length: int
    most: int


@dataclass
class _Kind:
    """Rounds that are the same operations on the same memory. owners: the objects whose ids name
    it; played: how often it was played before it was recorded; repeats: whether it can be recorded,
    as far as is known.
    """

    owners: tuple[object, ...]
    played: int = 0
    repeats: bool = True
    recording: Recording | None = None


class RoundGraphs:
    """Records the rounds of a method and replays them, also in later batches.

    Args:
        recorder: records on the device.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self._kinds: dict[Hashable, _Kind] = {}
        self._memory: dict[Hashable, list[Tensor]] = {}

    def can_time(self, clock: PartTimer) -> bool:
        """Whether the clock can time the parts of recorded rounds; `no_clock` needs nothing."""
        return clock is no_clock or self.recorder.times_parts

    def play(
        self,
        one_round: OneRound,
        read: Read,
        parts: Sequence[RoundState],
        owners: tuple[object, ...],
        size: BatchSize,
        clock: PartTimer = no_clock,
    ) -> Iterator[int]:
        """Play rounds until all images are complete; yields the number of tokens written after each
        of them.

        Args:
            one_round: plays a round of this batch.
            read: reads what it returned.
            parts: all that carries something from round to round.
            owners: what else defines a round, such as drafter and rule.
            size: of the batch.
            clock: times the parts of rounds, if the recorder can.
        """
        report = self._first(one_round, parts, clock)
        written, longest = read(self.recorder.send(report)())
        yield written
        memory = self._static(parts, report)
        sent: Callable[[], list[list[float]]] | None = None
        while written < size.rows * size.length:
            reach = longest if sent is None else min(size.length, longest + size.most)
            self._play(one_round, parts, owners, memory, reach, clock)
            if sent is not None:
                written, longest = read(sent())
                yield written
            sent = self.recorder.send(memory[-1])
            if not self.recorder.runs_ahead:
                written, longest = read(sent())
                yield written
                sent = None

    def _first(self, one_round: OneRound, parts: Sequence[RoundState], clock: PartTimer) -> Tensor:
        """Play the first round of a batch, which differs from the others."""
        reports: list[Tensor] = []
        for part in parts:
            part.expect(0)
        self.recorder.run(lambda clock: reports.append(one_round(clock)), clock)
        return reports[0]

    def _static(self, parts: Sequence[RoundState], report: Tensor) -> list[Tensor]:
        """Move what the parts carry to static memory, which serves all batches with tensors of
        these shapes; returns it, and at the end memory for a round's report.
        """
        values = [*(value for part in parts for value in part.carried()), report]
        shapes = tuple((value.shape, value.dtype) for value in values)
        if shapes not in self._memory:
            with torch.inference_mode(False):  # for writes in any mode
                self._memory[shapes] = [*map(torch.empty_like, values)]
        memory = self._memory[shapes]
        _keep(parts, memory)
        return memory

    def _play(
        self,
        one_round: OneRound,
        parts: Sequence[RoundState],
        owners: tuple[object, ...],
        memory: list[Tensor],
        longest: int,
        clock: PartTimer,
    ) -> None:
        """Play a round before which no row has more than `longest` tokens."""

        def step(clock: PartTimer) -> None:
            report = one_round(clock)
            with clock("commit"):
                memory[-1].copy_(report)
                _keep(parts, memory)

        expected = tuple(part.expect(longest) for part in parts)
        key = (id(memory), *map(id, owners), expected)
        kind = self._kind(key, owners)
        if kind.recording is not None and kind.recording.confirmed:
            kind.recording.replay(clock)
        elif kind.played < self.recorder.warm_up or not kind.repeats:
            kind.played += 1
            self.recorder.run(step, clock)
        else:
            kind.recording = self.recorder.record(step, kind.recording, memory)
            kind.repeats = kind.recording is not None

    def _kind(self, key: Hashable, owners: tuple[object, ...]) -> _Kind:
        """The kind of rounds with this key; for a new one the oldest makes room."""
        if key not in self._kinds:
            if len(self._kinds) >= KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[key] = _Kind(owners)
        return self._kinds[key]


def _keep(parts: Sequence[RoundState], memory: Sequence[Tensor]) -> None:
    """Write what the parts carry to static memory, and let them use it from there."""
    first = 0
    for part in parts:
        values = part.carried()
        kept = memory[first : first + len(values)]
        for place, value in zip(kept, values, strict=True):
            if value is not place:
                place.copy_(value)
        part.carry(kept)
        first += len(values)
