"""An evaluation, from prompts to metrics.json: generate, time, score the pictures, report. An
interrupted evaluation resumes where it stopped.
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
from tempera.evaluation.latency import SpeedProtocol, whole_batches
from tempera.evaluation.pipeline import COLUMNS, Pipeline
from tempera.evaluation.progress import Bar
from tempera.evaluation.run_directory import claim
from tempera.metrics import table
from tempera.metrics.acceptance import acceptance
from tempera.metrics.bootstrap import Interval
from tempera.metrics.evaluators import Evaluator, Pictures
from tempera.metrics.quality import ENOUGH, quality, reference_features, score_pictures
from tempera.metrics.scores import intervals as intervals_of
from tempera.metrics.scores import read_scores
from tempera.reporting import report_page
from tempera.reporting.collect import single
from tempera.reporting.console import print_results
from tempera.reporting.run_names import run_name
from tempera.runtime.distributed import Processes
from tempera.runtime.files import write_json
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Row, Store, write_table
from tempera.runtime.tracking import Tracker

SHOWN = 24
"""Number of pictures on grid.png, those of the first prompts, so that all runs show the same."""


@dataclass(frozen=True)
class RunPlan:
    """One run: where it is written, and how its images are decoded.

    Attributes:
        directory: the run directory.
        scores: a CSV file of scores that were computed elsewhere (`tempera.metrics.scores`).
        model: name of the model preset.
        settings: the run's identity: every option that results depend on, by its command-line
            name, and the identities of the networks.
        about: other facts to record in run.json.
        batch_size: number of prompts decoded together.
        diagnostics: record TV(p, q), the TV and KL bounds, and how certain the target is.
        replays: keep the decodes of this many first prompts round by round, for report.html; images
            that already exist get no replay.
    """

    directory: Path
    model: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    batch_size: int = 16
    diagnostics: bool = True
    replays: int = SHOWN
    scores: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TemperaError(f"batch_size={self.batch_size} is too small: give at least 1.")
        if self.replays < 0:
            raise TemperaError(f"replays={self.replays} is negative: give 0 for none.")


def evaluate(
    plan: RunPlan,
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    evaluator: Evaluator,
    protocol: SpeedProtocol,
    start_tracker: Callable[[], Tracker],
    processes: Processes,
) -> dict[str, float]:
    """Run the plan and write the run directory (see `tempera.evaluation.run_directory`). The
    caller has already checked the evaluator, before any weights were read.

    Returns:
        The metrics by key, without intervals; empty in processes other than the main one.

    Raises:
        TemperaError: the directory belongs to another run or cannot be written, or decoding failed.
    """
    given = read_scores(plan.scores, [prompt.id for prompt in prompts])
    claim(plan.directory, plan.settings, plan.about, write=processes.is_main)
    if processes.is_main:
        evaluator.fetch()
    tracker = start_tracker()
    rows = _generated(plan, pipeline, prompts, processes)
    if not processes.is_main:
        return {}
    timings = _timed(plan, pipeline, prompts[: protocol.prompts], protocol.warmup)
    larger = {
        size: _timed(plan, pipeline, whole_batches(prompts, protocol.prompts, size), 0, size)
        for size in protocol.batches
    }
    scores, metrics = _evaluated(plan, pipeline, prompts, evaluator)
    evaluated = bool(scores)
    table.include(given)
    metrics |= intervals_of(given)
    for name, values in given.items():
        for prompt, value in values.items():
            scores.setdefault(prompt, {})[name] = value
    intervals = {name: one.as_dict() for name, one in (acceptance(rows) | metrics).items()}
    if timings:
        intervals |= latency.speed(timings, len(rows[0]["tokens"]))
    intervals |= latency.batch_speedups(larger)
    time = latency.breakdown(timings) if timings else {}
    result = _assemble(plan, pipeline, rows, intervals, time, evaluated=evaluated)
    _write(plan, pipeline, rows, timings, scores, result)
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
    """Generate the missing images and return all records, in the prompts' order."""
    store = Store(plan.directory / "records", COLUMNS)
    mine = todo(store, prompts[processes.rank :: processes.count], plan.batch_size)
    missing = len(store.missing([prompt.id for prompt in prompts]))
    processes.wait()  # all processes have listed what is missing before one writes
    shares = processes.gather(sum(map(len, mine)))
    with Bar(
        len(prompts), len(prompts) - missing, pipeline.target.length, processes.is_main
    ) as bar:
        step = missing / max(shares[0], 1)  # assumes all processes are equally far
        generate(
            pipeline,
            mine,
            plan.directory,
            store,
            plan.diagnostics,
            lambda images, tokens, rounds: bar.advance(images * step, tokens * step, rounds * step),
            {prompt.id for prompt in prompts[: plan.replays]},
        )
        processes.wait()
        bar.finish()
    if not processes.is_main:
        return []
    found = store.rows()
    rows = [found[prompt.id] for prompt in prompts]
    restore_pictures(pipeline, rows, plan.directory)
    return rows


