"""An evaluation, from prompts to metrics.json: generate, time, evaluate, report. Interrupted
anywhere, it goes on where it was.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.evaluation import latency
from tempera.evaluation.generate import generate, restore_pictures, todo
from tempera.evaluation.latency import SpeedProtocol, batch_speedups, whole_batches
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.progress import Bar
from tempera.evaluation.run_directory import claim
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Array, Interval
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.quality import ENOUGH, evaluate_pictures, quality, reference_features
from tempera.reporting import figures
from tempera.reporting.console import print_results
from tempera.reporting.run_names import method_label
from tempera.runtime.distributed import Processes
from tempera.runtime.files import write_json
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Row, Store, write_table
from tempera.runtime.tracking import Tracker

SHOWN = 24
"""Pictures on grid.png: the first prompts, so that runs show the same ones."""


@dataclass(frozen=True)
class RunPlan:
    """What to measure, and how.

    Attributes:
        directory: the run directory.
        model: name of the model preset.
        settings: every option that results depend on, by its command-line name, and the identities
            of the networks; the run's identity.
        about: what else run.json notes.
        batch_size: prompts decoded together.
        diagnostics: record TV(p, q), the TV bound and KL.
    """

    directory: Path
    model: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    batch_size: int = 16
    diagnostics: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TemperaError(f"batch_size={self.batch_size} is too small: give at least 1.")


def evaluate(
    plan: RunPlan,
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    evaluator: Evaluator | None,
    protocol: SpeedProtocol,
    start_tracker: Callable[[], Tracker],
    processes: Processes,
) -> dict[str, float]:
    """Run the plan and write the run directory (see `tempera.evaluation.run_directory`).

    Returns:
        The metrics by name, without intervals; in processes other than the main one nothing.

    Raises:
        TemperaError: the evaluator does not fit, the directory is another run's or cannot be
            written, or decoding failed.
    """
    if evaluator is not None:
        evaluator.check(plan.model)
    claim(plan.directory, plan.settings, plan.about, write=processes.is_main)
    tracker = start_tracker()
    rows = _generated(plan, pipeline, prompts, processes)
    if not processes.is_main:
        return {}
    timings = _timed(plan, pipeline, prompts[: protocol.prompts], protocol.warmup)
    larger = {
        size: _timed(plan, pipeline, whole_batches(prompts, protocol.prompts, size), 0, size)
        for size in protocol.batches
    }
    verdicts, metrics = _evaluated(plan, pipeline, prompts, evaluator)
    metrics = acceptance(rows) | metrics
    result = _assemble(plan, rows, timings, metrics, evaluator)
    result["metrics"] |= batch_speedups(larger)
    _write(plan, pipeline, rows, timings, verdicts, result)
    _track(plan, tracker, rows, result)
    print_results(result["name"], result["metrics"], result["notes"])
    print(f"results in {plan.directory}")
    return {
        name: interval["value"]
        for name, interval in result["metrics"].items()
        if interval["value"] is not None
    }


def _generated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], processes: Processes
) -> list[Row]:
    """Generate what is missing; the records in the prompts' order."""
    store = Store(plan.directory / "records")
    waiting = todo(store, prompts, plan.batch_size)
    processes.wait()  # everyone has seen the same gaps
    missing = sum(map(len, waiting))
    mine = waiting[processes.rank :: processes.count]
    with Bar(
        len(prompts), len(prompts) - missing, pipeline.target.length, processes.is_main
    ) as bar:
        generate(pipeline, mine, plan.directory, store, plan.diagnostics, bar.advance)
    processes.wait()
    if not processes.is_main:
        return []
    found = store.rows()
    rows = [found[prompt.id] for prompt in prompts]
    restore_pictures(pipeline, rows, plan.directory)
    return rows


def _timed(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], warmup: int, batch_size: int = 1
) -> list[Row]:
    """Timings of the prompts in batches, kept apart by machine and batch size."""
    if not prompts:
        return []
    store = Store(
        plan.directory
        / "timings"
        / f"{latency.machine(pipeline.device)}{f'-batch-{batch_size}' if batch_size > 1 else ''}"
    )
    groups = prompts[::batch_size]
    with Bar(
        len(groups),
        len(groups) - len(store.missing([prompt.id for prompt in groups])),
        1,
        title="timing",
    ) as bar:
        return latency.measure(
            pipeline, prompts, store, warmup, lambda _: bar.advance(1, 1, 0), batch_size
        )


