"""The papers' tables (`paper_results.yaml`), and the runs that reproduce their rows."""

import itertools
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tempera.errors import TemperaError, shortened

DATA = Path(__file__).resolve().with_name("paper_results.yaml")
APART = ("papers", "groups", "values", "quantities")
"""Keys of paper_results.yaml that are not tables."""


@cache
def results() -> dict[str, Any]:
    """The contents of paper_results.yaml."""
    contents: Any = OmegaConf.to_container(OmegaConf.load(DATA))
    return dict(contents)


def find(name: Any) -> Mapping[str, Any]:
    """The table of this name.

    Raises:
        TemperaError: there is none.
    """
    tables = [one for one in results() if one not in APART]
    if name not in tables:
        raise TemperaError(
            f"there is no paper.table={shortened(str(name))}; choose one of {', '.join(tables)}.",
            option="paper.table",
        )
    found: Mapping[str, Any] = results()[name]
    return found


def group(title: str) -> Mapping[str, Any]:
    """What a group of rows ran on: its model preset, its prompts (`data`) and, if the paper names
    them, further options, such as the drafter of continuous tokens. A list holds the values of
    several runs.
    """
    found: Mapping[str, Any] = results()["groups"].get(title, {})
    return found


def settings_of(title: str, model: str, method: str) -> dict[str, Any]:
    """The options of a group's own runs of a method; none on another model. Plain autoregression
    has no drafter.
    """
    its = dict(group(title))
    if its.pop("model", None) != model:
        return {}
    if method == "ar":
        its.pop("drafter", None)
    return its


def wanted(table: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a paper's row names, with the paper's values."""
    return {**(table.get("with") or {}), **line["run"]}


def ours(model: str, option: str, value: Any) -> Any:
    """The value of an option that stands on this model for the paper's."""
    known = results()["values"].get(model, {}).get(option, {})
    return {str(paper): own for paper, own in known.items()}.get(str(value), value)


def cases(name: str, model: str) -> list[str]:
    """The command lines of the runs that fill a table on a model. They are those of its rows, or of
    the rows of this model if the paper has some, and the table's further `cases`. On a model of the
    paper's they have the settings of its groups.
    """
    table = find(name)
    groups = table.get("models") or {}
    mine = [title for title in groups if group(title).get("model") == model]
    lines = []
    for title in mine or groups:
        for line in groups[title]:
            options = wanted(table, line)
            settings = settings_of(title, model, options["method"])
            lines += _lines(model, {**settings, **options})
    titles = mine or [
        title for title in table.get("groups") or [] if group(title).get("model") == model
    ]
    for case in table.get("cases") or []:
        options = dict(part.split("=", 1) for part in shlex.split(case))
        for method in options["method"].split(","):
            for title in titles or [""]:
                settings = settings_of(title, model, method)
                lines += _lines(model, {**settings, **options, "method": method})
    return list(dict.fromkeys(lines))


def _lines(model: str, options: Mapping[str, Any]) -> list[str]:
    """The command lines of all combinations of the options' values."""
    values = [_several(value) for value in options.values()]
    lines = []
    for chosen in itertools.product(*values):
        named = dict(zip(options, chosen, strict=True))
        parts = [f"{name}={_text(ours(model, name, value))}" for name, value in named.items()]
        lines.append(" ".join(parts))
    return lines


def _several(value: Any) -> list[Any]:
    """The values that an option takes in turn."""
    return value.split(",") if isinstance(value, str) else as_list(value)


def as_list(value: Any) -> list[Any]:
    """A list as it is, another value as a list of one."""
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
