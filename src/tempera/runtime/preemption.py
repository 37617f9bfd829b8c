"""Signals by which a scheduler takes a machine back: work is made safe before they act."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2")
"""SIGTERM is Slurm's and that of most others; SIGUSR2 submitit's; SIGUSR1 is what users ask of
Slurm (`--signal`).
"""
Handler = Callable[[int, FrameType | None], object] | int


class Preemption:
    """In a `with` block these signals are noted, and `pass_on` gives them to the handlers that they
    had before. The same signal again acts at once. A signal that is ignored stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}
        self._noted: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the others get no signals
            for one in signal.Signals:
                before = signal.getsignal(one)
                if one.name in NAMES and before not in (None, signal.SIG_IGN):
                    self._before[one] = before
                    signal.signal(one, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """Restore the handlers; what was noted last is passed on."""
        for number, before in self._before.items():
            signal.signal(number, before)
        noted, self._noted = self._noted, []
        for number in dict.fromkeys(noted if kind is None else ()):
            signal.raise_signal(number)

    @property
    def came(self) -> bool:
        """Whether a signal was noted."""
        return bool(self._noted)

    def pass_on(self) -> None:
        """Let every noted signal act; where it came to another process of the run alone, SIGTERM
        does. Most handlers do not return.
        """
        noted, self._noted = self._noted or [signal.SIGTERM], []
        for number in dict.fromkeys(noted):
            self._act(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes on the signal that Slurm has sent to its processes, too
        usual = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1
        if self._noted.count(number) < usual:
            self._noted.append(number)
        else:
            self._act(number, frame)

    def _act(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before is not None:
            signal.signal(number, before)
            signal.raise_signal(number)
