"""Options given in Python arrive as they would from the command line."""

from typing import Any

import pytest
from cases import slow_but
from hydra.core.global_hydra import GlobalHydra

from tempera.config.compose import composed, written
from tempera.errors import TemperaError


@pytest.mark.parametrize(
    "value",
    slow_but(
        [
            1e-5,
            float("inf"),
            None,
            "null",
            "a, (b) and [c]: 50% of 'it' = \"x\" \\",
            "${seed}",
            "",
            ["a, b", 2, None],
            {"a": 1, "b": [True]},
        ],
        None,
        "a, (b) and [c]: 50% of 'it' = \"x\" \\",
        ["a, b", 2, None],
    ),
)
def test_a_value_arrives_as_it_is(value: Any) -> None:
    assert composed("eval", [written("+note", value)]).note == value


def test_a_running_hydra_application_goes_on() -> None:
    application = object()
    GlobalHydra.instance().hydra = application  # type: ignore[assignment]
    with pytest.raises(TemperaError):
        composed("eval", ["metod=ar"])
    assert GlobalHydra.instance().hydra is application
