"""Errors for people: one sentence that says what is wrong, where, and what to do."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TemperaError(ValueError):
    """A mistake the user can mend. Its message is one sentence: what, where and what to do."""


def main_guard(main: Callable[P, T]) -> Callable[P, T]:
    """Wrap a script's `main`: a `TemperaError` becomes `error: <sentence>` on standard error and
    exit status 1, without a traceback.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return main(*args, **kwargs)
        except TemperaError as problem:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(1)

    return guarded
