"""Values of conf/ meet the signature of what they build."""

from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from omegaconf import DictConfig, OmegaConf

from tempera.config.instantiate import instantiate
from tempera.errors import TemperaError


class Speaker(Protocol):
    def speak(self) -> str: ...


def example(
    number: float,
    count: int = 1,
    word: str = "x",
    kind: Literal["a", "b"] = "a",
    pair: tuple[int, int] = (1, 2),
    flag: bool = False,
    place: Path | None = None,
    thing: object = None,
    speaker: Speaker | None = None,
) -> dict[str, Any]:
    """A target with all sorts of arguments."""
    return locals()


def refusing(number: float) -> None:
    """A target that finds by itself what is wrong with a number."""
    raise TemperaError("too loud", option="number")


def node(**values: Any) -> DictConfig:
    return OmegaConf.create({"_target_": f"{__name__}.example", **values})


def test_values_and_objects_arrive() -> None:
    thing = object()
    made = instantiate(node(number=2, pair=[3, 4], place="a/b"), thing=thing, speaker=thing)
    assert (made["number"], made["pair"], made["place"]) == (2, (3, 4), Path("a/b"))
    assert made["thing"] is thing and made["speaker"] is thing


@pytest.mark.parametrize(("given", "arrives"), [(2, 2), ("2.5", 2.5), (10**30, 1e30)])
def test_a_number_arrives_as_one(given: object, arrives: float) -> None:
    number = instantiate(node(number=given))["number"]
    assert number == arrives
    assert type(number) is type(arrives)  # names of runs have 2, not 2.0


def test_nested_and_partial() -> None:
    assert instantiate(node(number=2, thing=node(number=1)))["thing"]["number"] == 1
    assert instantiate(node(_partial_=True, word="y"))(3.0)["word"] == "y"


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"number": "abc"}, "number"),
        ({"number": float("nan")}, "number"),
        ({"number": None}, "number"),
        ({"number": 1, "count": 2.5}, "count"),
        ({"number": 1, "kind": "c"}, "kind"),
        ({"number": 1, "pair": [1, "x"]}, "pair"),
        ({"number": 1, "flag": 1}, "flag"),
        ({"number": 1, "word": [1]}, "word"),
        ({"number": 1, "colour": 2}, "colour"),
        ({}, "number"),
        ({"number": 1, "thing": node(number="q")}, "thing.number"),
        ({"_target_": "tempera.nowhere.Thing"}, "_target_"),
        ({"_target_": "tempera"}, "_target_"),
    ],
)
def test_what_does_not_fit_is_named(values: dict[str, Any], option: str) -> None:
    with pytest.raises(TemperaError) as problem:
        instantiate(node(**values))
    assert problem.value.option == option and option in str(problem.value)
    assert "\n" not in str(problem.value) and "pydantic" not in str(problem.value)


@pytest.mark.parametrize(("value", "target"), [("abc", "example"), (3, "refusing")])
def test_an_interpolated_value_is_named_as_the_user_typed_it(value: object, target: str) -> None:
    rule = {"_target_": f"{__name__}.{target}", "number": "${delta}"}
    cfg = OmegaConf.create({"delta": value, "rule": rule})
    with pytest.raises(TemperaError) as problem:
        instantiate(cfg.rule)
    assert problem.value.option == "delta"
