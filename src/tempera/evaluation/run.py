"""An evaluation, from prompts to metrics.json: generate, time, score the pictures. An interrupted
evaluation resumes where it stopped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tempera.data.prompts import Prompt
from tempera.decoding.compiled import forget
from tempera.evaluation import latency
from tempera.evaluation.generate import generate, restore_pictures, todo
from tempera.evaluation.latency import SpeedProtocol, whole_batches
from tempera.evaluation.pipeline import Pipeline, record_columns
from tempera.evaluation.run_directory import made_by
from tempera.metrics import table
from tempera.metrics.acceptance import acceptance
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Evaluator, Pictures
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.metrics.scores import Scores
from tempera.metrics.scores import intervals as intervals_of
from tempera.runtime.distributed import Processes
from tempera.runtime.files import sha256_file, write_json
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Numbers, Row, Store, write_table


@dataclass(frozen=True)
class RunPlan:
    """One run: where it is written, and how its images are decoded.

    Attributes:
        directory: the run directory, which the run has claimed
            (`tempera.evaluation.run_directory.claim`).
        name: how reports name the run.
        settings: the run's identity (`tempera.evaluation.run_identity`).
        about: other facts to record.
        batch_size: number of prompts decoded together.
        shrinks: decode fewer together if the memory is too small, instead of stopping.
        diagnostics: record TV(p, q), the TV and KL bounds, and how certain the target is.
        replays: keep the decodes of this many first prompts round by round, for report.html; images
            that already exist get no replay.
    """

    directory: Path
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    batch_size: int
    diagnostics: bool
    replays: int
    shrinks: bool = False

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
        evaluator: measures the pictures; it was checked before any weights were read.
        protocol: what is timed.
        processes: share the work.
        scores: that were computed elsewhere (`tempera.metrics.scores`).
    """

    plan: RunPlan
    pipeline: Pipeline
    prompts: Sequence[Prompt]
    evaluator: Evaluator
    protocol: SpeedProtocol
    processes: Processes
    scores: Scores = field(default_factory=dict)


def evaluate(
    run: Evaluation, before_timing: Callable[[], object] = lambda: None
) -> dict[str, Any] | None:
    """Generate, time and score; write results.parquet, and metrics.json, which marks a run as
    finished.

    Args:
        run: what to do.
        before_timing: called before the first timing; returns when nothing else uses the machine.

    Returns:
        The content of metrics.json; None in processes other than the main one.

    Raises:
        TemperaError: the directory cannot be written, or decoding failed.
    """
    plan = run.plan
    pipeline = run.pipeline
    prompts = run.prompts
    protocol = run.protocol
    if run.processes.is_main:
        run.evaluator.fetch()
    rows = _generated(plan, pipeline, prompts, run.processes)
    if not run.processes.is_main:
        return None
    pictured = restore_pictures(pipeline, rows, plan.directory, plan.made_by)
    before_timing()
    timings = _timed(plan, pipeline, prompts[: protocol.prompts], protocol.warmup)
    once = min(protocol.warmup, 1)
    larger: dict[int, list[Row]] = {
        size: _timed(plan, pipeline, whole_batches(prompts, protocol.prompts, size), once, size)
        for size in protocol.batches
    }
    scores: dict[str, Row] = {}
    metrics: dict[str, Interval] = {}
    scorers: dict[str, list[str]] = {}
    if pictured:
        scores, metrics, scorers = _evaluated(plan, pipeline, prompts, run.evaluator)
    metrics = acceptance(rows) | metrics | _included(run.scores, scores)
    if timings:
        metrics |= latency.speed(timings, len(rows[0]["tokens"]))
    metrics |= latency.batch_speedups(larger)
    result = {
        "name": plan.name,
        "settings": dict(plan.settings),
        "images": len(rows),
        "grid": list(pipeline.target.grid),
        "metrics": {name: _plain(interval.as_dict()) for name, interval in metrics.items()},
        "scorers": scorers,
        **_profiles(rows),
        "memory": max(row["memory"] for row in rows),
        "time": _plain(latency.breakdown(timings)) if timings else {},
        "about": dict(plan.about),
    }
    results = plan.directory / "results.parquet"
    write_table(results, _results(rows, timings, scores), plan.made_by)
    result["results"] = sha256_file(results)
    write_json(plan.directory / "metrics.json", result)
    return result


def _included(own: Scores, scores: dict[str, Any]) -> dict[str, Any]:
    """Add scores that were computed elsewhere to those of each prompt; returns their metrics."""
    for name, values in own.items():
        for prompt, value in values.items():
            scores.setdefault(prompt, {})[name] = value
    table.forget()
    table.include(own)
    return intervals_of(own)


def _generated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], processes: Processes
) -> list[Row]:
    """Generate the missing images and return all records, in the prompts' order."""
    store = Store(plan.directory / "records", plan.made_by, record_columns(pipeline.target))
    share = prompts[processes.rank :: processes.count]
    waiting = sum(map(len, todo(store, share, plan.batch_size)))
    length = pipeline.target.length
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
            batches = todo(store, share, size)
            generate(pipeline, batches, plan.directory, store, plan.diagnostics, bar.update, first)

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


