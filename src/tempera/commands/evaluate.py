"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from tempera.commands import expected_length
from tempera.commands.costs import dry_evaluation, read_with_files
from tempera.config import build
from tempera.config.changes import changes
from tempera.config.instantiate import from_options, instantiate, parsed
from tempera.config.options import Role, role_of
from tempera.data.prompts import Prompt, check_prompts, described, one_prompt, warnings_of
from tempera.errors import TemperaError
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import RunPlan, evaluate
from tempera.evaluation.run_directory import claim, shared_directory
from tempera.evaluation.run_identity import about, run_identity
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.scores import Scores, read_scores
from tempera.metrics.torch_metrics import TorchMetrics
from tempera.reporting.run_names import run_name
from tempera.runtime.distributed import Processes
from tempera.runtime.pretrained import recording_taken
from tempera.runtime.processor import tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.runtime.torchvision import import_torchvision
from tempera.runtime.tracking import Tracker, in_background

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
    paper: Any

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
    """What is known of a run before weights are read: its options are right."""

    facts: Facts
    device: torch.device
    processes: Processes
    evaluator: Evaluator
    protocol: SpeedProtocol
    prompts: list[Prompt]


@dataclass(frozen=True)
class Built:
    """A run that can begin: its directory is claimed, and its tracker starts."""

    plan: RunPlan
    pipeline: Pipeline
    scores: Scores
    tracker: Future[Tracker]


def main(cfg: DictConfig) -> dict[str, float]:
    """Run one evaluation and return its metrics."""
    checked = _check(cfg)
    if cfg.dry_run:
        if not checked.processes.is_main:
            return {}
        return dry_evaluation(cfg, checked.prompts, checked.evaluator)
    return _run(checked, _build(cfg, checked), cfg.verbose)


def _check(cfg: DictConfig) -> Checked:
    """Check the options, read the prompts, and see that every file can be had."""
    facts = Facts.of(cfg)
    device = build.parse_device(cfg.device, dry=cfg.dry_run)
    build.check_tokens(cfg)
    for part in (cfg.tracking, cfg.drafter):
        parsed(part)
    evaluator, protocol = _evaluator(cfg), instantiate(cfg.speed)
    if not cfg.dry_run:
        build.check_draft(cfg, of_the_hub=False)  # before downloads are listed
    if cfg.expected_length is not None:
        expected_length.check_options(cfg, facts.overrides)
    processes = Processes(cpu=device.type == "cpu")
    if processes.is_main and build.parse_dtype(cfg.dtype, device) == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", device)
    text = cfg.prompt
    read = partial(instantiate, cfg.data) if text is None else partial(one_prompt, text)
    prompts = read_with_files(cfg, _networks, read)
    return Checked(facts, device, processes, evaluator, protocol, prompts)


def _build(cfg: DictConfig, checked: Checked) -> Built:
    """Build what decodes, and claim the run's directory for its identity."""
    facts, processes, device = checked.facts, checked.processes, checked.device
    prompts = checked.prompts
    build.check_draft(cfg)
    searches = cfg.expected_length is not None
    rule = None if searches else build.build_rule(cfg)
    directory = shared_directory(processes, Path(str(cfg.directory)))
    checked.evaluator.check(cfg.model.name)
    unread = _check_prompts(cfg, prompts)
    for warning in unread if processes.is_main else ():
        print(f"warning: {warning}.")
    if isinstance(checked.evaluator, TorchMetrics):
        checked.evaluator.check_prompts(prompts)
    scores = read_scores(cfg.scores, [prompt.id for prompt in prompts])
    matched: dict[str, Any] = {}
    with recording_taken() as taken:
        target = build.build_fast_target(cfg)
        if searches:
            cfg, matched = expected_length.matched(cfg, target, directory, processes)
            rule = build.build_rule(cfg)
        pipeline = build.build_pipeline(cfg, target, rule)
    options = {
        str(key): list(cfg[key]) if isinstance(cfg[key], ListConfig) else cfg[key]
        for key in cfg
        if Role.IDENTITY in role_of(str(key))
    }
    identity = run_identity(options, facts.choices, pipeline, build.parse_dtype(cfg.dtype, device))
    notes = about(device, facts.overrides) | matched
    notes |= {"changes": changes(cfg, facts.choices), "paper": facts.paper, "taken": taken}
    notes["data"] = facts.data | described(prompts) | {"warnings": unread}
    name = run_name(
        identity["method"],
        notes["changes"],
        identity.get("delta"),
        matched.get(expected_length.MATCHED, {}).get("option"),
        cfg.expected_length,
    )
    run = {"directory": directory, "name": name, "settings": identity, "about": notes}
    plan = from_options(cfg, RunPlan, **run, **_batches(cfg, device))
    claim(directory, identity, notes, write=processes.is_main)
    tracker = in_background(
        partial(
            build.start_tracker,
            cfg,
            directory,
            "eval",
            facts.choices,
            {**identity, **notes},
        )
    )
    return Built(plan, pipeline, scores, tracker)


