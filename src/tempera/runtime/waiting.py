"""A wait says what it waits for, and ends where nothing moves."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tempera.errors import TemperaError

SILENCE = 2.0
"""Seconds that may pass without a word."""
LIMIT = 600.0
"""Seconds without progress after which a wait for another process ends."""
STEP = 10.0
"""Seconds between two looks at the progress."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print what this process waits for if the `with` block takes longer than `SILENCE`, and again
    each time that the wait has doubled.
    """
    over = Event()
    began = time.monotonic()

    def tell() -> None:
        pause = SILENCE
        while not over.wait(pause):
            passed = time.monotonic() - began
            print(f"waiting for {what} ({passed:.0f} s)", file=sys.stderr, flush=True)
            pause = passed

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def attempts(holder: str, advice: str, progress: Callable[[], object]) -> Iterator[float]:
    """The seconds that each attempt to get something may take, until nothing has moved for `LIMIT`
    seconds.

    Args:
        holder: what must go on, for the error.
        advice: what to do if it does not.
        progress: something that changes as long as it goes on.

    Raises:
        TemperaError: nothing has changed for so long.
    """
    seen = progress()
    since = time.monotonic()
    while (passed := time.monotonic() - since) < LIMIT:
        yield min(STEP, LIMIT - passed)
        now = progress()
        if now != seen:
            seen = now
            since = time.monotonic()
    raise TemperaError(f"{holder} has made no progress for {LIMIT / 60:.0f} minutes: {advice}.")
