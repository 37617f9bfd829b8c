"""Scores that another program computed from a run's images (`scores=FILE.csv`)."""

import io
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
    import pandas as pd  # takes half a second

    try:
        text = regular_file(Path(path).expanduser()).read_text(encoding="utf-8-sig")
        rows = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
        if list(rows) != COLUMNS:
            raise ValueError(f"it begins with {','.join(rows)}")
        values = rows.assign(value=pd.to_numeric(rows["value"].str.strip())).pivot(
            index="id", columns="name", values="value"
        )
    except (OSError, ValueError) as problem:
        raise _wrong(path, f"cannot be read ({reason(problem)})") from None
    if np.isinf(values.to_numpy(np.float64)).any():
        raise _wrong(path, "has an infinite value")
    for name in values:
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name in taken():
            raise _wrong(path, f"names a score {name!r}, which is taken or no name")
    for wrong in rows.groupby("name")["id"].agg(lambda scored: {*scored} ^ {*ids}):
        if wrong:
            raise _wrong(path, f"lacks, or alone has, the prompts {', '.join(sorted(wrong)[:3])}")
    scores: Scores = values.to_dict()
    return scores


def intervals(scores: Scores) -> dict[str, Interval]:
    """The mean of each score over the prompts that it applies to, with its interval."""
    means = {}
    for name, by_prompt in scores.items():
        values = np.array(list(by_prompt.values()))
        means[name] = bootstrap.mean(values[~np.isnan(values)])
    return means


def taken() -> set[str]:
    """Columns that results.parquet has of its own, and the keys of our metrics."""
    columns = {"id", "text", "tokens", "rounds", "seconds", "accepted", "tested", "features"}
    measured = (metric for metric in table.METRICS if not metric.imported)
    names = [name for metric in measured for name in (metric.key, *metric.columns)]
    return columns | set(names)


def _wrong(path: str, problem: str) -> TemperaError:
    return TemperaError(
        f"{path} {problem}: give a CSV file id,name,value with a row for every prompt and score.",
        option="scores",
    )
