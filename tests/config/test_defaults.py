"""A default stands once: what conf/ gives has none in the signature."""

import inspect
from collections.abc import Iterator
from typing import Any

import yaml
from hydra.utils import get_object
from paths import CONF

from tempera.data.prepare import prepare
from tempera.evaluation.benchmark import BenchmarkPlan
from tempera.evaluation.run import RunPlan
from tempera.evaluation.tuning import TuningPlan
from tempera.training.recipe import Recipe

OF_PYTHON = (
    *("tempera.rules.", "tempera.drafters.", "tempera.continuous.", "tempera.targets."),
    *("tempera.image_tokenizers.", "tempera.training.losses.", "tempera.shapes."),
)
"""What a researcher also makes in Python, as docs/extend/, docs/decode.md and the notebooks show:
its arguments have the papers' values, or the shipped networks and their world, by default.
"""
NOTHING = (None, "", (), [])
"""Say that nothing is given, which is not a choice."""
WHOLE = {"offset": 0}
"""Say that nothing is left out: `file_prompts(path)` reads all of a file."""


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """The nodes with a `_target_` in a configuration."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from nodes(inner)


def copies() -> Iterator[tuple[str, str]]:
    """(module, argument) of each default that conf/ gives, too."""
    for file in CONF.rglob("*.yaml"):
        for node in nodes(yaml.safe_load(file.read_text())):
            if str(node["_target_"]).startswith("tempera.") and not node["_target_"].startswith(
                OF_PYTHON
            ):
                call = get_object(node["_target_"])
                yield from twice(call, node)
    for config, call in (
        ("prepare", prepare),
        ("bench", BenchmarkPlan),
        ("tune", TuningPlan),
        ("eval", RunPlan),
    ):
        yield from twice(call, yaml.safe_load((CONF / f"{config}.yaml").read_text()))
    training = yaml.safe_load((CONF / "train_draft.yaml").read_text())["training"]
    yield from twice(Recipe, training)


def twice(call: Any, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of one class or function."""
    for name, parameter in inspect.signature(call).parameters.items():
        has_default = parameter.default is not parameter.empty
        is_choice = parameter.default not in NOTHING and parameter.default != WHOLE.get(name)
        if name in options and has_default and is_choice:
            yield call.__module__, name


def test_a_default_stands_once() -> None:
    assert not list(copies())


def test_a_copy_is_found() -> None:
    assert list(twice(sample, {"size": 2, "path": None})) == [(__name__, "size")]


def sample(size: int = 1, path: str | None = None) -> None:
    """A function with a default."""
