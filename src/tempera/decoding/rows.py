"""The rows of a batch: a row whose image is complete takes the next prompt that waits."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from tempera.decoding.interfaces import NeedsNewBatch
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.sequences import Sequences
from tempera.errors import TemperaError


class Rows(ABC):
    """The rows of a batch, and the prompts that wait for one.

    Args:
        streams: one per prompt.
        prompts: all texts.
        count: most images that are decoded together; by default all.
        fixed: whether all batches have the same number of rows, as compiled rounds need.

    Attributes:
        sequences: of the running batch; set by `begin`.
        patience: what starting prompts costs, in rounds of the whole batch.

    Raises:
        TemperaError: there are no prompts, or not as many streams.
    """

    sequences: Sequences
    patience: float

    def __init__(
        self,
        streams: RandomStreams,
        prompts: Sequence[str],
        count: int | None = None,
        fixed: bool = False,
    ) -> None:
        streams.check(prompts)
        self.streams = streams
        self.prompts = prompts
        self.count = min(count or len(prompts), len(prompts))
        self.fixed = fixed
        # on a CPU a prefix took a third of a round of 16 rows (shipped model); on an H200 19 to 35
        # ms beside rounds of 2.5 to 7, before it was captured
        self.patience = 4.0 if fixed else 0.25
        self._waiting = deque(range(len(prompts)))
        self._late: list[int] = []  # do not fit into the running batch
        self._refused: list[TemperaError] = []
        self._any = False  # whether a batch has begun
        self._free: list[int] = []  # rows
        self._idle = 0  # rounds of rows since some were started

    def begin(self) -> bool:
        """Start a new batch of prompts that wait; returns whether there were any. If the rows are
        more, they repeat a prompt and are idle.

        Raises:
            TemperaError: the first batch, or a later one whose prompts are accepted one by one,
                cannot start; or no prompt waits any more, and one was refused after the first
                batch.
        """
        self._waiting.extend(self._late)
        self._late = []
        count = min(self.count, len(self._waiting))
        if not count:
            if self._refused:
                raise self._refused[0]
            return False
        chosen = [self._waiting.popleft() for _ in range(count)]
        try:
            self._start_all(chosen)
        except TemperaError:
            accepted = self._accepted(chosen) if self._any else chosen
            if accepted == chosen:
                raise  # it is nothing about a prompt
            self._waiting.extendleft(reversed(accepted))
            return self.begin()
        self._any = True
        return True

    def refill(self) -> None:
        """Give the rows that have completed an image to prompts that wait; several together, as
        long as it costs less to let them be idle than to start them one by one.
        """
        sequences = self.sequences
        self._free += sequences.release()
        self._idle += len(self._free)
        if not sequences.live:
            self._free = []
            self._idle = 0
            return  # `begin` starts them all
        if self._idle < self.patience * len(sequences.prompts):
            return
        self._idle = 0
        while self._free and self._waiting:
            count = min(len(self._free), len(self._waiting))
            self._start_some([self._waiting.popleft() for _ in range(count)])

    def _start_some(self, chosen: list[int]) -> None:
        """Start prompts in free rows. One that is refused, or does not fit, leaves its row to the
        next.
        """
        rows = self._free[: len(chosen)]
        try:
            self.start(chosen, torch.tensor(rows, device=self.sequences.device))
        except (NeedsNewBatch, TemperaError) as problem:
            if len(chosen) > 1:
                for prompt in chosen:
                    self._start_some([prompt])
            elif isinstance(problem, TemperaError):
                self._refused.append(problem)
            else:
                self._late += chosen
        else:
            del self._free[: len(chosen)]
            self._begun(rows, chosen)

    def _start_all(self, chosen: list[int]) -> None:
        """Start a batch of prompts."""
        idle = self.count - len(chosen) if self.fixed else 0
        self.sequences = self.new_sequences(len(chosen) + idle)
        self.start([*chosen, *chosen[:1] * idle], None)
        self._begun(range(len(chosen)), chosen)

    def _accepted(self, chosen: list[int]) -> list[int]:
        """Those of the prompts that are not refused, each in a batch alone."""
        accepted = []
        for prompt in chosen:
            try:
                self._start_all([prompt])
            except TemperaError as problem:
                self._refused.append(problem)
            else:
                accepted.append(prompt)
        return accepted

    def _begun(self, rows: Sequence[int], prompts: list[int]) -> None:
        self.sequences.begin(rows, prompts, [self.streams.ids[prompt] for prompt in prompts])

    @abstractmethod
    def new_sequences(self, rows: int) -> Sequences:
        """The images of a new batch."""

    @abstractmethod
    def start(self, prompts: list[int], rows: Tensor | None) -> None:
        """Start prompts, given by their numbers, in these rows of the running batch, int64 [M], or
        in all rows of the new one.

        Raises:
            NeedsNewBatch: they do not fit into the running batch.
            TemperaError: they are refused.
        """
