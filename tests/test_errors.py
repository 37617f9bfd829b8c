"""Errors for people: one sentence, exit status 1, no traceback."""

import pytest

from tempera.errors import TemperaError, main_guard, misfit


def test_a_mistake_is_one_sentence_and_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    @main_guard
    def main() -> None:
        raise TemperaError("delta=-1 is not a relaxation budget; give a number above 0")

    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert (
        capsys.readouterr().err
        == "error: delta=-1 is not a relaxation budget; give a number above 0\n"
    )


def test_a_bug_keeps_its_traceback() -> None:
    @main_guard
    def main() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        main()


def test_a_result_passes_through() -> None:
    assert main_guard(lambda x: x + 1)(1) == 2


def test_it_names_the_option_at_fault_where_one_is() -> None:
    problem = TemperaError("give a number above 0", option="delta")
    assert (str(problem), problem.option) == ("give a number above 0", "delta")
    assert TemperaError("give a number above 0").option is None


def test_it_is_a_value_error() -> None:
    assert issubclass(TemperaError, ValueError)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (KeyError("grid"), "'grid' is missing"),
        (ValueError("Expecting value:\nline 1"), "Expecting value: line 1"),
        (AttributeError("'str' object has no attribute 'get'"), "a value is of another kind"),
    ],
)
def test_what_is_wrong_with_data_is_said_without_code(problem: Exception, said: str) -> None:
    assert misfit(problem) == said
