"""Where the time of a round goes, and how long a batch takes, from some of its rounds."""

import time
from typing import Any, cast

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Drafter, Scores, Target, Verdict


class Clock:
    """Seconds spent in each named part, in `seconds`. The device is synchronised around each part:
    for measuring, not for serving.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Start a part."""
        self._last = now(self.device)

    def lap(self, part: str) -> None:
        """Add the time since the last call to `seconds[part]`, and start the next part."""
        last, self._last = self._last, now(self.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + self._last - last

    @property
    def total(self) -> float:
        """Seconds over all parts."""
        return sum(self.seconds.values())


class _TimedTarget:
    """A target that stops a clock when it is called."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target, self._clock = target, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def longest(self) -> int:
        return self._target.longest

    @longest.setter
    def longest(self, tokens: int) -> None:
        self._target.longest = tokens

    def score(self, draft: Draft) -> Scores:
        scores = self._target.score(draft)
        self._clock.lap("target")
        return scores

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        self._clock.lap("verify")
        self._target.commit(draft, verdict, emitted)


class _TimedDrafter:
    """A drafter that stops a clock when it is called."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def begin(self, prompts: list[str]) -> None:
        self._drafter.begin(prompts)
        self._clock.start()

    def propose(self, uniforms: Tensor) -> Draft:
        self._clock.lap("commit")  # the host read of the last round
        draft = self._drafter.propose(uniforms)
        self._clock.lap("draft")
        return draft

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        self._drafter.observe(draft, verdict, scores, emitted)
        self._clock.lap("commit")


def timed(target: Target, drafter: Drafter, clock: Clock) -> tuple[Target, Drafter]:
    """The same target and drafter; in `decode` they add the time of each round's parts to a clock:
    draft, target, verify and commit.
    """
    return cast(Target, _TimedTarget(target, clock)), cast(Drafter, _TimedDrafter(drafter, clock))


def now(device: torch.device) -> float:
    """The time in seconds, after all work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
