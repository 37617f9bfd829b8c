"""Where the time of a round goes."""

import time
from typing import Any, cast

import torch

from tempera.decoding.compiled import Part

PARTS = ("draft", "target", "verify", "commit")
"""Kinds of the parts of a round. What lies between two parts, such as the round's host read,
belongs to `commit`.
"""


class Clock:
    """A `Run` that adds up the seconds of each kind of part. The device is synchronised around each
    part: for measuring, not for serving.

    Attributes:
        seconds: of each kind.
        rounds: how many rounds they are of; each has one pass of the target.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.rounds = 0
        self._last: float | None = None

    def __call__(self, part: Part, kind: str) -> Part:
        """A part that is timed."""

        def call(*arguments: Any) -> Any:
            self._lap("commit")
            self.rounds += kind == "target"
            result = part(*arguments)
            self._lap(kind)
            return result

        return cast(Part, call)

    def _lap(self, kind: str) -> None:
        """Add the time since the last call, if there was one."""
        last = self._last
        self._last = now(self.device)
        if last is not None:
            self.seconds[kind] += self._last - last


def now(device: torch.device) -> float:
    """The time in seconds, after all work on the device has finished."""
    if is_awaited(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def is_awaited(device: torch.device) -> bool:
    """Whether the host has to wait for the device to know the time that its work takes."""
    return device.type == "cuda"