def _run(checked: Checked, built: Built, verbose: bool) -> dict[str, float]:
    """Decode, measure, write, and then show; return the metrics."""
    result = evaluate(
        built.plan,
        built.pipeline,
        checked.prompts,
        checked.evaluator,
        checked.protocol,
        checked.processes,
        built.scores,
        before_timing=partial(wait, [built.tracker]),
    )
    if result is None:
        return {}
    from tempera.reporting import run_report  # matplotlib takes a second to import

    directory = built.plan.directory
    with side_service(f"no report ({{why}}): the results are in {directory}."):
        run_report.write(directory, result, built.tracker.result(), verbose)
    values = {key: interval["value"] for key, interval in result["metrics"].items()}
    return {key: value for key, value in values.items() if value is not None}


def _evaluator(cfg: DictConfig) -> Evaluator:
    """The evaluator of `metrics`, with the metrics of `torchmetrics` beside its own."""
    evaluator: Evaluator = instantiate(cfg.metrics)
    named = cfg.get("torchmetrics") or {}
    if not named and cfg.against is None:
        return evaluator
    import_torchvision()  # torchmetrics imports it
    with open_dict(cfg):
        for node in named.values():
            node["_partial_"] = True  # networks are not read before it is their turn
    makers = {str(key): instantiate(node) for key, node in named.items()}
    return TorchMetrics(evaluator, makers, cfg.against)


def _networks(cfg: DictConfig) -> tuple[Any, Any]:
    return build.build_drafter(cfg, build.build_target(cfg)), build.build_image_decoder(cfg)


def _check_prompts(cfg: DictConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Raise TemperaError for prompts that the model cannot draw, or that calibrate it; return what
    it does not understand of the others.
    """
    if cfg.expected_length is not None:
        expected_length.check_prompts(cfg, prompts)
    captions = build.build_captions(cfg)
    numbers = cfg.prompt is None and all(prompt.text.isdigit() for prompt in prompts)
    if numbers and not _takes_classes(captions):
        raise TemperaError(
            f"these prompts are numbers of classes, and model={cfg.model.name} draws texts: choose "
            "data=coco, parti or file, or a model of classes",
            option="data",
        )
    if captions is not None:
        check_prompts(prompts, captions)
    return warnings_of(prompts, captions)


def _takes_classes(captions: Any) -> bool:
    from tempera.targets.conditioners import ClassLabels  # transformers takes seconds to import

    return isinstance(captions, ClassLabels)


def _batches(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """The arguments of a plan that say how many prompts are decoded together."""
    auto = cfg.batch_size == "auto"
    most = LARGEST if auto and device.type == "cuda" else build.batch_size(cfg)
    return {"batch_size": most, "shrinks": auto}


def _plain(cfg: DictConfig, name: str) -> Any:
    """An option in plain values; None where there is none, or Hydra knows none."""
    node = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
    if not OmegaConf.is_config(node):
        return node
    return OmegaConf.to_container(node, resolve=name == "paper")
