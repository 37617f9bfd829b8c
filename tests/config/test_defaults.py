"""A default stands once, in the signature of what it configures; a value of conf/ that repeats it
agrees with it, or is a preset.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf
from paths import ROOT

CONF = ROOT / "conf"
SCRIPTS = sorted(path.stem for path in CONF.glob("*.yaml"))
BY_OPTIONS = {
    "train_draft": ["tempera.training.recipe.Recipe"],
    "prepare": ["tempera.data.prepare.prepare", "tempera.data.estimate.estimate"],
}
"""What a script builds from its top-level options (`instantiate.from_options`)."""

PRESET_GROUPS = {"experiment", "method", "model", "recipe"}
"""Groups whose values are those of a paper, a method or a model."""

PRESETS = {
    ("build_shapes.yaml", "steps"): "of the smaller model that drafts for the shipped one",
    ("build_shapes.yaml", "batch_size"): "of the shipped CLIP, unlike the shipped classifier's",
    ("build_shapes.yaml", "lr"): "of the shipped CLIP, unlike the shipped classifier's",
    (
        "build_shapes.yaml",
        "options",
    ): "data, features and precision of the shipped draft's training",
    ("build_shapes.yaml", "further"): "cycles of the shipped MAR's training",
    ("build_shapes.yaml", "size"): "of the shapes in their last",
    ("data/file.yaml", "limit"): "an evaluation takes 64 prompts of any data",
    ("rule/grouped.yaml", "k"): "the size of the table of neighbours, which is the default",
    ("prepare.yaml", "limit"): "what suits the model's family",
    ("loss/parallel.yaml", "regression"): "a draft of several slots starts from nothing",
    ("drafter/mar_large.yaml", "size"): "what the file is named after",
}
"""Other presets: file and argument, and why the value is not the default."""

OTHER_SCRIPTS = {"bench", "calibrate", "tune"}
"""Scripts that run `eval.yaml`'s options on other prompts."""


class Value(NamedTuple):
    """A value of conf/ for an argument that has a default."""

    file: str
    target: str
    argument: str
    value: Any
    default: Any


def nodes(value: Any) -> Iterator[DictConfig]:
    """All `_target_` nodes in a configuration, nested ones too."""
    if isinstance(value, DictConfig):
        if "_target_" in value:
            yield value
        inside = [value._get_node(key) for key in value]
    else:
        inside = [value._get_node(index) for index in range(len(value))]
    for inner in inside:
        if isinstance(inner, DictConfig | ListConfig) and isinstance(inner._content, dict | list):
            yield from nodes(inner)


def raw(cfg: DictConfig, key: str) -> Any:
    """A value as it is written."""
    node = cfg._get_node(key)
    if isinstance(node, DictConfig | ListConfig) and isinstance(node._content, dict | list):
        return OmegaConf.to_container(node)
    return node._value()  # type: ignore[union-attr]


def written(path: Path, cfg: DictConfig, value: Any) -> list[Any]:
    """A value, or what the option that it interpolates is set to: in the same file, else by the
    scripts that take the file's group.
    """
    option = re.fullmatch(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
    if option is None:
        return [] if isinstance(value, str) and "${" in value else [value]
    own = path.parent == CONF or "@package _global_" in path.read_text(encoding="utf-8")
    places = [cfg] if own and option[1] in cfg else scripts(path.parent.name)
    found = [raw(place, option[1]) for place in places if option[1] in place]
    return [value for value in found if not (isinstance(value, str) and "${" in value)]


def scripts(group: str) -> list[DictConfig]:
    """The configurations of the scripts whose defaults name a group; `eval` takes what they pass
    over.
    """
    found = {name: load(CONF / f"{name}.yaml") for name in SCRIPTS if name not in OTHER_SCRIPTS}
    naming = [
        cfg for cfg in found.values() if any(group in entry for entry in cfg.get("defaults", []))
    ]
    return naming or [found["eval"]]


def load(path: Path) -> DictConfig:
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    return cfg


def defaults(target: str) -> dict[str, Any]:
    """The arguments of a `_target_` that have a default."""
    call = hydra.utils.get_object(target)
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.default is not parameter.empty
    }
    fields = dataclasses.fields(call) if dataclasses.is_dataclass(call) else ()
    for field in fields:
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def values(path: Path) -> Iterator[Value]:
    cfg, file = load(path), str(path.relative_to(CONF))
    for node in nodes(cfg):
        target = raw(node, "_target_")
        for name, default in defaults(target).items():
            if name in node:
                for value in written(path, cfg, raw(node, name)):
                    yield Value(file, target, name, value, default)
    for target in BY_OPTIONS.get(file.removesuffix(".yaml"), []):
        for name, default in defaults(target).items():
            if name in cfg:
                yield Value(file, target, name, raw(cfg, name), default)


def same(value: Any, default: Any) -> bool:
    if isinstance(default, tuple | list) and isinstance(value, list):
        return len(default) == len(value) and all(map(same, value, default))
    if isinstance(default, Path):
        return Path(value) == default
    return bool(value == default)


FILES = [
    path
    for path in sorted(CONF.rglob("*.yaml"))
    if path.parent == CONF or path.parent.name not in PRESET_GROUPS
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_a_value_of_conf_is_the_default_or_a_preset(path: Path) -> None:
    differing = [
        found
        for found in values(path)
        if not same(found.value, found.default) and (found.file, found.argument) not in PRESETS
    ]
    assert differing == []


@pytest.mark.slow
def test_every_preset_differs_from_its_default() -> None:
    found = {
        (value.file, value.argument)
        for path in FILES
        for value in values(path)
        if not same(value.value, value.default)
    }
    assert set(PRESETS) <= found


@pytest.mark.slow
def test_the_comparison_finds_differences() -> None:
    compared = {(value.file, value.argument) for path in FILES for value in values(path)}
    assert len(compared) > 60
    assert ("train_draft.yaml", "lr") in compared and ("eval.yaml", "warmup") in compared


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_comments_fit_into_100_columns(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "# " in line and len(line) > 100] == []