def _timed(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], warmup: int, batch_size: int = 1
) -> list[Row]:
    """Timings of the prompts in batches, stored separately per machine and batch size."""
    if not prompts:
        return []
    batch = f"-batch-{batch_size}" if batch_size > 1 else ""
    place = plan.directory / "timings" / f"{latency.machine(pipeline.device)}{batch}"
    store = Store(place, latency.COLUMNS)
    groups = prompts[::batch_size]
    done = len(groups) - len(store.missing([prompt.id for prompt in groups]))
    with Bar(len(groups), done, 1, title="timing") as bar:
        return latency.measure(
            pipeline, prompts, store, warmup, lambda _: bar.advance(1, 1, 0), batch_size
        )


def _evaluated(
    plan: RunPlan, pipeline: Pipeline, prompts: Sequence[Prompt], evaluator: Evaluator
) -> tuple[dict[str, Row], dict[str, Interval]]:
    """Scores by prompt id, with pseudo-values of metrics of the whole set, and the quality metrics;
    both empty if the evaluator has no networks.
    """
    scores: dict[str, Row] = {}
    metrics: dict[str, Interval] = {}

    def picture(prompt: Prompt) -> Pictures:
        return read_picture(picture_path(plan.directory, prompt.id))

    for networks in evaluator.load(pipeline.device):
        store = Store(plan.directory / f"evaluated-{networks.identity or evaluator.identity}")
        found = score_pictures(networks, prompts, picture, store)
        rows = [found[prompt.id] for prompt in prompts]
        reference = reference_features(evaluator, networks, picture(prompts[0]).shape[-1])
        measured = quality(rows, networks, reference, evaluator.resamples, pipeline.device)
        metrics |= measured
        for place, row in enumerate(rows):
            values = {
                key: float(one.pseudovalues[place])
                for key, one in measured.items()
                if one.pseudovalues is not None
            }
            scores.setdefault(row["id"], {}).update(row | values)
    return scores, metrics


def _assemble(
    plan: RunPlan,
    pipeline: Pipeline,
    rows: Sequence[Row],
    metrics: Mapping[str, Mapping[str, Any]],
    time: Mapping[str, Any],
    evaluated: bool,
) -> dict[str, Any]:
    """The content of metrics.json."""
    tested, accepted = (
        np.array([row[name] for row in rows]).sum(0) for name in ("tested", "accepted")
    )
    return {
        "name": run_name(
            str(plan.settings["method"]),
            plan.about["changes"],
            plan.settings.get("delta"),
            plan.about.get("matched"),
        ),
        "settings": dict(plan.settings),
        "images": len(rows),
        "grid": list(pipeline.target.grid),
        "metrics": {name: _plain(interval) for name, interval in metrics.items()},
        "acceptance_by_depth": _shares(accepted, tested),
        "acceptance_by_tenth": _by_tenth(rows),
        "tv_by_depth": _shares(np.array([row["tv_sums"] for row in rows]).sum(0), tested)
        if "tv_sums" in rows[0]
        else [],
        "proximity_by_place": _proximity(rows),
        "time": _plain(time),
        "about": dict(plan.about),
        "notes": _notes(len(rows), evaluated, time),
    }


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    """The ratio at each depth; None if nothing was tested there."""
    return [
        float(part / whole) if whole else None for part, whole in zip(parts, wholes, strict=True)
    ]


