"""An evaluation, from prompts to metrics.json, in three stages over a run directory: generate,
time, score. Each does what the directory lacks, so an interrupted evaluation resumes where it
stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tempera.data.prompts import Prompt
from tempera.decoding.compiled import forget
from tempera.decoding.interfaces import Target
from tempera.evaluation import latency
from tempera.evaluation.generate import generate, restore_pictures, todo
from tempera.evaluation.latency import SpeedProtocol, whole_batches
from tempera.evaluation.pipeline import Pipeline, record_columns
from tempera.evaluation.run_directory import RECORDS, made_by, write_prompts
from tempera.evaluation.score import Pictured, score
from tempera.evaluation.summary import summarise
from tempera.metrics.evaluators import Evaluator
from tempera.runtime.distributed import Processes
from tempera.runtime.row_store import Row, Store


@dataclass(frozen=True)
class RunPlan:
    """One run: where it is written, and how its images are decoded.

    Attributes:
        directory: the run directory, which the run has claimed
            (`tempera.evaluation.run_directory.claim`), with its `facts`.
        settings: the run's identity (`tempera.evaluation.run_identity`).
        batch_size: number of prompts decoded together.
        shrinks: decode fewer together if the memory is too small, instead of stopping.
        diagnostics: record TV(p, q), the TV and KL bounds, and how certain the target is.
        replays: keep the decodes of this many first prompts round by round, for report.html; images
            that already exist get no replay.
        shared: where the runs of a sweep share the timings of plain autoregression, named by what
            these depend on; None times it in turn with the method.
    """

    directory: Path
    settings: Mapping[str, Any]
    batch_size: int
    diagnostics: bool
    replays: int
    shrinks: bool = False
    shared: Path | None = None

    @property
    def made_by(self) -> str:
        """What the parts of the run carry."""
        return made_by(self.settings)


@dataclass(frozen=True)
class Evaluation:
    """A run whose parts are built.

    Attributes:
        plan: where it is written, and how its images are decoded.
        pipeline: the model with its method.
        prompts: to decode, to time and to score.
        scorers: score the pictures; they were checked before any weights were read.
        protocol: what is timed.
        processes: share the work.
    """

    plan: RunPlan
    pipeline: Pipeline
    prompts: Sequence[Prompt]
    scorers: Sequence[Evaluator]
    protocol: SpeedProtocol
    processes: Processes


def facts(name: str, pipeline: Pipeline, protocol: SpeedProtocol) -> dict[str, Any]:
    """What run.json says beside the identity, so that the run is read without its model: `name`, as
    reports call it; whether its method is `exact`; `length`, `grid` and `vocab` of an image's
    tokens (`vocab` None of continuous ones); `machine`, and the batch sizes that are `timed` there.
    """
    target = pipeline.target
    return {
        "name": name,
        "exact": pipeline.method.exact,
        "length": target.length,
        "grid": list(target.grid),
        "vocab": target.vocab_size if isinstance(target, Target) else None,
        "machine": latency.machine(pipeline.device),
        "timed": [1, *protocol.batches] if protocol.prompts else [],
    }


def evaluate(
    run: Evaluation, before_timing: Callable[[Sequence[Row]], object] = lambda records: None
) -> dict[str, Any] | None:
    """Generate, time and score; write results.parquet, and metrics.json, which marks a run as
    finished.

    Args:
        run: what to do.
        before_timing: called with the records of all images when these are written, before the
            first timing; returns when nothing else uses the machine.

    Returns:
        The content of metrics.json; None in processes other than the main one.

    Raises:
        TemperaError: the directory cannot be written, or decoding failed.
    """
    plan = run.plan
    pipeline = run.pipeline
    prompts = run.prompts
    if run.processes.is_main:
        write_prompts(plan.directory, prompts, plan.made_by)
        for scorer in run.scorers:
            scorer.fetch()
    rows = _generated(plan, pipeline, prompts, run.processes)
    if not run.processes.is_main:
        return None
    pictured = restore_pictures(pipeline, rows, plan.directory, plan.made_by)
    before_timing(rows)
    _time(run)
    if pictured:
        own = Pictured(plan.directory, plan.made_by, prompts)
        score(own, run.scorers, pipeline.device)
    return summarise(plan.directory)


def _time(run: Evaluation) -> None:
    """Time what is to be timed."""
    protocol = run.protocol
    _timed(run, run.prompts[: protocol.prompts])
    for size in protocol.batches:
        _timed(run, whole_batches(run.prompts, protocol.prompts, size), size)


def _generated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], processes: Processes
) -> list[Row]:
    """Generate the missing images and return all records, in the prompts' order."""
    target = pipeline.target
    columns = record_columns(
        target.length, target.vocab_size if isinstance(target, Target) else None
    )
    store = Store(plan.directory / RECORDS, plan.made_by, columns)
    share = prompts[processes.rank :: processes.count]
    waiting = len(todo(store, share))
    length = target.length
    first = {prompt.id for prompt in prompts[: plan.replays]}
    with tqdm(
        desc="generating",
        total=len(share) * length,
        initial=(len(share) - waiting) * length,
        unit="token",
        unit_scale=True,
        disable=not processes.is_main,
    ) as bar:

        def decode(size: int) -> None:
            generate(
                pipeline,
                todo(store, share),
                size,
                plan.directory,
                store,
                plan.diagnostics,
                bar.update,
                first,
            )

        if plan.shrinks:
            _with_smaller_batches(decode, min(plan.batch_size, max(1, len(share))))
        else:
            decode(plan.batch_size)
        processes.wait()
    if not processes.is_main:
        return []
    records = store.rows()
    return [records[prompt.id] for prompt in prompts]


def _with_smaller_batches(decode: Callable[[int], None], size: int) -> None:
    """Decode in batches of `size`; of half as many prompts each time that the memory runs out."""
    from accelerate.utils import find_executable_batch_size  # it imports transformers

    def smaller() -> int:
        nonlocal size
        forget()  # compiled rounds of the larger batch
        size //= 2
        return size

    find_executable_batch_size(decode, size, smaller)()


def _timed(run: Evaluation, prompts: Sequence[Prompt], batch_size: int = 1) -> None:
    """Time the prompts in batches; timings lie apart by machine and batch size."""
    if not prompts:
        return
    plan = run.plan
    machine = latency.machine(run.pipeline.device)
    directory = plan.directory / "timings" / latency.timing_name(machine, batch_size)
    store = Store(directory, plan.made_by, latency.COLUMNS)
    plain = None
    if plan.shared is not None:
        shared = plan.shared / latency.timing_name(machine, batch_size)
        plain = Store(shared, plan.shared.name, latency.PLAIN)
    groups = prompts[::batch_size]
    width = run.protocol.width
    with tqdm(
        desc="timing", total=len(store.missing([prompt.id for prompt in groups])), leave=False
    ) as bar:
        latency.measure(
            run.pipeline, prompts, store, width, lambda _: bar.update(), batch_size, plain
        )