def _evaluated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], evaluator: Evaluator | None
) -> tuple[dict[str, Row], dict[str, Interval]]:
    """Verdicts by prompt id, and the quality metrics."""
    if evaluator is None:
        return {}, {}
    networks = evaluator.load(pipeline.device)
    store = Store(plan.directory / f"evaluated-{evaluator.identity}")
    verdicts = evaluate_pictures(
        networks,
        prompts,
        lambda prompt: read_picture(picture_path(plan.directory, prompt.id)),
        store,
    )
    reference = reference_features(evaluator, networks)
    return verdicts, quality(
        [verdicts[prompt.id] for prompt in prompts],
        reference,
        evaluator.neighbours,
        evaluator.resamples,
    )


def acceptance(rows: Sequence[Row]) -> dict[str, Interval]:
    """Metrics of the decoding itself; the prompts are the units of every interval."""
    column = {
        name: np.array([row[name] for row in rows], np.float64)
        for name in rows[0]
        if isinstance(rows[0][name], int | float)
    }
    tokens = np.array([len(row["tokens"]) for row in rows], np.float64)
    kept = np.array([sum(row["accepted"]) for row in rows], np.float64)
    metrics = {
        "accepted_length": bootstrap.ratio(tokens, column["rounds"]),
        "tau": bootstrap.ratio(kept, column["rounds"]),
        "throughput": bootstrap.ratio(tokens, column["seconds"]),
    }
    if "logprob" in column:
        metrics["logprob_per_token"] = bootstrap.ratio(column["logprob"], tokens)
    tested = np.array([sum(row["tested"]) for row in rows], np.float64)
    if tested.any():
        metrics["acceptance_rate"] = bootstrap.ratio(kept, tested)
    for name in ("residual_trials", "residual_failures"):
        if name in column:
            metrics[name] = bootstrap.mean(column[name])
    if "residual_trials" in column and (tested > kept).any():
        metrics["trials_per_rejection"] = bootstrap.ratio(column["residual_trials"], tested - kept)
    for name in ("tv", "tv_bound", "kl_per_token"):
        if name in column and not np.isnan(column[name]).all():
            metrics[name] = bootstrap.mean(column[name][~np.isnan(column[name])])
    if "logprob" in column and "logprob_squares" in column:
        metrics["logprob_deviation"] = _deviation(
            column["logprob"], column["logprob_squares"], tokens
        )
    return metrics


def _deviation(sums: Array, squares: Array, tokens: Array) -> Interval:
    """Standard deviation over all tokens, from each prompt's sum and sum of squares; prompts are
    the units of the interval.
    """

    def deviation(drawn: Array) -> Array:
        return np.sqrt(
            np.maximum(
                drawn @ squares / (drawn @ tokens) - (drawn @ sums / (drawn @ tokens)) ** 2, 0
            )
        )

    whole = np.ones((1, len(tokens)))
    return bootstrap.percentile(
        float(deviation(whole)[0]), deviation(bootstrap.counts(len(tokens), 1000)), len(tokens)
    )


def _assemble(
    plan: RunPlan,
    rows: Sequence[Row],
    timings: Sequence[Row],
    metrics: Mapping[str, Interval],
    evaluator: Evaluator | None,
) -> dict[str, Any]:
    """The content of metrics.json."""
    timing = latency.summary(timings, len(rows[0]["tokens"])) if timings else {}
    spreads = {
        name: timing.pop(name)
        for name in ("latency_ar", "latency", "speedup", "efficiency")
        if name in timing
    }
    tested, accepted = (
        np.array([row[name] for row in rows]).sum(0) for name in ("tested", "accepted")
    )
    intervals = {name: interval.as_dict() for name, interval in metrics.items()} | spreads
    return {
        "name": method_label(plan.settings),
        "settings": dict(plan.settings),
        "images": len(rows),
        "metrics": {name: _plain(interval) for name, interval in intervals.items()},
        "acceptance_by_depth": _shares(accepted, tested),
        "acceptance_by_tenth": _by_tenth(rows),
        "tv_by_depth": _shares(np.array([row["tv_sums"] for row in rows]).sum(0), tested)
        if "tv_sums" in rows[0]
        else [],
        "time": _plain(timing),
        "about": dict(plan.about),
        "notes": _notes(len(rows), evaluator is not None, timing),
    }


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    """The ratio at each depth; none where nothing was tested."""
    return [
        float(part / whole) if whole else None for part, whole in zip(parts, wholes, strict=True)
    ]


