"""Which cases of a parametrised test run every time; the others carry the marker `slow`. And which
tests need an extra.
"""

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is an extra"
)


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases, all marked `slow` but the `quick` ones; one of several arguments is a tuple."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
