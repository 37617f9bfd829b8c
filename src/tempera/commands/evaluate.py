"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tempera.commands import expected_length
from tempera.commands.costs import AUTO, chosen_batch, dry, is_dry, tell_slow_bfloat16, weigh
from tempera.config import build
from tempera.config.changes import changes
from tempera.config.instantiate import check_values, instantiate
from tempera.data.captions import check_prompts
from tempera.data.prompts import Prompt, described, one_prompt
from tempera.errors import TemperaError
from tempera.evaluation.estimate import estimate
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run import evaluate
from tempera.evaluation.run_directory import shared_directory
from tempera.evaluation.run_identity import about, run_identity
from tempera.evaluation.run_time import run_time
from tempera.metrics.evaluators import Evaluator
from tempera.runtime.cost import Cost, Time
from tempera.runtime.distributed import Processes
from tempera.runtime.tracking import Tracker

LARGEST = 256
"""Largest batch of `batch_size=auto`; larger ones make no image faster."""


def main(cfg: DictConfig) -> dict[str, float]:
    """Run one evaluation and return its metrics."""
    _check(cfg)
    device = build.parse_device(cfg.device)
    processes = Processes(cpu=device.type == "cpu")
    if processes.is_main and build.parse_dtype(cfg.dtype, device) == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", device)
    prompts = instantiate(cfg.data) if cfg.prompt is None else one_prompt(cfg.prompt)
    directory = shared_directory(processes, Path(str(cfg.directory)))
    evaluator = instantiate(cfg.metrics)
    missing = cache(evaluator.to_download)

    def cost(sized: DictConfig, size: int) -> Cost:
        def make() -> Pipeline:
            pipeline: Pipeline = build.build_sized_pipeline(sized)
            return pipeline

        found = estimate(make, prompts, size, cfg.diagnostics)
        return replace(found, metrics=missing())

    def weighed() -> Cost | None:
        most = min(math.ceil(len(prompts) / processes.count), LARGEST)
        size = chosen_batch(cfg, cost, device, most, processes)
        cfg.batch_size = size
        return weigh(cfg, partial(cost, size=size), device, directory, processes.is_main)

    protocol = instantiate(cfg.speed)
    if is_dry(cfg):
        measured = partial(_measured, cfg, prompts, protocol, evaluator, processes.count)
        return dry(weighed(), measured, processes.is_main)
    evaluator.check(cfg.model.name)
    expected_length.check_prompts(cfg, prompts)
    if (captions := build.build_captions(cfg)) is not None:
        check_prompts(prompts, captions)
    weighed()
    target = build.build_fast_target(cfg)
    cfg, matched = expected_length.matched(cfg, target, directory, processes)
    pipeline = build.build_pipeline(cfg, target)
    choices = _hydra(cfg, "choices") or {}
    identity = run_identity(
        {str(key): cfg[key] for key in cfg if key != "choices"},
        choices,
        cfg.drafter,
        pipeline,
        build.parse_dtype(cfg.dtype, device),
    )
    data = {"prompts": _hydra(cfg, "data") if cfg.prompt is None else prompts[0].text}
    data["preset"] = choices.get("data") if cfg.prompt is None else "prompt"
    notes = about(device, _hydra(cfg, "overrides") or []) | {
        "changes": changes(cfg, choices),
        "paper": _paper(cfg),
        "data": data | described(prompts),
        **matched,
    }
    plan = instantiate(cfg.plan, directory=directory, settings=identity, about=notes)

    def start_tracker() -> Tracker:
        return build.start_tracker(cfg, plan.directory, "eval", choices, {**identity, **notes})

    return evaluate(plan, pipeline, prompts, evaluator, protocol, start_tracker, processes)


def _check(cfg: DictConfig) -> None:
    """Raise TemperaError for wrong options, before the networks' code is imported, which takes
    seconds.
    """
    build.parse_dtype(cfg.dtype, build.parse_device(cfg.device))
    for part in (cfg.pipeline, cfg.speed, cfg.tracking, cfg.drafter):
        check_values(part)
    if cfg.batch_size != AUTO:
        instantiate(cfg.plan, directory=Path(str(cfg.directory)), settings={}, about={})
    expected_length.check_options(cfg, _hydra(cfg, "overrides") or [])
    _paper(cfg)
    if not is_dry(cfg):
        build.check_draft(cfg)


def _paper(cfg: DictConfig) -> Any:
    """The option `paper` as plain values; raises TemperaError if it is no table's."""
    if (node := cfg.get("paper")) is None:
        return None
    from tempera.reporting.paper_tables import check_preset

    given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    check_preset(given)
    return given


def _measured(
    cfg: DictConfig,
    prompts: Sequence[Prompt],
    protocol: SpeedProtocol,
    evaluator: Evaluator,
    processes: int,
) -> Time:
    """The time of the run, from a few seconds of it. A rule's table is not kept.

    Raises:
        TemperaError: there is no draft, metrics cannot be measured, or the run begins with work of
            unknown length.
    """
    if cfg.expected_length is not None:
        raise TemperaError("expected_length= is found by decoding first")
    if cfg.compile:
        raise TemperaError("compile=true compiles rounds first, which takes minutes")
    evaluator.check(cfg.model.name)
    build.check_draft(cfg)
    pipeline = build.build_pipeline(cfg, build.build_fast_target(cfg))
    return run_time(
        pipeline, prompts, cfg.batch_size, cfg.diagnostics, protocol, evaluator, processes
    )


def _hydra(cfg: DictConfig, name: str) -> Any:
    """A fact that Hydra knows about the run; empty if the script is called as a function."""
    node = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
