"""Scores that another program computed from a run's images (`scores=FILE`): our CSV file, or what
the scorer of a benchmark writes.
"""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.metrics.evaluators import Evaluator, Networks
from tempera.metrics.scorer_files import READERS, Given, Scores
from tempera.metrics.table import Metric, entry
from tempera.runtime.files import fingerprint, reason, regular_file

COLUMNS = ["id", "name", "value"]


def read_scores(path: str, ids: Sequence[str]) -> Scores:
    """Read a CSV file with the columns id, name and value, a row for each prompt and score. An
    empty value says that the score does not apply to the prompt.

    Args:
        path: the file.
        ids: the ids of the run's prompts.

    Raises:
        TemperaError: a row has an unknown id, a name that is taken or no number, or one is missing
            or there twice.
    """
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
            raise _wrong(
                path, f"has a score named {name!r}, which is already taken or not a valid name"
            )
    for wrong in rows.groupby("name")["id"].agg(lambda scored: {*scored} ^ {*ids}):
        if wrong:
            raise _wrong(
                path,
                f"has other prompts than the run, which differ in {', '.join(sorted(wrong)[:3])}",
            )
    scores: Scores = values.to_dict()
    return scores


class GivenScores(Evaluator):
    """`scores=FILE`: each picture's numbers that another program computed.

    Args:
        path: a file `id,name,value`, see `read_scores`, or a scorer's, by its ending: see
            `tempera.metrics.scorer_files`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._given = Given({}, [])

    @property
    @override
    def metrics(self) -> Sequence[Metric]:
        return self._given.metrics

    @override
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Read the file."""
        file = Path(self.path).expanduser()
        if read := READERS.get(file.suffix.lower()):
            self._given = read(file, prompts)
        else:
            values = read_scores(self.path, [prompt.id for prompt in prompts])
            self._given = Given(values, list(map(entry, values)))

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        def score(pictures: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
            columns = {}
            for name, values in self._given.values.items():
                own = [values[prompt.id] for prompt in prompts]
                columns[name] = torch.tensor(own, dtype=torch.float64)
            return columns

        identity = f"given-{fingerprint(self._given.values)}"
        yield Networks(scores=[score], distances={}, identity=identity, sees=False)


def taken() -> set[str]:
    """Columns that results.parquet has of its own, and the keys of our metrics."""
    columns = {"id", "text", "tokens", "rounds", "seconds", "accepted", "tested", "features"}
    measured = (metric for metric in table.METRICS if not metric.imported)
    names = [name for metric in measured for name in (metric.key, *metric.columns)]
    return columns | set(names)


def _wrong(path: str, problem: str) -> TemperaError:
    return TemperaError(
        f"{path} {problem}: give a CSV file id,name,value with a row for every prompt and score, "
        "or what a benchmark's scorer writes (.jsonl of GenEval, .json of GenEval 2, .txt of "
        "DPG-Bench).",
        option="scores",
    )
