"""Errors for people: one sentence, exit status 1, no traceback."""

import pytest

from tempera.errors import TemperaError, misfit


def test_it_names_the_option_at_fault_where_one_is() -> None:
    problem = TemperaError("give a number above 0", option="delta")
    assert (str(problem), problem.option) == ("give a number above 0", "delta")
    assert isinstance(problem, ValueError) and TemperaError("").option is None


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (KeyError("grid"), "'grid' is missing"),
        (ValueError("Expecting value:\nline 1"), "Expecting value: line 1"),
        (AttributeError("'str' object has no attribute 'get'"), "a value has the wrong type"),
    ],
)
def test_what_is_wrong_with_data_is_said_without_code(problem: Exception, said: str) -> None:
    assert misfit(problem) == said
