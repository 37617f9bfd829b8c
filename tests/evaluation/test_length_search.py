"""`expected_length=`: the search hits its target or says what is possible, and a run keeps what was
found.
"""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_rows_but
from near_codes import near
from table_models import tables
from tiny_evaluation import tiny_options

from tempera.commands import evaluate, expected_length
from tempera.config.compose import composed, composed_run
from tempera.data.prompts import Prompt
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import LengthNotFound, LengthOutOfReach, TemperaError
from tempera.evaluation import length_search
from tempera.evaluation.calibration import Statistics, record
from tempera.evaluation.length_search import (
    FreeParameter,
    LengthOf,
    LengthSearch,
    accepted_length,
    interpolated,
    kept,
    predicted_length,
    search,
    search_with_pilot,
)
from tempera.evaluation.pipeline import Method
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.exactness.theory import expected_emitted
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import PricedRounds
from tempera.rules.schedules import Prices, exponential
from tempera.rules.standard import Relaxed

LENGTH = 3
NEAR = {k: near(3, k) for k in (1, 2, 3)}
DELTA = FreeParameter("delta", 0.01, 1000)
RULES: dict[str, tuple[FreeParameter, Any]] = {
    "uniform": (DELTA, lambda value: Relaxed((value,))),
    "annealed": (DELTA, lambda value: Relaxed(exponential(value, 3))),
    "priced": (FreeParameter("price", 0.001, 20), lambda value: Priced(Prices((value,)))),
    "lantern++": (FreeParameter("lam", 1e-4, 1e6), lambda value: LanternPP(NEAR[3], value)),
    "grouped": (
        FreeParameter("k", 1, 3),
        lambda value: GSD(NEAR[math.ceil(value)], None, k=value),
    ),
}
OPTIONS = LengthSearch(Path("lengths"))


def law(make: Any) -> LengthOf:
    """The enumerated length of a round by the value of the parameter."""
    _, _, p, q = tables()
    return lambda value: expected_emitted(p, q, make(value), LENGTH)


@pytest.mark.parametrize("name", [*RULES])
def test_the_length_is_found_for_every_rule(name: str) -> None:
    parameter, make = RULES[name]
    low, high = (law(make)(value) for value in (parameter.least, parameter.most))
    steps = name == "lantern++"  # λ adds whole codes
    wanted = law(make)(1.0) if steps else (low + 2 * high) / 3
    found = search(wanted, parameter, OPTIONS, law(make))
    assert law(make)(found.value) == found.length == pytest.approx(wanted, abs=0.02)
    assert found.option == parameter.option and (found.value, found.length) in found.trials


@pytest.mark.parametrize("name", ["uniform", "annealed"])
def test_a_wrong_prediction_is_corrected(name: str) -> None:
    parameter, make = RULES[name]
    true = law(make)
    found = search(3.5, parameter, OPTIONS, true, lambda value: 0.3 + 0.95 * true(value))
    assert found.length == pytest.approx(3.5, abs=0.02)
    assert len(found.trials) <= 4
    assert abs(found.trials[0][1] - 3.5) > 0.02  # the prediction alone is not enough


def test_a_solved_schedule_is_shifted() -> None:
    parameter = FreeParameter("round_length", 2.0, 4.0)
    found = search(3.0, parameter, OPTIONS, lambda value: value - 0.2, float)
    assert (found.value, len(found.trials)) == (pytest.approx(3.2), 2)


def uniform(value: float) -> float:
    return law(RULES["uniform"][1])(value)


def capped(low: float, high: float) -> LengthOf:
    """3 to 4.7 over the range of the parameter, cut off at both ends."""
    return lambda value: min(max(3 + 1.7 * math.log(value / 1e-4) / math.log(1e10), low), high)


NARROW, RANGE = FreeParameter("delta", 0.5, 2), FreeParameter("lam", 1e-4, 1e6)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda: search(1.0, NARROW, OPTIONS, uniform), r"of 1 is .*give about \d\.\d\d to \d"),
        (lambda: search(3.99, NARROW, OPTIONS, uniform, uniform), r"of 3.99 is out of reach"),
        (  # the prediction promises too much
            lambda: search(3.5, RANGE, OPTIONS, capped(2, 3.2), capped(2, 4)),
            r" of 3.5 is out of reach .* to 3.20$",
        ),
        (  # what is possible is that of all prompts, not of the pilot
            lambda: search_with_pilot(4.0, RANGE, OPTIONS, capped(3, 3.7), capped(2, 5), LOOSE),
            r"give about 3.00 to 3.70$",
        ),
    ],
)
def test_a_length_out_of_reach(run: Callable[[], Any], told: str) -> None:
    with pytest.raises(LengthOutOfReach, match=told):
        run()


