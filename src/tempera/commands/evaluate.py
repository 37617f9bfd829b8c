"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tempera.commands import expected_length
from tempera.commands.costs import dry_evaluation, read_with_files
from tempera.commands.expected_length import Wanted
from tempera.config import build
from tempera.config.changes import changes
from tempera.config.instantiate import instantiate, part
from tempera.config.options import identity_options
from tempera.config.tracking import Tracking, tracked
from tempera.data.prompts import (
    CaptionCheck,
    Prompt,
    check_prompts,
    described,
    one_prompt,
    warnings_of,
)
from tempera.errors import TemperaError
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import Evaluation, RunPlan, evaluate
from tempera.evaluation.run_directory import claim, shared_directory
from tempera.evaluation.run_identity import about, run_identity
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.scores import Scores, read_scores
from tempera.metrics.torch_metrics import TorchMetrics
from tempera.reporting.run_names import run_name
from tempera.runtime.distributed import Processes
from tempera.runtime.pretrained import recording_taken
from tempera.runtime.processor import Place, tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import Tracker, in_background
from tempera.targets.conditioners import ClassLabels
from tempera.targets.transformer import TransformerTarget

LARGEST = 256
"""The first batch that `batch_size=auto` tries on a GPU; larger ones make no image faster."""


@dataclass(frozen=True)
class Facts:
    """What Hydra and a preset say about a run, in plain values.

    Attributes:
        overrides: the command line.
        choices: the choice in each group; empty if the command is called as a function.
        data: where the prompts come from.
        paper: the option `paper`.
    """

    overrides: list[str]
    choices: dict[str, str | None]
    data: dict[str, Any]
    paper: object

    @classmethod
    def of(cls, cfg: DictConfig) -> "Facts":
        """Raises TemperaError if `paper` is no table's."""
        paper = _plain(cfg, "paper")
        if paper is not None:
            from tempera.reporting.paper_results import find

            find(paper.get("table") if isinstance(paper, Mapping) else paper)
        choices = _plain(cfg, "choices") or {}
        data = {"prompts": _plain(cfg, "data"), "preset": choices.get("data")}
        if cfg.prompt is not None:
            data = {"prompts": cfg.prompt, "preset": "prompt"}
        return cls(_plain(cfg, "overrides") or [], choices, data, paper)


@dataclass(frozen=True)
class Checked:
    """What is known of a run before weights are read: its options are right.

    Attributes:
        batch_size: prompts decoded together.
        shrinks: decode fewer together where memory runs out.
        wanted: what `expected_length=` asks for.
    """

    facts: Facts
    place: Place
    processes: Processes
    evaluator: Evaluator
    protocol: SpeedProtocol
    prompts: list[Prompt]
    batch_size: int
    shrinks: bool
    tracking: Tracking
    wanted: Wanted | None


@dataclass(frozen=True)
class Built:
    """The parts of a run that can begin: its directory is claimed, and its tracker starts."""

    plan: RunPlan
    pipeline: Pipeline
    scores: Scores
    tracker: Future[Tracker]


def main(cfg: DictConfig) -> dict[str, float]:
    """Run one evaluation and return its metrics."""
    checked = _check(cfg)
    if cfg.dry_run:
        return _dry_run(cfg, checked)
    built = _build(cfg, checked)
    run = Evaluation(
        plan=built.plan,
        pipeline=built.pipeline,
        prompts=checked.prompts,
        evaluator=checked.evaluator,
        protocol=checked.protocol,
        processes=checked.processes,
        scores=built.scores,
    )
    return _work(run, built.tracker, cfg.verbose)


def _check(cfg: DictConfig) -> Checked:
    """Check the options, read the prompts, and see that every file can be had."""
    facts = Facts.of(cfg)
    wanted = expected_length.check_options(cfg, facts.overrides)
    build.check_tokens(cfg)
    tracking = Tracking.of(cfg, "eval", facts.choices, facts.overrides)
    protocol: SpeedProtocol = instantiate(cfg.speed)
    place = build.place_of(cfg, dry=cfg.dry_run)
    shrinks = cfg.batch_size == "auto"
    is_on_gpu = place.device.type == "cuda"
    batch_size = LARGEST if shrinks and is_on_gpu else build.batch_size(cfg)
    evaluator = build.build_evaluator(cfg)
    if not cfg.dry_run:
        build.check_draft(cfg, of_the_hub=False)  # before downloads are listed
    processes = Processes(cpu=place.device.type == "cpu")
    if processes.is_main and place.dtype == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", place.device)
    read = part(cfg.data).make if cfg.prompt is None else partial(one_prompt, cfg.prompt)
    prompts = read_with_files(cfg, _networks, read)
    return Checked(
        facts=facts,
        place=place,
        processes=processes,
        evaluator=evaluator,
        protocol=protocol,
        prompts=prompts,
        batch_size=batch_size,
        shrinks=shrinks,
        tracking=tracking,
        wanted=wanted,
    )


