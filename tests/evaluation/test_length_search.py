"""`expected_length=`: the search hits its target or says what is possible, and a run keeps what was
found.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import slow_but
from near_codes import near
from table_models import tables
from tiny_evaluation import tiny_options

from tempera.commands import evaluate
from tempera.commands.expected_length import Wanted
from tempera.config.compose import composed
from tempera.data.prompts import Prompt
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation import calibration
from tempera.evaluation.length_search import accepted_length, search
from tempera.evaluation.pipeline import Method
from tempera.exactness.tables import TableTarget
from tempera.exactness.theory import expected_emitted
from tempera.rules.neighbourhood import GSD, LanternPP
from tempera.rules.optimal import Priced
from tempera.rules.schedules import Prices, exponential
from tempera.rules.standard import Exact, Relaxed
from tempera.shapes.scenes import world_prompts

pytestmark = pytest.mark.usefixtures("no_figures")
LENGTH = 3
NEAR = {k: near(3, k) for k in (1, 2, 3)}
RULES: dict[str, tuple[tuple[float, float], Any]] = {
    "uniform": ((0.01, 1000), lambda value: Relaxed((value,))),
    "annealed": ((0.01, 1000), lambda value: Relaxed(exponential(value, 3))),
    "priced": ((0.001, 20), lambda value: Priced(Prices((value,)))),
    "lantern++": ((1e-4, 1e6), lambda value: LanternPP(NEAR[3], value)),
    "grouped": ((1, 3), lambda value: GSD(NEAR[math.ceil(value)], None, k=value)),
}


def law(make: Any) -> Callable[[float], float]:
    """The enumerated length of a round by the value of the parameter."""
    _, _, p, q = tables()
    return lambda value: expected_emitted(p, q, make(value), LENGTH)


@pytest.mark.parametrize("name", [*RULES])
def test_the_length_is_found_for_every_rule(name: str) -> None:
    ends, make = RULES[name]
    low, high = map(law(make), ends)
    steps = name == "lantern++"  # λ adds whole codes
    wanted = law(make)(1.0) if steps else (low + 2 * high) / 3
    value, length = search(wanted, "delta", ends, 0.02, law(make))
    assert law(make)(value) == length == pytest.approx(wanted, abs=0.02)


def test_a_length_out_of_reach() -> None:
    with pytest.raises(TemperaError, match=r"of 1 is .*give about 2.01 to 2.99$"):
        search(1.0, "delta", (0.5, 2), 0.02, lambda value: 2.003 if value < 1 else 2.997)


def test_a_step_that_jumps_over_the_length() -> None:
    with pytest.raises(TemperaError, match=r"no k was found .* the nearest is k=\S+ with 3.500"):
        search(3.4, "k", (1, 100), 0.02, lambda value: 3.0 if value < 7 else 3.5)


def test_what_is_tried_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A search may decode for minutes."""
    target = TableTarget(3, 4)
    prompts = world_prompts(6)
    device = torch.device("cpu")
    found = accepted_length(target, Method(NoDraft(), Exact()), prompts, 0, device, 4, "delta=2")
    assert found == 1.0
    assert "trying delta=2: " in (shown := capsys.readouterr().err) and "/24.0 " in shown


# In a run


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    sampling = ["guidance=2", "min_p=0"]  # every token can be kept
    return [*tiny_options(tmp_path_factory.mktemp("tiny")), "matching.prompts=4", *sampling]


def evaluated(options: list[str], directory: Path, *more: str) -> dict[str, Any]:
    evaluate.main(composed("eval", [*options, *more], directory))
    content: dict[str, Any] = json.loads((directory / "metrics.json").read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "method=coolsd",
        "method=coolsd schedule=calibrated",
        "method=optimal_rsd schedule=optimal",
        "method=lanternpp tree=chain",
        "method=fly ahead=1",
    ],
)
def test_a_run_finds_its_parameter_and_keeps_it(
    options: list[str], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*method.split(), "depth=3", "expected_length=1.6", "matching.tolerance=0.15"]
    content = evaluated(options, tmp_path / "run", *given)
    found = content["about"]["matched"]
    assert found["length"] == pytest.approx(1.6, abs=0.15)
    assert content["settings"][found["option"]] == found["value"]
    assert (content["settings"]["expected_length"], found["prompts"]) == (1.6, 4)
    if "schedule=optimal" in method:  # the draft is measured again where it draws otherwise
        again = evaluated(options, tmp_path / "again", *given, "temperature=0.9")
        assert again["about"]["matched"]["value"] != found["value"]
        record = Mock(wraps=calibration.record)
        monkeypatch.setattr(calibration, "record", record)
        for number, weights in enumerate(("first", "first", "second")):
            place = [f"model.network.directory={weights}", "temperature=0.9"]
            evaluated(options, tmp_path / str(number), *given, *place)
        assert record.call_count == 2
    if found["option"] != "delta":
        return
    monkeypatch.setattr(Wanted, "_searched", None)  # nothing is searched again
    again = evaluated(options, tmp_path / "run", *given, "data.limit=8")
    assert (again["about"]["matched"], again["images"]) == (found, 8)
    with pytest.raises(TemperaError, match="other settings"):
        evaluated(options, tmp_path / "run", *given, "matching.seed=5")


MISTAKES = [
    (["method=eagle"], "this method has no parameter that expected_length= could set"),
    (["method=coolsd", "delta=2"], "delta=2 cannot be combined with expected_length="),
    (["method=coolsd", "matching.offset=0"], "2 calibration prompts of expected_length= are"),
    (["method=coolsd", "expected_length=0.5"], "1 to 6 tokens"),
    (["method=coolsd", "expected_length=6.1"], "1 to 6 tokens"),
    (["method=coolsd", "free_parameter.least=0"], "free_parameter.least=0"),
    (["method=coolsd", "matching.prompts=0"], "`matching.prompts=0`"),
]


@pytest.mark.parametrize(("given", "message"), slow_but(MISTAKES, MISTAKES[1]))
def test_mistakes(given: list[str], message: str) -> None:
    with pytest.raises(TemperaError, match=message):
        wanted = Wanted.of(composed("eval", ["expected_length=3", *given], "."))
        assert wanted is not None
        wanted.check_prompts([Prompt("world-000000", ""), Prompt("world-000001", "")])
