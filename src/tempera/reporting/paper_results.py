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


def group(title: str) -> Mapping[str, str]:
    """The model preset, the prompts and, for continuous tokens, the drafter of a group of rows."""
    found: Mapping[str, str] = results()["groups"].get(title, {})
    return found


def wanted(table: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the run that a paper's row shows, with the paper's values."""
    return {**(table.get("with") or {}), **line["run"]}


def ours(model: str, option: str, value: Any) -> Any:
    """The value of an option that stands on this model for the paper's."""
    known = results()["values"].get(model, {}).get(option, {})
    return {str(paper): own for paper, own in known.items()}.get(str(value), value)


def cases(name: str, model: str) -> list[str]:
    """The command lines of the runs that fill a table on a model: those of its rows, or of the rows
    of this model if the paper has some, and the table's further `cases`.
    """
    table = find(name)
    groups = table.get("models") or {}
    mine = {title: lines for title, lines in groups.items() if group(title).get("model") == model}
    runs = [
        {option: [value] for option, value in wanted(table, line).items()}
        for lines in (mine or groups).values()
        for line in lines
    ]
    for case in table.get("cases") or []:
        options = (part.partition("=") for part in shlex.split(case))
        runs.append({option: values.split(",") for option, _, values in options})
    lines = []
    for run in runs:
        for values in itertools.product(*run.values()):
            named = dict(zip(run, values, strict=True))
            parts = [f"{name}={_text(ours(model, name, own))}" for name, own in named.items()]
            lines.append(" ".join(parts))
    return list(dict.fromkeys(lines))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
