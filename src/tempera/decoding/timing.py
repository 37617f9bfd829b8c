"""Where the time of a round goes."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        start = self._now()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - start

    @property
    def total(self) -> float:
        """Seconds over all parts."""
        return sum(self.seconds.values())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


_NOTHING = nullcontext()


def no_clock(part: str) -> AbstractContextManager[None]:
    """The clock of a run that is not timed."""
    return _NOTHING
