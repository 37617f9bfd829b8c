"""Where the time of a round goes, and how long a batch takes, from some of its rounds."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

import torch


class PartTimer(Protocol):
    """What `decode` times with: `with clock("draft"): ...`, for the parts draft, target, verify and
    commit.
    """

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Time what runs inside as this part."""


class Clock:
    """Seconds spent in each named part, in `seconds`. The device is synchronised around each part:
    for measuring, not for serving.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the time of what runs inside to `seconds[part]`."""
        start = now(self.device)
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + now(self.device) - start

    @property
    def total(self) -> float:
        """Seconds over all parts."""
        return sum(self.seconds.values())


def now(device: torch.device) -> float:
    """The time in seconds, after all work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_NOTHING = nullcontext()


def no_clock(part: str) -> AbstractContextManager[None]:
    """The clock of a run that is not timed."""
    return _NOTHING


def batch_seconds(
    decode: Callable[[Callable[[int, int], None]], object],
    tokens: int,
    clock: Callable[[], float],
    limit: float,
) -> float:
    """Seconds that a batch takes to decode. Decoding is broken off after the first round that ends
    past the limit, but not before the second; the remaining tokens then count as if they came as
    fast as those after the first round, which includes the beginning of the images.

    Args:
        decode: decodes the batch, with the `progress` of `tempera.decoding.loop.decode`.
        tokens: of the whole batch.
        clock: the time in seconds.
        limit: in seconds.
    """
    marks: list[tuple[float, int]] = []
    start = clock()

    def mark(number: int, written: int) -> None:
        marks.append((clock(), written))
        if number > 1 and marks[-1][0] - start >= limit:
            raise _Enough

    with suppress(_Enough):
        decode(mark)
    (first, begun), (last, written) = marks[0], marks[-1]
    left = (last - first) * (tokens - written) / (written - begun) if written < tokens else 0.0
    return last - start + left


class _Enough(Exception):
    """A batch was decoded for long enough."""
