"""Rounds of several models and methods in one table: a row for each method, batch size, and kind of
steps (eager or compiled). A row that cannot be measured says why, and the next one follows.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from tempera.errors import BenchmarkTooLarge, TemperaError, shortened
from tempera.evaluation.benchmark import (
    BenchmarkColumn,
    BenchmarkPlan,
    is_out_of_memory,
    measure_column,
    milliseconds,
)
from tempera.evaluation.pipeline import Method
from tempera.targets.transformer import TransformerTarget

T = TypeVar("T")

HEADINGS = (
    "model",
    "method",
    "batch",
    "steps",
    "AR, ms",
    "its limit",
    "round, ms",
    "draft + target + rest",
    "speed-up ÷ length",
    "GiB",
)
"""Headings of the table. The limit is that of memory bandwidth, and `rest` is verification and
commit.
"""


@dataclass(frozen=True)
class BenchmarkJob:
    """Methods to time on one target.

    Attributes:
        model: the target's name in the table.
        make_target: builds the target, on its device.
        methods: what builds each method on the target, by the method's name in the table; called
            again for the compiled target.
    """

    model: str
    make_target: Callable[[], TransformerTarget]
    methods: Mapping[str, Callable[[TransformerTarget], Method]]


@dataclass(frozen=True)
class TableRow:
    """One row: `column` with the timings, or `problem` with the reason why there are none."""

    model: str
    method: str
    batch_size: int
    compiled: bool
    column: BenchmarkColumn | None = None
    problem: str | None = None

    @property
    def steps(self) -> str:
        """The kind of steps."""
        return "compiled" if self.compiled else "eager"


@dataclass(frozen=True)
class BenchmarkTable:
    """What was measured.

    Attributes:
        machine: the device, dtype, bandwidth and day.
        rows: in the order in which they were measured.
    """

    machine: str
    rows: list[TableRow]

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON."""
        return asdict(self)

    def cells(self) -> list[tuple[str, ...]]:
        """The table's rows as text, under `HEADINGS`."""
        return [_cells(row) for row in self.rows]

    def markdown(self) -> str:
        """The table in Markdown, with what was measured below it."""
        lines = [HEADINGS, ("---",) * len(HEADINGS), *self.cells()]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return (
            f"{table}\n\n{self.machine}. Medians in milliseconds. The limit of AR is the time to "
            "read weights and cache once. Speed-up ÷ accepted length is AR ÷ round, of at most "
            "AR ÷ target.\n"
        )


def places(job: BenchmarkJob, plan: BenchmarkPlan) -> list[tuple[bool, str, int]]:
    """The rows of a job: compiled or not, method, and batch size, in the order of measuring."""
    return [
        (compiled, name, size)
        for compiled in plan.kinds
        for name in job.methods
        for size in plan.batch_sizes
    ]


def measure_rows(
    jobs: Sequence[BenchmarkJob],
    plan: BenchmarkPlan,
    speed: float,
    minutes: float | None = None,
    progress: Callable[[str], None] = lambda part: None,
) -> Iterator[TableRow]:
    """Time the jobs' methods, row by row.

    Args:
        jobs: what to time.
        plan: what to measure in each row, and how often.
        speed: the device's bandwidth in bytes per second.
        minutes: rows that would start later than this are left out; None measures all.
        progress: called with the name of each part before it is measured.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes

    def attempted(work: Callable[[], T]) -> tuple[T | None, str | None]:
        if end is not None and time.monotonic() >= end:
            return None, f"left out: {minutes:g} minutes were over"
        return _attempted(work)

    for job in jobs:
        progress(f"{job.model}: weights")
        target, problem = attempted(job.make_target)
        if target is None:
            for compiled, name, size in places(job, plan):
                yield TableRow(job.model, name, size, compiled, problem=problem)
            continue
        for compiled in plan.kinds:
            if compiled:
                target.compile()
            for name, make in job.methods.items():
                made = cache(partial(make, target))
                told = partial(_tell, progress, f"{job.model}, {name}, ")
                for size in plan.batch_sizes:
                    measure = partial(_measured, target, made, plan, size, speed, told)
                    column, problem = attempted(measure)
                    yield TableRow(job.model, name, size, compiled, column, problem)
        del target, made, told, measure
        if True in plan.kinds:
            torch.compiler.reset()
        _free_memory()


def _tell(progress: Callable[[str], None], row: str, part: str) -> None:
    progress(row + part)


def _measured(
    target: TransformerTarget,
    make_method: Callable[[], Method],
    plan: BenchmarkPlan,
    batch_size: int,
    speed: float,
    progress: Callable[[str], None],
) -> BenchmarkColumn:
    return measure_column(target, make_method(), plan, batch_size, speed, progress)


def _attempted(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The work's result, or one line that says why there is none: an unknown machine that fails in
    one row may do well in the next.
    """
    try:
        return work(), None
    except BenchmarkTooLarge:
        problem = "out of memory"
    except TemperaError as error:
        problem = str(error)
    except Exception as error:
        cause = f"failed with {type(error).__name__}: {error}"
        problem = "out of memory" if is_out_of_memory(error) else shortened(cause, most=200)
    _free_memory()  # once the exception, which holds the tensors, is gone
    return None, problem


def _free_memory() -> None:
    """Free what nothing uses any more: reference cycles, and the GPU allocator's spare memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _cells(row: TableRow) -> tuple[str, ...]:
    first = (row.model, row.method, str(row.batch_size), row.steps)
    column = row.column
    if column is None:
        return (*first, row.problem or "", *[""] * (len(HEADINGS) - len(first) - 1))
    parts = {name: part.median for name, part in column.parts.items()}
    rest = parts["verify"] + parts["commit"]
    return (
        *first,
        milliseconds(column.ar.median),
        f"{milliseconds(column.limit)} ({column.ar.median / column.limit:.1f}×)",
        milliseconds(column.method.median),
        " + ".join(map(milliseconds, (parts["draft"], parts["target"], rest))),
        f"{column.ratio:.2f} of {column.ratio_limit:.2f}",
        f"{column.memory / 2**30:.1f}",
    )
