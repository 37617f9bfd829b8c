"""Which cases of a parametrised test run every time; the others carry the marker `slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Values of one argument, all marked `slow` but the `quick` ones, given by value or by id."""
    return _marked([case if _is_param(case) else pytest.param(case) for case in cases], quick)


def slow_rows_but(cases: Iterable[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """The same for rows of several arguments."""
    return _marked([case if _is_param(case) else pytest.param(*case) for case in cases], quick)


def _is_param(case: Any) -> bool:
    return isinstance(case, type(pytest.param(0)))


def _marked(cases: list[Any], quick: tuple[Any, ...]) -> list[Any]:
    """Raises AssertionError if one of `quick` is no case."""
    found = [case for case in cases if any(_is(case, chosen) for chosen in quick)]
    assert all(any(_is(case, chosen) for case in found) for chosen in quick), quick
    return [
        case
        if any(case is other for other in found)
        else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
        for case in cases
    ]


def _is(case: Any, chosen: Any) -> bool:
    value = case.values[0] if len(case.values) == 1 else case.values
    return bool(chosen == (case.id if isinstance(chosen, str) and case.id else value))