@pytest.mark.parametrize("trials", [5, 60])
def test_a_step_that_jumps_over_the_length(trials: int) -> None:
    parameter, steps = FreeParameter("k", 1, 100), lambda value: 3.0 if value < 7 else 3.5
    with pytest.raises(LengthNotFound, match=r"no k was found .* the nearest is k=\S+ with 3.500"):
        search(3.4, parameter, LengthSearch(Path(), trials=trials), steps)


FEW, EVERY = 16, 256
"""Prompts of the pilot, and of the whole search."""
LOOSE = 0.02 * math.sqrt(EVERY / FEW)


def toy(seed: int, prompts: int) -> LengthOf:
    """A length that rises from 3 to 4.7, plus the sampling error of some prompts: a part that all
    values share, and a smaller one. Sizes are those of LANTERN++ on the shipped model.
    """
    curve, error = np.random.default_rng(seed), np.random.default_rng([seed, prompts])
    middle, steepness = curve.normal(1.0, 1.5), curve.uniform(0.7, 2)
    shared, own = (error.normal(0, sd / math.sqrt(prompts), 100) for sd in (0.7, 0.3))

    def length(value: float) -> float:
        place = math.log(value)
        rise = 1.7 / (1 + math.exp(-steepness * (place - middle)))
        return float(3 + rise + shared[0] + own[int(3 * place) + 40])

    return length


def counting(length: LengthOf, calls: list[float]) -> LengthOf:
    return lambda value: (calls.append(value), length(value))[1]


def test_a_pilot_saves_images() -> None:
    shares = []
    for seed, wanted in product(range(30), (3.5, 3.8, 4.2)):
        true, calls = toy(seed, EVERY), list[float]()
        few = counting(toy(seed, FEW), calls)
        alone = search(wanted, RANGE, OPTIONS, true)
        found = search_with_pilot(wanted, RANGE, OPTIONS, true, few, LOOSE)
        assert true(found.value) == found.length == pytest.approx(wanted, abs=0.02)
        decoded = FEW * len(calls) + EVERY * len(found.trials)
        shares.append(decoded / (EVERY * len(alone.trials)))
    assert np.mean(shares) < 0.7


@pytest.mark.parametrize(
    ("pilot", "wanted"),
    [
        (capped(3, 3.6), 4.0),  # out of the pilot's reach
        (capped(3, 3.95), 4.0),  # within its tolerance, and yet too short to predict the length
        (lambda value: 3.1 if value < 7 else 4.5, 4.0),  # jumps over the length
        (lambda value: 3.99 + 1e-4 * math.log(value), 3.8),  # rises too slowly
    ],
    ids=["low", "almost", "jump", "flat"],
)
def test_a_pilot_that_misleads_is_not_believed(pilot: LengthOf, wanted: float) -> None:
    true = capped(3, 4.7)
    found = search_with_pilot(wanted, RANGE, OPTIONS, true, pilot, LOOSE)
    assert true(found.value) == found.length == pytest.approx(wanted, abs=0.02)


def test_lengths_between_those_of_the_pilot() -> None:
    between = interpolated([(100, 4.0), (1, 3.0), (1e4, 3.9), (1e6, 4.4)])
    values = [0.1, 1, 10, 100, 1e4, 1e5, 1e7]
    assert [between(value) for value in values] == pytest.approx([3, 3, 3.5, 4, 4, 4.2, 4.4])


def test_lengths_are_measured_once(tmp_path: Path) -> None:
    values: list[float] = []

    def measure(value: float) -> float:
        values.append(value)
        return 2 * value

    for _ in range(2):
        measured = kept(tmp_path, measure)
        assert [measured(1.5), measured(1.0), measured(1.5)] == [3, 2, 3]
    assert values == [1.5, 1.0]


def test_predictions_are_those_of_theory() -> None:
    _, _, p, q = tables()
    rounds = PricedRounds.enumerated(p, q[:LENGTH])
    rules = [Priced(Prices((0.6, 0.3, 0.3))), Lantern(NEAR[2], 0.3), Relaxed((2.0,))]
    found = [predicted_length(rule, Statistics(None, rounds)) for rule in rules]
    assert found[1:] == [None, None]  # no statistics of LANTERN, and no ratios
    assert found[0] == pytest.approx(expected_emitted(p, q, rules[0], LENGTH), abs=0.02)
    ratios = torch.tensor([[0.5, 2.0, 0.1], [1.0, 0.25, 3.0]])
    length = predicted_length(Relaxed((2.0, 1.0)), Statistics(ratios, rounds))
    assert length == pytest.approx(1 + (1 + 1 + 0.1 + 1 + 0.25 + 0.25) / 2)


