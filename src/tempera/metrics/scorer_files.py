"""What public scorers of benchmarks write, read back: a number for each picture, as the scorer
counts it. Where each writes a picture is known from `tempera.data.layouts`.

`hpsv2.evaluate` writes no file, only means: `metrics.names=[hps]` computes its scores.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tempera.data.layouts import Dpg, GenEval
from tempera.data.prompts import Prompt, rows_of, text_of
from tempera.errors import TemperaError
from tempera.metrics.table import Metric, entry
from tempera.runtime.files import read_text, regular_file

Scores = dict[str, dict[str, float]]
"""Values by prompt id, by name of the score; NaN where a score does not apply to a prompt."""


@dataclass(frozen=True)
class Given:
    """Scores of pictures, and what they are.

    Attributes:
        values: by name.
        metrics: made of them.
    """

    values: Scores
    metrics: Sequence[Metric]


def geneval(file: Path, prompts: Sequence[Prompt]) -> Given:
    """results.jsonl of GenEval's evaluate_images.py: whether a picture is correct.

    The metric `geneval` is the scorer's overall score, the mean over its six tasks of the share of
    correct pictures; `geneval_<task>` are these shares.

    Raises:
        TemperaError: a row is broken or of another picture or prompt, or one is missing or there
            twice.
    """
    samples = GenEval.by_sample(prompts)
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, row in rows_of(regular_file(file)):
        if not _is_geneval(row):
            raise _wrong(file, f"has no filename, tag, prompt and correct in line {number}")
        picture = PurePosixPath(row["filename"])
        folder, sample = picture.parent.parent.name, picture.stem
        is_numbers = folder.isdecimal() and sample.isdecimal()
        key = (f"{int(folder):05d}", int(sample)) if is_numbers else (folder, 0)
        prompt = samples.get(key)
        name = f"{folder}-{sample}" if prompt is None else prompt.id
        if prompt is not None and text_of(row["prompt"]) != prompt.text:
            raise _wrong(file, f"has a picture {name} of '{row['prompt']}', not '{prompt.text}'")
        rows.append((name, row))
    _check_names(file, [name for name, _ in rows], [prompt.id for prompt in prompts])
    tasks = Counter(row["tag"] for _, row in rows)
    values: Scores = {"geneval": {}, "geneval_weight": {}}
    for name, row in rows:
        values["geneval"][name] = float(row["correct"])
        values["geneval_weight"][name] = 1 / tasks[row["tag"]]
    metrics = [replace(entry("geneval", True), weight="geneval_weight")]
    for task in tasks:
        score = f"geneval_{task}"
        own = {name: float(row["correct"]) for name, row in rows if row["tag"] == task}
        values[score] = dict.fromkeys(values["geneval"], np.nan) | own
        metrics.append(replace(entry(score, True), in_report=False))
    return Given(values, metrics)


def _is_geneval(row: object) -> bool:
    """Whether a row is one of GenEval's."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("correct"), bool)
        and all(isinstance(row.get(name), str) for name in ("filename", "tag", "prompt"))
    )


def dpg(file: Path, prompts: Sequence[Prompt]) -> Given:
    """The text file of DPG-Bench's compute_dpg_bench.py: a line `path, score of each picture, their
    mean` for each grid, before the scorer's own summary. The metric `dpg` is 100 times the mean.

    Raises:
        TemperaError: as of `geneval`, or a line has another number of scores than the run has
            pictures of its prompt.
    """
    groups = Dpg.groups(prompts)
    count = len(next(iter(groups.values())))
    values: dict[str, float] = {}
    names = []
    for line in _before_summary(file):
        listed, *numbers = line.rsplit(", ", count + 1)
        name = PurePosixPath(listed).name.partition(".")[0]
        names.append(name)
        try:
            *scores, mean = map(float, numbers)
        except ValueError:
            scores, mean = [], 0.0
        if len(scores) != count or abs(np.mean(scores) - mean) > 1e-6:
            raise _wrong(
                file, f"does not have the scores of {count} pictures and their mean for {name}"
            )
        for prompt, score in zip(groups.get(name, []), scores, strict=False):
            values[prompt.id] = 100 * score
    _check_names(file, names, list(groups))
    return Given({"dpg": values}, [entry("dpg", True)])


def _before_summary(file: Path) -> Iterator[str]:
    """The lines of pictures."""
    for line in read_text(regular_file(file)).splitlines():
        if line.startswith("Model: "):
            return
        if line.strip():
            yield line


def geneval2(file: Path, prompts: Sequence[Prompt]) -> Given:
    """The JSON file of GenEval 2's evaluation.py: for each prompt, in the run's order, the scores
    of its questions. `geneval2_am` is 100 times the mean over prompts of their arithmetic mean,
    `geneval2_gm` of their geometric mean: Soft-TIFA's, if the scorer was run with that method.

    Raises:
        TemperaError: the file is no list of lists of numbers from 0 to 1, or has more or fewer than
            the run has prompts.
    """
    try:
        lists = json.loads(read_text(regular_file(file)))
        rows = [np.array(row, np.float64) for row in lists]
    except (ValueError, TypeError):
        raise _wrong(file, "is not a JSON list of lists of numbers") from None
    if len(rows) != len(prompts):
        raise _wrong(file, f"has the scores of {len(rows)} prompts, but the run has {len(prompts)}")
    values: Scores = {"geneval2_am": {}, "geneval2_gm": {}}
    for prompt, row in zip(prompts, rows, strict=True):
        if row.ndim != 1 or not len(row) or not ((row >= 0) & (row <= 1 + 1e-3)).all():
            raise _wrong(file, f"has no scores from 0 to 1 for {prompt.id}")
        values["geneval2_am"][prompt.id] = 100 * float(row.mean())
        values["geneval2_gm"][prompt.id] = 100 * float(row.prod() ** (1 / len(row)))
    return Given(values, [entry(name, True) for name in values])


READERS = {".jsonl": geneval, ".txt": dpg, ".json": geneval2}
"""By the ending of the file."""


def _check_names(file: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise TemperaError unless each picture is there once."""
    twice = sorted(name for name, count in Counter(found).items() if count > 1)
    missing = sorted({*wanted} - {*found})
    foreign = sorted({*found} - {*wanted})
    for names, what in (
        (twice, "has more than one row for"),
        (missing, "has no row for"),
        (foreign, "has rows for pictures that are not of this run, such as"),
    ):
        if names:
            listed = ", ".join(names[:3])
            raise _wrong(file, f"{what} {listed} ({len(names)} in all)")


def _wrong(file: Path, problem: str) -> TemperaError:
    return TemperaError(
        f"{file} {problem}: score exactly the pictures of this run, as eval/export.py lays them "
        "out.",
        option="scores",
    )
