"""Where the time of a round goes."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

PARTS = {
    "propose": "draft",
    "score": "target",
    "verify": "verify",
    "settle": "commit",
    "draw": "target",  # of continuous tokens, without a draft
}
"""What the parts of a round are called in timings, by the functions that they are. What lies
between two parts, such as the round's host read, belongs to `commit`.
"""
BEGIN = ("propose", "draw")
"""The parts that begin a round."""


class Clock:
    """A `run` of `loop.rounds` that adds up the seconds of each part. The device is synchronised
    around each part: for measuring, not for serving.

    Attributes:
        seconds: of each part.
        rounds: how many rounds they are of.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds = dict.fromkeys(PARTS.values(), 0.0)
        self.rounds = 0
        self._last: float | None = None

    def __call__(self, part: Callable[..., Result], *arguments: Any) -> Result:
        """Call a part of a round."""
        self._lap("commit")
        self.rounds += part.__name__ in BEGIN
        result = part(*arguments)
        self._lap(PARTS[part.__name__])
        return result

    def _lap(self, part: str) -> None:
        """Add the time since the last call, if there was one."""
        last = self._last
        self._last = now(self.device)
        if last is not None:
            self.seconds[part] += self._last - last


def now(device: torch.device) -> float:
    """The time in seconds, after all work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
