"""The papers' tables (`paper_results.yaml`), and the runs that reproduce their rows."""

import itertools
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tempera.errors import TemperaError, shortened

DATA = Path(__file__).resolve().with_name("paper_results.yaml")
NOT_TABLES = ("papers", "groups", "values", "quantities")
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
    tables = [key for key in results() if key not in NOT_TABLES]
    if name not in tables:
        raise TemperaError(
            f"there is no paper.table={shortened(str(name))}; choose one of {', '.join(tables)}.",
            option="paper.table",
        )
    table: Mapping[str, Any] = results()[name]
    return table


def group(title: str) -> Mapping[str, Any]:
    """What a group of rows ran on: its model preset, its prompts (`data`) and, if the paper names
    them, further options, such as the drafter of continuous tokens. A list holds the values of
    several runs.
    """
    settings: Mapping[str, Any] = results()["groups"].get(title, {})
    return settings


def settings_of(title: str, model: str, method: str) -> dict[str, Any]:
    """The options of a group's own runs of a method; none on another model. Plain autoregression
    has no drafter.
    """
    settings = dict(group(title))
    if settings.pop("model", None) != model:
        return {}
    if method == "ar":
        settings.pop("drafter", None)
    return settings


def wanted(table: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a paper's row names, with the paper's values."""
    return {**(table.get("with") or {}), **line["run"]}


def ours(model: str, option: str, value: Any) -> Any:
    """The value of an option that stands on this model for the paper's."""
    replacements = results()["values"].get(model, {}).get(option, {})
    by_text = {str(paper): here for paper, here in replacements.items()}
    return by_text.get(str(value), value)


def cases(name: str, model: str) -> list[str]:
    """The command lines of the runs that fill a table on a model. They are those of its rows, or of
    the rows of this model if the paper has some, and the table's further `cases`. On a model of the
    paper's they have the settings of its groups.
    """
    table = find(name)
    lines = [*_row_lines(table, model), *_further_lines(table, model)]
    return list(dict.fromkeys(lines))


def _row_lines(table: Mapping[str, Any], model: str) -> list[str]:
    """The command lines of a table's rows: of the model's own groups if it has any, else of all."""
    groups = table.get("models") or {}
    lines = []
    for title in _groups_on(model, groups) or groups:
        for row in groups[title]:
            options = wanted(table, row)
            settings = settings_of(title, model, options["method"])
            lines += _lines(model, {**settings, **options})
    return lines


def _further_lines(table: Mapping[str, Any], model: str) -> list[str]:
    """The command lines of a table's `cases`, each method of a case with the settings of each of
    the model's groups.
    """
    titles = _groups_on(model, table.get("models") or {}) or [""]
    lines = []
    for case in table.get("cases") or []:
        options = dict(part.split("=", 1) for part in shlex.split(case))
        for method in options["method"].split(","):
            for title in titles:
                settings = settings_of(title, model, method)
                lines += _lines(model, {**settings, **options, "method": method})
    return lines


def _groups_on(model: str, titles: Iterable[str]) -> list[str]:
    """Those of the groups that ran on a model."""
    return [title for title in titles if group(title).get("model") == model]


def _lines(model: str, options: Mapping[str, Any]) -> list[str]:
    """The command lines of all combinations of the options' values."""
    choices = [_several(value) for value in options.values()]
    lines = []
    for values in itertools.product(*choices):
        parts = []
        for name, value in zip(options, values, strict=True):
            parts.append(f"{name}={_text(ours(model, name, value))}")
        lines.append(" ".join(parts))
    return lines


def _several(value: Any) -> list[Any]:
    """The values that an option takes in turn."""
    return value.split(",") if isinstance(value, str) else as_list(value)


def as_list(value: Any) -> list[Any]:
    """A list as it is, another value as a list of one."""
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
