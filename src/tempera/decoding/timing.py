"""Where the time of a round goes, and how long a batch takes, from some of its rounds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tempera.decoding.interfaces import Drafter, Rule, Target

T = TypeVar("T")


class Clock:
    """Seconds spent in each named part, in `seconds`. The device is synchronised around each part:
    for measuring, not for serving.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def lap(self, part: str) -> None:
        """Add the time since the last call to `seconds[part]`; without a name it is forgotten."""
        last = self._last
        self._last = now(self.device)
        if part:
            self._add(part, self._last - last)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Add the time of the `with` block to `seconds[part]`, also where it is within another
        part.
        """
        start = now(self.device)
        yield
        self._add(part, now(self.device) - start)

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class _Clocked:
    """An object of which some methods stop a clock; see `clocked`."""

    compiled = False  # a compiled round has no parts to time

    def __init__(self, wrapped: Any, clock: Clock, laps: dict[str, tuple[str | None, str | None]]):
        self.__dict__.update(_wrapped=wrapped, _clock=clock, _laps=laps)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._wrapped, name)
        if name not in self._laps:
            return attribute

        def timed_call(*arguments: Any) -> Any:
            before, after = self._laps[name]
            if before is not None:
                self._clock.lap(before)
            result = attribute(*arguments)
            if after is not None:
                self._clock.lap(after)
            return result

        return timed_call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)


def clocked(wrapped: T, clock: Clock, **laps: tuple[str | None, str | None]) -> T:
    """The same object; by method, the parts of a round that end before and after a call, if any."""
    return cast(T, _Clocked(wrapped, clock, laps))


class TimedTests(Rule):
    """The same rule; its tests of drafted tokens add their time to the part `test` of a clock,
    which is within `verify`.
    """

    def __init__(self, rule: Rule, clock: Clock) -> None:
        self.rule = rule
        self.clock = clock

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """See `Rule.accept_at`; for LANTERN it gathers the neighbours' probabilities, finds the
        set A and adds its mass up.
        """
        with self.clock.within("test"):
            return self.rule.accept_at(p, q, token, depth)

    def accept_certain(self, mass: Tensor, depth: Tensor) -> Tensor | None:
        """See `Rule.accept_certain`."""
        with self.clock.within("test"):
            return self.rule.accept_certain(mass, depth)

    def keeps(self, p: Tensor, token: Tensor) -> Tensor:
        """See `Rule.keeps`."""
        with self.clock.within("test"):
            return self.rule.keeps(p, token)

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """See `Rule.accept`."""
        return self.rule.accept(p, q, depth)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """See `Rule.residual`."""
        return self.rule.residual(p, q, token, depth)

    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """See `Rule.expected`."""
        return self.rule.expected(p, q, depth)


def timed(target: Target, drafter: Drafter, clock: Clock) -> tuple[Target, Drafter]:
    """The same target and drafter; in `decode` they add the time of each round's parts to a clock:
    draft, target, verify and commit, to which the round's host read belongs. The parts are those of
    rounds that are not compiled.
    """
    return (
        clocked(target, clock, score=(None, "target"), commit=("verify", None)),
        clocked(
            drafter, clock, begin=(None, ""), propose=("commit", "draft"), observe=(None, "commit")
        ),
    )


def now(device: torch.device) -> float:
    """The time in seconds, after all work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