@pytest.mark.slow
def test_the_loop_has_the_length_that_was_found() -> None:
    target = TableTarget(3, 7)
    drafter, device = StaticTreeDrafter(TableDraft(target), Tree.chain(LENGTH)), torch.device("cpu")
    prompts = [Prompt(str(number), "") for number in range(300)]
    recorded = record(target, drafter, prompts[:100], 1, device, 100)

    def measure(value: float) -> float:
        method = Method(drafter, Relaxed((value,)))
        return accepted_length(target, method, prompts, 1, device, 300)

    def predict(value: float) -> float:
        length = predicted_length(Relaxed((value,)), recorded)
        assert length is not None
        return length

    found = search(2.5, DELTA, OPTIONS, measure, predict)
    assert measure(found.value) == found.length == pytest.approx(2.5, abs=0.02)
    assert len(found.trials) <= 4


# In a run


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_options(tmp_path_factory.mktemp("tiny")), "matching.prompts=4"]


def evaluated(options: list[str], directory: Path, *more: str) -> dict[str, Any]:
    evaluate.main(composed_run("eval", [*options, *more], directory))
    content: dict[str, Any] = json.loads((directory / "metrics.json").read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("method", ["method=coolsd", "method=optimal_rsd schedule=optimal"])
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
    if found["option"] != "delta":
        return
    monkeypatch.setattr(expected_length, "_Finder", None)  # nothing is searched again
    again = evaluated(options, tmp_path / "run", *given, "limit=8")
    assert (again["about"]["matched"], again["images"]) == (found, 8)
    with pytest.raises(TemperaError, match="other conditions"):
        evaluated(options, tmp_path / "run", *given, "matching.seed=5")


@pytest.mark.slow
def test_a_run_of_lantern_decodes_a_pilot_first(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    decoded = []

    def counted(target: Any, method: Method, prompts: list[Prompt], *rest: Any) -> float:
        decoded.append(len(prompts))
        return accepted_length(target, method, prompts, *rest)

    monkeypatch.setattr(length_search, "accepted_length", counted)
    given = ["method=lanternpp", "tree=chain", "depth=3", "expected_length=1.6"]
    content = evaluated(options, tmp_path, *given, "matching.tolerance=0.15", "matching.pilot=2")
    found = content["about"]["matched"]
    assert found["length"] == pytest.approx(1.6, abs=0.15)
    assert decoded == sorted(decoded)
    assert decoded[0] == 2
    assert decoded.count(4) == len(found["trials"])


MISTAKES = [
    (["method=eagle"], "nothing to set in this method"),
    (["method=coolsd", "delta=2"], "delta=2 does not go with expected_length="),
    (["method=coolsd", "matching.offset=0"], "include 2 of this evaluation's"),
    (["method=coolsd", "expected_length=abc"], "`expected_length=abc`"),
    (["method=coolsd", "expected_length=0.5"], "1 to 6 tokens"),
    (["method=coolsd", "expected_length=9"], "1 to 6 tokens"),
    (["method=coolsd", "free_parameter.least=0"], "free_parameter.least=0"),
    *(
        (["expected_length=null", option], f"`{option}`")
        for option in (
            *("matching.prompts=0", "matching.trials=0", "matching.pilot=0"),
            "matching.tolerance=0",
        )
    ),
]


@pytest.mark.parametrize(("given", "message"), slow_rows_but(MISTAKES, MISTAKES[1]))
def test_mistakes(given: list[str], message: str) -> None:
    with pytest.raises(TemperaError, match=message):
        cfg = composed("eval", ["expected_length=3", *given])
        expected_length.check_options(cfg, given)
        shared = [Prompt("world-000000", ""), Prompt("world-000001", "")]
        expected_length.check_prompts(cfg, shared)


@pytest.mark.slow
def test_python_calls_do_not_search() -> None:
    from tempera.config.build import check_length

    with pytest.raises(TemperaError, match="evaluations alone: give delta here"):
        check_length(composed("eval", ["method=coolsd", "expected_length=3"]))
    check_length(composed("eval", ["method=optimal_rsd", "schedule=optimal", "expected_length=3"]))
