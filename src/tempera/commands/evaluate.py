"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tempera.commands import expected_length
from tempera.commands.asked import Asked, Options, is_given, reader
from tempera.commands.bfloat16 import tell_bfloat16
from tempera.commands.costs import dry_evaluation, read_with_files
from tempera.config.nodes import plain
from tempera.config.parts import Parts
from tempera.config.scorers import build_scorers
from tempera.data.prompts import Prompt, check_prompts, warnings_of
from tempera.decoding.diagnostics import has_bounds
from tempera.decoding.interfaces import Rule
from tempera.errors import TemperaError
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import Evaluation, RunPlan, evaluate, facts
from tempera.evaluation.run_directory import claim, shared_directory
from tempera.evaluation.run_identity import DRAWS, run_identity
from tempera.reporting.run_names import run_name
from tempera.rules.standard import Relaxed
from tempera.runtime.distributed import Processes
from tempera.runtime.files import fingerprint
from tempera.runtime.pretrained import recording_taken
from tempera.runtime.processor import tell_slow_bfloat16
from tempera.runtime.row_store import Row
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import Tracker, in_background
from tempera.targets.conditioners import ClassLabels

LARGEST = 256
"""The first batch that `batch_size=auto` tries on a GPU; larger ones make no image faster."""


def main(cfg: DictConfig) -> dict[str, float] | float:
    """Run one evaluation and return its metrics, or the one that is optimised."""
    metrics = run(cfg)
    wanted = cfg.optimized_metric
    if wanted is None or not metrics or cfg.dry_run:
        return metrics
    if wanted not in metrics:
        raise TemperaError(
            f"optimized_metric={wanted} was not measured: give one of {', '.join(sorted(metrics))}",
            option="optimized_metric",
        )
    return metrics[wanted]


def run(cfg: DictConfig, quiet: bool = False) -> dict[str, float]:
    """Run one evaluation, as far as its directory lacks it, and return its metrics.

    Args:
        quiet: print no results: the caller shows them.
    """
    asked = Asked.of(cfg)
    options, parts = asked.options, asked.parts
    processes = Processes(cpu=parts.placement.device.type == "cpu")
    if processes.is_main and parts.placement.dtype == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", parts.placement.device)
    if options.dry_run:
        if not processes.is_main:
            return {}
        return dry_evaluation(parts, asked.read, asked.limit, asked.scorers)
    prompts = _read(asked)
    unread = _check_prompts(asked, prompts)
    rule = None if asked.wanted else parts.rule()
    unbounded = _unbounded(rule, parts) if options.diagnostics else []
    for warning in [*unread, *_too_strict(rule), *unbounded] if processes.is_main else ():
        print(f"warning: {warning}.")
    directory = shared_directory(processes, options.directory)
    with recording_taken() as taken:
        target = parts.fast_target(len(prompts))
        found = asked.wanted and asked.wanted.found(parts, target, directory, processes)
        if found:
            parts = parts.with_option(found["option"], found["value"])
            rule = parts.rule()
        pipeline = parts.pipeline(target, rule)
    plan = _plan(options, parts, pipeline, directory, asked.protocol)
    notes = asked.notes(prompts, unread) | {"taken": taken}
    notes |= {expected_length.MATCHED: found} if found else {}
    notes |= facts(_name(plan, options, notes), pipeline, asked.protocol)
    if processes.is_main and not quiet and (draft := notes["draft_from"]):
        print(f"draft: {draft['path']} ({draft['origin']})")
    if processes.is_main and not quiet and asked.protocol.prompts:
        tell_bfloat16(parts.placement, pipeline.target, pipeline.method)
    claim(directory, plan.settings, notes, prompts, write=processes.is_main)
    start = partial(asked.tracking.start, directory, {**plan.settings, **notes}, notes["name"])
    work = Evaluation(plan, pipeline, prompts, asked.scorers, asked.protocol, processes)
    with in_background(start) as tracker:
        return _work(work, tracker, None if quiet else options.verbose)


def _read(asked: Asked) -> list[Prompt]:
    """The prompts, once all files of the run are here or can be downloaded."""
    parts = asked.parts
    checks = [partial(parts.check_draft, of_the_hub=False)]
    checks += [partial(scorer.check, parts.model) for scorer in asked.scorers]
    prompts = read_with_files(parts, _nothing if asked.toy else _networks, asked.read, checks)
    parts.check_draft()
    return prompts


def check_files(cfgs: Sequence[DictConfig]) -> None:
    """Raise TemperaError for files of models, drafts, prompts and metrics that these jobs of a
    sweep would not get. What several share is checked once.
    """
    checked: list[list[Any]] = []
    for cfg in cfgs:
        parts = Parts.of(cfg, elsewhere=True)
        nodes = (cfg.model, cfg.data, cfg.metrics, cfg.get("torchmetrics"))
        read = [plain(node, resolve=True) if node else None for node in nodes]
        shared = [*read, cfg.prompt, cfg.scores, cfg.against, parts.drafter_part.described]
        if cfg.dry_run or shared in checked:
            continue
        checked.append(shared)
        scorers = build_scorers(cfg, cfg.scores, cfg.against) if cfg.prompt is None else []
        checks = [partial(scorer.check, parts.model) for scorer in scorers]
        toy = cfg.family.toy
        read_with_files(parts, *((_nothing, list) if toy else (_networks, reader(cfg))), checks)