def _dry_run(cfg: DictConfig, checked: Checked) -> dict[str, float]:
    """Print what the run takes, and return it."""
    if not checked.processes.is_main:
        return {}
    prompts = [prompt.text for prompt in checked.prompts]
    return dry_evaluation(cfg, checked.place, prompts, checked.evaluator)


def _build(cfg: DictConfig, checked: Checked) -> Built:
    """Build what decodes, and claim the run's directory for its identity."""
    processes = checked.processes
    build.check_draft(cfg)
    rule = None if checked.wanted else build.build_rule(cfg)
    captions = build.build_captions(cfg)
    directory = shared_directory(processes, Path(str(cfg.directory)))
    checked.evaluator.check(cfg.model.name)
    unread = _check_prompts(cfg, checked, captions)
    scores = read_scores(cfg.scores, [prompt.id for prompt in checked.prompts])
    matched: dict[str, Any] = {}
    with recording_taken() as taken:
        target = build.build_fast_target(cfg)
        if checked.wanted is not None:
            cfg, matched = expected_length.matched(
                cfg, checked.wanted, target, checked.place.device, directory, processes
            )
            rule = build.build_rule(cfg)
        pipeline = build.build_pipeline(cfg, target, rule)
    facts = checked.facts
    options = identity_options(cfg)
    changed = changes(cfg, facts.choices)
    tracking = replace(checked.tracking, config=tracked(cfg))
    identity = run_identity(options, facts.choices, pipeline, checked.place.dtype)
    notes = _notes(checked, unread) | matched | {"changes": changed, "taken": taken}
    if isinstance(target, TransformerTarget):
        notes["plain_rows"] = target.plain_rows
    name = run_name(
        identity["method"],
        changed,
        identity.get("delta"),
        matched.get(expected_length.MATCHED, {}).get("option"),
        cfg.expected_length,
    )
    plan = RunPlan(
        directory=directory,
        name=name,
        settings=identity,
        about=notes,
        batch_size=checked.batch_size,
        diagnostics=cfg.diagnostics,
        replays=cfg.replays,
        shrinks=checked.shrinks,
    )
    claim(directory, identity, notes, write=processes.is_main)
    tracker = in_background(partial(tracking.start, directory, {**identity, **notes}, name))
    return Built(plan, pipeline, scores, tracker)


def _notes(checked: Checked, unread: Sequence[str]) -> dict[str, Any]:
    """What run.json says about the run beside its identity; `unread` as of `_check_prompts`."""
    facts = checked.facts
    return about(checked.place.device, facts.overrides) | {
        "paper": facts.paper,
        "data": facts.data | described(checked.prompts) | {"warnings": unread},
    }


def _work(run: Evaluation, tracker: Future[Tracker], verbose: bool) -> dict[str, float]:
    """Decode, measure, write, and then show; return the metrics."""
    result = evaluate(run, before_timing=partial(wait, [tracker]))
    if result is None:
        return {}
    from tempera.reporting import run_report  # matplotlib takes a second to import

    directory = run.plan.directory
    with side_service(f"no report ({{why}}): the results are in {directory}."):
        run_report.write(directory, result, tracker.result(), verbose)
    values = {key: interval["value"] for key, interval in result["metrics"].items()}
    return {key: value for key, value in values.items() if value is not None}


def _networks(cfg: DictConfig) -> None:
    build.build_drafter(cfg, build.build_target(cfg))
    build.build_image_decoder(cfg)


def _check_prompts(cfg: DictConfig, checked: Checked, captions: CaptionCheck | None) -> list[str]:
    """Raise TemperaError for prompts that the model cannot draw, that calibrate it, or that a
    metric cannot take; print and return what the model does not understand of the others.
    """
    prompts = checked.prompts
    if checked.wanted is not None:
        expected_length.check_prompts(cfg, prompts)
    numbers = cfg.prompt is None and all(prompt.text.isdigit() for prompt in prompts)
    if numbers and not isinstance(captions, ClassLabels):
        raise TemperaError(
            f"these prompts are numbers of classes, and model={cfg.model.name} draws texts: choose "
            "data=coco, parti or file, or a model of classes",
            option="data",
        )
    if captions is not None:
        check_prompts(prompts, captions)
    if isinstance(checked.evaluator, TorchMetrics):
        checked.evaluator.check_prompts(prompts)
    unread = warnings_of(prompts, captions)
    for warning in unread if checked.processes.is_main else ():
        print(f"warning: {warning}.")
    return unread


def _plain(cfg: DictConfig, name: str) -> Any:
    """An option in plain values; None where there is none, or Hydra knows none."""
    node = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
    if not OmegaConf.is_config(node):
        return node
    return OmegaConf.to_container(node, resolve=True)
