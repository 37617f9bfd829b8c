"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from pydantic import NonNegativeInt

from tempera.commands import expected_length
from tempera.commands.costs import dry_evaluation, read_with_files
from tempera.commands.expected_length import Wanted
from tempera.config.compose import given, option_name
from tempera.config.instantiate import Part, from_options, instantiate, part
from tempera.config.nodes import plain
from tempera.config.parts import Parts
from tempera.config.scorers import build_scorers
from tempera.config.tracking import Tracking, tracked
from tempera.data.prompts import Prompt, check_prompts, described, one_prompt, warnings_of
from tempera.decoding.diagnostics import has_bounds
from tempera.decoding.interfaces import Rule
from tempera.errors import TemperaError
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import Evaluation, RunPlan, evaluate, facts
from tempera.evaluation.run_directory import claim, shared_directory
from tempera.evaluation.run_identity import DRAWS, about, run_identity
from tempera.metrics.evaluators import Evaluator, NoEvaluator
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


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/eval.yaml says what each is."""

    directory: Path
    prompt: str | None
    expected_length: float | None
    replays: NonNegativeInt
    scores: str | None
    against: str | None
    optimized_metric: str | None
    diagnostics: bool
    verbose: bool
    dry_run: bool
    paper: Any
    choices: dict[str, str | None]
    overrides: list[str]


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
    """Run one evaluation and return its metrics.

    Args:
        quiet: print no results: the caller shows them.
    """
    options, wanted, protocol, scorers = read_options(cfg)
    tracking = Tracking.of(cfg, "eval", options.choices, options.overrides)
    parts = Parts.of(cfg)
    processes = Processes(cpu=parts.place.device.type == "cpu")
    if processes.is_main and parts.place.dtype == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", parts.place.device)
    read = _reader(cfg)
    if options.dry_run:
        if not processes.is_main:
            return {}
        return dry_evaluation(parts, read, cfg.limit, scorers)
    checks = [partial(parts.check_draft, of_the_hub=False)]
    checks += [partial(scorer.check, parts.model) for scorer in scorers]
    make = _nothing if cfg.family.toy else _networks
    prompts = read_with_files(parts, make, read, checks)
    parts.check_draft()
    rule = None if wanted else parts.rule()
    directory = shared_directory(processes, options.directory)
    unread = _check_prompts(options.prompt, parts, prompts, scorers, wanted)
    unbounded = _unbounded(rule, parts) if options.diagnostics else []
    for warning in [*unread, *_too_strict(rule), *unbounded] if processes.is_main else ():
        print(f"warning: {warning}.")
    with recording_taken() as taken:
        target = parts.fast_target(len(prompts))
        notes = {} if wanted is None else wanted.found(parts, target, directory, processes)
        if notes:
            parts = parts.with_option(notes["option"], notes["value"])
            rule = parts.rule()
        pipeline = parts.pipeline(target, rule)
    notes = {expected_length.MATCHED: notes} if notes else {}
    notes |= _notes(cfg, options, parts, prompts, unread) | {"taken": taken}
    if processes.is_main and not quiet and (draft := notes["draft_from"]):
        print(f"draft: {draft['path']} ({draft['origin']})")
    plan = _plan(options, parts, pipeline, directory)
    if protocol.paired is False or (protocol.paired is None and _sweep() is not None):
        plan = replace(plan, shared=_shared(_sweep() or directory, plan.settings))
    notes |= facts(_name(plan, options, notes), pipeline, protocol)
    claim(directory, plan.settings, notes, write=processes.is_main)
    tracking = replace(tracking, config=tracked(cfg))
    told = {**plan.settings, **notes}
    evaluation = Evaluation(plan, pipeline, prompts, scorers, protocol, processes)
    with in_background(partial(tracking.start, directory, told, notes["name"])) as tracker:
        return _work(evaluation, tracker, None if quiet else options.verbose)


def read_options(
    cfg: DictConfig,
) -> tuple[Options, Wanted | None, SpeedProtocol, list[Evaluator]]:
    """What this command reads itself; a sweep reads it of all jobs before the first begins."""
    options = from_options(cfg, Options)
    _check_paper(options.paper)
    scorers = build_scorers(cfg, options.scores, options.against)
    if options.prompt is not None and not _asked(options, "metrics"):
        scorers[0] = NoEvaluator()
    return options, Wanted.of(cfg), _protocol(cfg, options), scorers


def check_files(cfgs: Sequence[DictConfig]) -> None:
    """Raise TemperaError for files of models, drafts and prompts that these jobs of a sweep would
    not get. What several share is checked once.
    """
    checked: list[list[Any]] = []
    for cfg in cfgs:
        if cfg.family.toy or cfg.dry_run:
            continue
        parts = Parts.of(cfg, elsewhere=True)
        read = [plain(node, resolve=True) for node in (cfg.model, cfg.data)]
        shared = [*read, cfg.prompt, parts.drafter_part.described]
        if shared not in checked:
            checked.append(shared)
            read_with_files(parts, _networks, _reader(cfg))


def _reader(cfg: DictConfig) -> Callable[[], list[Prompt]]:
    """What reads the prompts."""
    data: Part[list[Prompt]] = part(cfg.data)
    return data.make if cfg.prompt is None else partial(one_prompt, cfg.prompt)


def _sweep() -> Path | None:
    """The directory of the sweep that is running."""
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    return Path(hydra.sweep.dir) if hydra and hydra.mode == RunMode.MULTIRUN else None


def _shared(place: Path, settings: Mapping[str, Any]) -> Path:
    """Where the jobs of a sweep share what plain autoregression takes: runs whose images it decodes
    alike.
    """
    names = (*DRAWS, "target", "compiled")
    return place / "plain_timings" / fingerprint({name: settings.get(name) for name in names})


def _protocol(cfg: DictConfig, options: Options) -> SpeedProtocol:
    """How speed is measured: that of one `prompt=` only on demand, as its metrics are, since it
    takes longer than the picture.
    """
    protocol: SpeedProtocol = instantiate(cfg.speed)
    asked = options.prompt is None or _asked(options, "speed.prompts")
    return protocol if asked else replace(protocol, prompts=0)


def _asked(options: Options, name: str) -> bool:
    """Whether the command line names an option, or one of its group."""
    given = [option_name(option) for option in options.overrides]
    return any(one == name or one.startswith(f"{name}.") for one in given)


def _check_paper(paper: Any) -> None:
    """Raise TemperaError if the option `paper` is no table's."""
    if paper is not None:
        from tempera.reporting.paper_results import find

        find(paper.get("table") if isinstance(paper, Mapping) else paper)