def _by_tenth(rows: Sequence[Row]) -> list[float | None]:
    """Acceptance rate in each tenth of the image, in the order of decoding; empty for older
    records, which lack the counts.
    """
    if not all("tested_by_tenth" in row for row in rows):
        return []
    tested, accepted = (
        np.array([row[f"{name}_by_tenth"] for row in rows]).sum(0)
        for name in ("tested", "accepted")
    )
    return _shares(accepted, tested)


def _proximity(rows: Sequence[Row]) -> list[float | None]:
    """Mean size of the proximity set at each place of the image; empty if the rule has no sets."""
    if "proximity_by_place" not in rows[0]:
        return []
    sizes = np.array([row["proximity_by_place"] for row in rows], np.float64)
    known = (~np.isnan(sizes)).sum(0)
    return _shares(np.nan_to_num(sizes).sum(0), known)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with NaN and infinities replaced by None, since JSON has neither."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _notes(images: int, evaluated: bool, timing: Mapping[str, Any]) -> list[str]:
    """Notes below the printed table of metrics."""
    notes = []
    if evaluated and images < ENOUGH:
        notes.append(
            f"FID, KID, precision and recall need at least {ENOUGH} images; this run has {images}."
        )
    elif evaluated:
        notes.append(
            f"FID and recall depend on the number of images: compare only runs with {images} too."
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
        notes.append(f"Time of a round (measured separately, synchronised): {parts}.")
        notes.append(f"Not included in the latency of an image: {outside}.")
    return notes


def _write(
    plan: RunPlan,
    pipeline: Pipeline,
    rows: Sequence[Row],
    timings: Sequence[Row],
    scores: Mapping[str, Row],
    result: Mapping[str, Any],
) -> None:
    """Write results.parquet, grid.png, acceptance_map.png, report.html, accepted.png (if anything
    was drafted) and proximity_map.png (if the rule has proximity sets). metrics.json comes last,
    since it marks a run as finished.
    """
    from tempera.reporting import figures  # matplotlib takes a second to import

    timed = {row["id"]: {"latency_ar": row["ar"], "latency": row["method"]} for row in timings}
    empty = {"latency_ar": None, "latency": None}
    results = []
    for row in rows:
        scored = {
            name: value
            for name, value in scores.get(row["id"], {}).items()
            if name not in ("id", "features")
        }
        results.append({**row, **timed.get(row["id"], empty), **scored})
    write_table(plan.directory / "results.parquet", results)
    shown = rows[:SHOWN]
    pictures = [read_picture(picture_path(plan.directory, row["id"])) for row in shown]
    figures.grid(
        plan.directory / "grid.png", _title(result), pictures, [row["text"] for row in shown]
    )
    figures.acceptance_map(
        plan.directory / "acceptance_map.png", _title(result), rows, pipeline.target.grid
    )
    if result["proximity_by_place"]:
        figures.proximity_map(
            plan.directory / "proximity_map.png",
            _title(result),
            result["proximity_by_place"],
            pipeline.target.grid,
        )
    if result["acceptance_by_depth"]:
        figures.accepted(
            plan.directory / "accepted.png", _title(result), pictures, shown, pipeline.target.grid
        )
    report_page.write(plan.directory / "report.html", single(plan.directory, result, results))
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
    tracker.html("report", plan.directory / "report.html")
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
        for name in (
            "metrics.json",
            "results.parquet",
            "report.html",
            "grid.png",
            "acceptance_map.png",
        )
    ]
    tracker.artifact(f"{plan.model}-{result['name']}", "evaluation", files)
    tracker.finish()