def _sweep() -> Path | None:
    """The directory of the sweep that is running."""
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    return Path(hydra.sweep.dir) if hydra and hydra.mode == RunMode.MULTIRUN else None


def _shared(directory: Path, settings: Mapping[str, Any]) -> Path:
    """Where the jobs of a sweep share what plain autoregression takes: runs whose images it decodes
    alike.
    """
    names = (*DRAWS, "compiled")
    return directory / "plain_timings" / fingerprint({name: settings.get(name) for name in names})


def _nothing(parts: Parts) -> None:
    """In place of `_networks` for a model that comes with its files."""


def _networks(parts: Parts) -> None:
    parts.drafter(parts.target())
    parts.image_decoder()


def _check_prompts(asked: Asked, prompts: Sequence[Prompt]) -> list[str]:
    """Raise TemperaError for prompts that the model cannot draw, that calibrate it, or that a
    metric cannot take; return what the model does not understand of the others.
    """
    parts = asked.parts
    captions = parts.captions()
    if asked.wanted is not None:
        asked.wanted.check_prompts(prompts)
    numbers = asked.options.prompt is None and all(given.text.isdigit() for given in prompts)
    if numbers and not isinstance(captions, ClassLabels):
        raise TemperaError(
            f"these prompts are class numbers, but model={parts.model} takes text: choose "
            "data=coco, parti or file, or a class-conditional model",
            option="data",
        )
    if captions is not None:
        check_prompts(prompts, captions)
    for scorer in asked.scorers:
        scorer.check_prompts(prompts)
    return warnings_of(prompts, captions)


def _too_strict(rule: object) -> list[str]:
    """A warning of a relaxation that is stricter than exact decoding."""
    if not isinstance(rule, Relaxed) or fmean(rule.schedule) >= 1:
        return []
    omegas = ", ".join(f"{omega:.2g}" for omega in rule.schedule)
    return [
        f"the relaxation ω = {omegas} averages less than 1, so it is likely slower than exact "
        "decoding (ω = 1) and no closer to the target; give a larger delta, or floor=1"
    ]


def _unbounded(rule: object, parts: Parts) -> list[str]:
    """A warning of a rule whose bounds on TV and KL are not known."""
    if not isinstance(rule, Rule) or not parts.is_discrete:
        return []
    if has_bounds(rule, parts.sampling.greedy):
        return []
    return [
        f"{type(rule).__name__} has no bounds on TV and KL, because its tests depend on each "
        "other; the results contain no tv_bound and no kl_per_token"
    ]


def _plan(
    options: Options,
    parts: Parts,
    pipeline: Pipeline,
    directory: Path,
    protocol: SpeedProtocol,
) -> RunPlan:
    """Where the run is written, under which identity, and how its images are decoded and timed."""
    settings = parts.settings(
        options.choices,
        expected_length=options.expected_length,
        diagnostics=options.diagnostics,
    )
    if is_given(options, "model.text_encoder") or is_given(options, "model.text_weights"):
        settings["text_encoder"] = fingerprint(parts.text_encoder_part.identity)
    method = options.choices.get("method")
    identity = run_identity(settings, method, pipeline, parts.verification, parts.placement)
    shares = protocol.paired is False or (protocol.paired is None and _sweep() is not None)
    is_on_gpu = parts.placement.device.type == "cuda"
    return RunPlan(
        directory=directory,
        settings=identity,
        batch_size=LARGEST if parts.shrinks and is_on_gpu else parts.batch_size,
        diagnostics=options.diagnostics,
        replays=options.replays,
        shrinks=parts.shrinks,
        shared=_shared(_sweep() or directory, identity) if shares else None,
    )


def _name(plan: RunPlan, options: Options, notes: Mapping[str, Any]) -> str:
    """How reports name the run."""
    return run_name(
        plan.settings["method"],
        notes["changes"],
        plan.settings.get("delta"),
        notes.get(expected_length.MATCHED, {}).get("option"),
        options.expected_length,
    )


def _first_line(records: Sequence[Row], run: Evaluation) -> str:
    """What is known before the timing."""
    count = len(records)
    tokens = count * run.pipeline.target.length / sum(record["rounds"] for record in records)
    images = f"{count} image{'s' if count > 1 else ''}"
    directory = run.plan.directory / "images"
    return f"{images}, {tokens:.2f} tokens per round, in {directory}; next: timing and quality"


def _work(run: Evaluation, tracker: Future[Tracker], verbose: bool | None) -> dict[str, float]:
    """Decode, measure, write, and then show; return the metrics."""

    def before_timing(records: Sequence[Row]) -> None:
        if verbose is not None and run.protocol.prompts:
            print(_first_line(records, run))
        wait([tracker])

    result = evaluate(run, before_timing)
    if result is None:
        return {}
    from tempera.reporting import run_report  # matplotlib takes a second to import

    directory = run.plan.directory
    with side_service(
        f"the report could not be written ({{why}}): the results are in {directory}."
    ):
        run_report.write(directory, tracker.result(), verbose)
    values = {key: interval["value"] for key, interval in result["metrics"].items()}
    return {key: value for key, value in values.items() if value is not None}