def _nothing(parts: Parts) -> None:
    """In place of `_networks` for a model that comes with its files."""


def _networks(parts: Parts) -> None:
    parts.drafter(parts.target())
    parts.image_decoder()


def _check_prompts(
    prompt: str | None,
    parts: Parts,
    prompts: Sequence[Prompt],
    scorers: Sequence[Evaluator],
    wanted: Wanted | None,
) -> list[str]:
    """Raise TemperaError for prompts that the model cannot draw, that calibrate it, or that a
    metric cannot take; return what the model does not understand of the others.
    """
    captions = parts.captions()
    if wanted is not None:
        wanted.check_prompts(prompts)
    numbers = prompt is None and all(given.text.isdigit() for given in prompts)
    if numbers and not isinstance(captions, ClassLabels):
        raise TemperaError(
            f"these prompts are numbers of classes, and model={parts.model} draws texts: choose "
            "data=coco, parti or file, or a model of classes",
            option="data",
        )
    if captions is not None:
        check_prompts(prompts, captions)
    for scorer in scorers:
        scorer.check_prompts(prompts)
    return warnings_of(prompts, captions)


def _too_strict(rule: object) -> list[str]:
    """A warning of a relaxation that is stricter than exact decoding."""
    if not isinstance(rule, Relaxed) or fmean(rule.schedule) >= 1:
        return []
    omegas = ", ".join(f"{omega:.2g}" for omega in rule.schedule)
    return [
        f"the relaxation ω = {omegas} averages less than 1, which is exact decoding: it is likely "
        "slower and no nearer to the target; give a larger delta, or floor=1"
    ]


def _unbounded(rule: object, parts: Parts) -> list[str]:
    """A warning of a rule whose bounds on TV and KL are not known."""
    if not isinstance(rule, Rule) or not parts.is_discrete:
        return []
    if has_bounds(rule, parts.sampling.greedy):
        return []
    return [
        f"{type(rule).__name__} has no bounds on TV and KL, because its tests depend on each "
        "other; the run has no tv_bound and no kl_per_token"
    ]


def _notes(
    cfg: DictConfig,
    options: Options,
    parts: Parts,
    prompts: Sequence[Prompt],
    unread: Sequence[str],
) -> dict[str, Any]:
    """What run.json says about the run beside its identity; `unread` as of `_check_prompts`."""
    source: dict[str, Any] = {"prompts": options.prompt, "preset": "prompt"}
    if options.prompt is None:
        source = {"prompts": plain(cfg.data, resolve=True), "preset": options.choices["data"]}
    return about(parts.place.device, options.overrides) | {
        "paper": options.paper,
        "draft_from": parts.draft_from(),
        "data": source | described(prompts) | {"warnings": unread},
        "changes": parts.changes(given(cfg)),
    }


def _plan(
    options: Options,
    parts: Parts,
    pipeline: Pipeline,
    directory: Path,
) -> RunPlan:
    """Where the run is written, under which identity, and how its images are decoded."""
    settings = parts.settings(
        options.choices,
        expected_length=options.expected_length,
        diagnostics=options.diagnostics,
    )
    method = options.choices.get("method")
    identity = run_identity(settings, method, pipeline, parts.verification, parts.place.dtype)
    is_on_gpu = parts.place.device.type == "cuda"
    return RunPlan(
        directory=directory,
        settings=identity,
        batch_size=LARGEST if parts.shrinks and is_on_gpu else parts.batch_size,
        diagnostics=options.diagnostics,
        replays=options.replays,
        shrinks=parts.shrinks,
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
    place = run.plan.directory / "images"
    return f"{images}, {tokens:.2f} tokens per round, in {place}; next their time and quality"


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
    with side_service(f"no report ({{why}}): the results are in {directory}."):
        run_report.write(directory, tracker.result(), verbose)
    values = {key: interval["value"] for key, interval in result["metrics"].items()}
    return {key: value for key, value in values.items() if value is not None}
