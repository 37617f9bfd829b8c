"""Scores that another program computed from a run's images (`scores=FILE.csv`)."""

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tempera.errors import TemperaError
from tempera.metrics import bootstrap, table
from tempera.metrics.bootstrap import Interval
from tempera.runtime.files import reason, regular_file

COLUMNS = ["id", "name", "value"]
Scores = dict[str, dict[str, float]]
"""Values by prompt id, by name of the score; NaN where a score does not apply to a prompt."""


def read_scores(path: str | None, ids: Sequence[str]) -> Scores:
    """Read a CSV file with the columns id, name and value, a row for each prompt and score. An
    empty value says that the score does not apply to the prompt.

    Args:
        path: the file; None for no scores.
        ids: the ids of the run's prompts.

    Raises:
        TemperaError: a row has an unknown id, a name that is taken or no number, or one is missing
            or there twice.
    """
    if path is None:
        return {}
    try:
        text = regular_file(Path(path).expanduser()).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise _wrong(path, f"cannot be read ({reason(problem)})") from None
    known, found = set(ids), Scores()
    header, *rows = [row for row in csv.reader(text.splitlines()) if row] or [[]]
    if header != COLUMNS:
        raise _wrong(path, f"begins with {','.join(header) or 'nothing'}")
    for row in rows:
        if len(row) != len(COLUMNS):
            raise _wrong(path, f"has the row {','.join(row)}")
        prompt, name, value = row
        scores = found.setdefault(name, {})
        if prompt not in known or prompt in scores:
            kind = "two values" if prompt in known else "no prompt of this run, but a value"
            raise _wrong(path, f"has {kind} of {name} for {prompt}")
        scores[prompt] = _number(path, name, prompt, value)
    for name, scores in found.items():
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name in _taken():
            raise _wrong(path, f"names a score {name!r}, which is taken or no name")
        if missing := [prompt for prompt in ids if prompt not in scores]:
            raise _wrong(path, f"lacks {name} of {len(missing)} prompts, first {missing[0]}")
    return found


def intervals(scores: Scores) -> dict[str, Interval]:
    """The mean of each score over the prompts that it applies to, with its interval."""
    values = {name: np.array(list(found.values())) for name, found in scores.items()}
    return {name: bootstrap.mean(one[~np.isnan(one)]) for name, one in values.items()}


def _taken() -> set[str]:
    """Columns that results.parquet has of its own."""
    own = {"id", "text", "tokens", "rounds", "seconds", "accepted", "tested", "features"}
    measured = (metric for metric in table.METRICS if not metric.imported)
    return own | {name for metric in measured for name in (metric.key, *metric.columns)}


def _number(path: str, name: str, prompt: str, value: str) -> float:
    if not value.strip():
        return math.nan
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(path, f"has {value} for {name} of {prompt}, which is no number")
    return number


def _wrong(path: str, problem: str) -> TemperaError:
    return TemperaError(
        f"{path} {problem}: give a CSV file id,name,value with a row for every prompt and score.",
        option="scores",
    )