def _by_tenth(rows: Sequence[Row]) -> list[float | None]:
    """Acceptance in each tenth of the image in the order of decoding; nothing for records of before
    it was counted.
    """
    if not all("tested_by_tenth" in row for row in rows):
        return []
    tested, accepted = (
        np.array([row[f"{name}_by_tenth"] for row in rows]).sum(0)
        for name in ("tested", "accepted")
    )
    return _shares(accepted, tested)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """NaN as null, which JSON has."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _notes(images: int, evaluated: bool, timing: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    notes = []
    if evaluated and images < ENOUGH:
        notes.append(
            f"FID, KID, precision and recall need {ENOUGH} images or more; this run has {images}."
        )
    elif evaluated:
        notes.append(
            f"FID and recall depend on the number of images ({images}): compare runs of equal size."
        )
    if timing:
        parts = ", ".join(
            f"{part} {values['share']:.0%}" for part, values in timing["parts"].items()
        )
        apart = {
            name: 1000 * timing[name]
            for name in ("text_encoder", "image_decoder")
            if math.isfinite(timing[name])
        }
        outside = ", ".join(
            f"{name.replace('_', ' ')} {milliseconds:.0f} ms"
            for name, milliseconds in apart.items()
        )
        notes.append(f"Time of a round (in a decode of its own, synchronised): {parts}.")
        notes.append(f"Not part of the latency of an image: {outside}.")
    return notes


def _write(
    plan: RunPlan,
    pipeline: Pipeline,
    rows: Sequence[Row],
    timings: Sequence[Row],
    verdicts: Mapping[str, Row],
    result: Mapping[str, Any],
) -> None:
    """metrics.json, results.parquet, grid.png, acceptance_map.png and, of drafts, accepted.png;
    metrics.json last, as the sign of a finished run.
    """
    timed = {row["id"]: {"latency_ar": row["ar"], "latency": row["method"]} for row in timings}
    empty = {"latency_ar": None, "latency": None}
    table = []
    for row in rows:
        verdict = {
            name: value
            for name, value in verdicts.get(row["id"], {}).items()
            if name not in ("id", "features")
        }
        table.append({**row, **timed.get(row["id"], empty), **verdict})
    write_table(plan.directory / "results.parquet", table)
    shown = rows[:SHOWN]
    pictures = [read_picture(picture_path(plan.directory, row["id"])) for row in shown]
    figures.grid(
        plan.directory / "grid.png", _title(result), pictures, [row["text"] for row in shown]
    )
    figures.acceptance_map(
        plan.directory / "acceptance_map.png", _title(result), rows, pipeline.target.grid
    )
    if result["acceptance_by_depth"]:
        figures.accepted(
            plan.directory / "accepted.png", _title(result), pictures, shown, pipeline.target.grid
        )
    write_json(plan.directory / "metrics.json", result)


def _title(result: Mapping[str, Any]) -> str:
    """Heading of the figures."""
    settings, metrics = result["settings"], result["metrics"]
    accepted = metrics["accepted_length"]
    parts = [
        result["name"],
        *(
            f"{name} {settings[name]:g}"
            if isinstance(settings[name], float)
            else f"{name} {settings[name]}"
            for name in ("model", "guidance", "seed")
            if name in settings
        ),
    ]
    parts.append(
        f"accepted length {accepted['value']:.2f} [{accepted['low']:.2f}, {accepted['high']:.2f}]"
    )
    if "speedup" in metrics:
        parts.append(f"speed-up {metrics['speedup']['value']:.2f}×")
    return " · ".join(parts)


def _track(plan: RunPlan, tracker: Tracker, rows: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Send a finished run's numbers, pictures and files to the tracker."""
    values = {name: interval["value"] for name, interval in result["metrics"].items()}
    spans = {
        f"{name}_{end}": interval[end]
        for name, interval in result["metrics"].items()
        for end in ("low", "high")
    }
    tracker.log({name: value for name, value in values.items() if value is not None})
    tracker.summary({**values, **spans, "images": result["images"]})
    for name in ("grid", "acceptance_map"):
        tracker.image(name, plan.directory / f"{name}.png", result["name"])
    columns = [
        name for name in ("id", "text", "accepted_length", "tau", "logprob") if name in rows[0]
    ]
    table = [
        [*(row[name] for name in columns), picture_path(plan.directory, row["id"])]
        for row in rows[:64]
    ]
    tracker.table("images", [*columns, "image"], table)
    files = [
        plan.directory / name
        for name in ("metrics.json", "results.parquet", "grid.png", "acceptance_map.png")
    ]
    tracker.artifact("evaluation", "evaluation", files)
    tracker.finish()
