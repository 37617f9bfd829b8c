"""A wait says what it waits for."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

SILENCE = 2.0
"""Seconds that may pass without a word."""


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
