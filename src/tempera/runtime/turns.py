"""Whose turn it is to use the caches of a model in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread, current_thread
from typing import Final

from tempera.errors import TemperaError

ROUNDS: Final = "the rounds of a batch"
"""In place of the thread of a call: any thread may ask for the next round, or close them."""


class Turns:
    """One batch at a time uses a model's caches. Whole calls, of several threads, wait for each
    other. Nobody waits for the rounds of a batch, because they may never be asked for: until they
    end or are closed, in whatever thread, other calls are refused.
    """

    def __init__(self) -> None:
        self._changed = Condition()  # re-entrant: an abandoned generator may be closed anywhere
        self._holder: Thread | str | None = None

    @contextmanager
    def taken(self, *, rounds: bool = False) -> Iterator[None]:
        """Inside the `with` block the caches are this batch's alone.

        Args:
            rounds: the block may be left in another thread than it was entered in.

        Raises:
            TemperaError: the rounds of another batch have not ended, or another batch of this
                thread has not.
        """
        holder = ROUNDS if rounds else current_thread()
        with self._changed:
            while self._holder is not None:
                if self._holder in (ROUNDS, current_thread()):
                    raise TemperaError(
                        "the model is decoding the rounds of another batch: let them finish, or "
                        "close their generator, before the next call"
                    )
                self._changed.wait()
            self._holder = holder
        try:
            yield
        finally:
            with self._changed:
                self._holder = None
                self._changed.notify_all()