def _timed(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], warmup: int, batch_size: int = 1
) -> list[Row]:
    """Timings of the prompts in batches, stored separately per machine and batch size."""
    if not prompts:
        return []
    batch = f"-batch-{batch_size}" if batch_size > 1 else ""
    place = plan.directory / "timings" / f"{latency.machine(pipeline.device)}{batch}"
    store = Store(place, plan.made_by, latency.COLUMNS)
    groups = prompts[::batch_size]
    with tqdm(
        desc="timing", total=len(store.missing([prompt.id for prompt in groups])), leave=False
    ) as bar:
        return latency.measure(pipeline, prompts, store, warmup, lambda _: bar.update(), batch_size)


def _evaluated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], evaluator: Evaluator
) -> tuple[dict[str, Row], dict[str, Interval], dict[str, list[str]]]:
    """Scores by prompt id, with pseudo-values of metrics of the whole set; the quality metrics; and
    what measured each: the identities of its networks and, for a distance, of the real pictures.
    All are empty if the evaluator has no networks.
    """
    scores: dict[str, Row] = {}
    metrics: dict[str, Interval] = {}
    scorers: dict[str, list[str]] = {}

    def picture(prompt: Prompt) -> Pictures:
        return read_picture(picture_path(plan.directory, prompt.id), plan.made_by)

    for networks in evaluator.load(pipeline.device):
        folder = plan.directory / f"evaluated-{networks.identity or evaluator.identity}"
        store = Store(folder, plan.made_by, {"features": Numbers(needed=False)})
        scored = score_pictures(networks, prompts, picture, store)
        rows = [scored[prompt.id] for prompt in prompts]
        reference = reference_features(evaluator, networks, picture(prompts[0]).shape[-1])
        measured = quality(rows, networks, reference, evaluator.resamples, pipeline.device)
        metrics |= measured
        for key in measured:
            scorers[key] = [networks.identity or evaluator.identity]
            if key in networks.distances:
                scorers[key].append(evaluator.identity)
        for place, row in enumerate(rows):
            values = scores.setdefault(row["id"], {})
            values.update(row)
            for key, interval in measured.items():
                if interval.pseudovalues is not None:
                    values[key] = float(interval.pseudovalues[place])
    return scores, metrics, scorers


def _profiles(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Means over all images by depth of the draft, by tenth of the image in the order of decoding,
    and by place in the image; None where nothing was tested.

    Returns:
        `acceptance_by_depth`, `acceptance_by_tenth`, `acceptance_by_place` (the share of images
        whose token is an accepted draft), `rounds_by_tokens` (the share of rounds with 1, 2, …
        tokens; the last round of an image is cut at its end and counts as one more) and
        `proximity_by_place` (the size of LANTERN's proximity set; empty without).
    """

    def total(name: str) -> Array:
        return np.sum([row[name] for row in rows], axis=0) if name in rows[0] else np.zeros(0)

    rounds = sum(row["rounds"] for row in rows)
    drafted = np.mean([np.array(row["depth"]) > 0 for row in rows], axis=0)
    proximity: list[float | None] = []
    measured = [row["proximity_by_place"] for row in rows if "proximity_by_place" in row]
    if measured:
        sizes = np.array(measured, np.float64)  # NaN where no draft was tested
        proximity = _shares(np.nansum(sizes, axis=0), (~np.isnan(sizes)).sum(axis=0))
    return {
        "acceptance_by_depth": _shares(total("accepted"), total("tested")),
        "acceptance_by_tenth": _shares(total("accepted_by_tenth"), total("tested_by_tenth")),
        "acceptance_by_place": drafted.tolist(),
        "rounds_by_tokens": list(-np.diff([rounds, *total("accepted"), 0]) / rounds),
        "proximity_by_place": proximity,
    }


def _shares(parts: Array, wholes: Array) -> list[float | None]:
    """part ÷ whole, element by element; None where the whole is 0."""
    shares: list[float | None] = []
    for part, whole in zip(parts, wholes, strict=True):
        shares.append(float(part / whole) if whole else None)
    return shares


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, None for NaN and infinite ones: JSON has neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _results(
    rows: Sequence[Row], timings: Sequence[Row], scores: Mapping[str, Row]
) -> list[dict[str, Any]]:
    """The rows of results.parquet: a prompt's record but for its tokens, its latencies if it was
    timed, its scores.
    """
    timed = {row["id"]: {"latency_ar": row["ar"], "latency": row["method"]} for row in timings}
    results = []
    for row in rows:
        name = row["id"]
        values = row | timed.get(name, {}) | scores.get(name, {})
        result: dict[str, Any] = {"id": name, "latency_ar": None, "latency": None}
        for column, value in values.items():
            if column not in ("id", "tokens", "features"):
                result[column] = value
        results.append(result)
    return results
