"""`tempera-eval`: generate images, and measure acceptance, speed and quality."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from tempera.commands import expected_length
from tempera.commands.costs import dry_evaluation, read_with_files
from tempera.config import build
from tempera.config.changes import changes
from tempera.config.instantiate import from_options, instantiate, parsed
from tempera.data.prompts import Prompt, check_prompts, described, one_prompt
from tempera.errors import TemperaError
from tempera.evaluation.run import evaluate
from tempera.evaluation.run_directory import claim, shared_directory
from tempera.evaluation.run_identity import FREE, about, run_identity
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.scores import read_scores
from tempera.metrics.torch_metrics import TorchMetrics
from tempera.reporting.run_names import run_name
from tempera.runtime.distributed import Processes
from tempera.runtime.processor import tell_slow_bfloat16
from tempera.runtime.side_services import side_service
from tempera.runtime.torchvision import import_torchvision
from tempera.targets.conditioners import ClassLabels

LARGEST = 256
"""The first batch that `batch_size=auto` tries on a GPU; larger ones make no image faster."""


def main(cfg: DictConfig) -> dict[str, float]:
    """Run one evaluation and return its metrics."""
    device = build.parse_device(cfg.device, dry=cfg.dry_run)
    build.check_tokens(cfg)
    paper = _paper(cfg)
    parsed(cfg.tracking)
    evaluator, protocol = _evaluator(cfg), instantiate(cfg.speed)
    overrides = _hydra(cfg, "overrides") or []
    processes = Processes(cpu=device.type == "cpu")
    if processes.is_main and build.parse_dtype(cfg.dtype, device) == torch.bfloat16:
        tell_slow_bfloat16("dtype=bfloat16", "dtype=float32", device)
    parsed(cfg.drafter)
    searches = cfg.expected_length is not None
    if searches:
        expected_length.check_options(cfg, overrides)
    if not cfg.dry_run:
        build.check_draft(cfg, of_the_hub=False)  # before downloads are listed
    one = cfg.prompt is not None
    read = partial(one_prompt, cfg.prompt) if one else partial(instantiate, cfg.data)
    prompts = read_with_files(cfg, _networks, read)
    if cfg.dry_run:
        return dry_evaluation(cfg, prompts, evaluator) if processes.is_main else {}
    build.check_draft(cfg)
    rule = None if searches else build.build_rule(cfg)
    directory = shared_directory(processes, Path(str(cfg.directory)))
    evaluator.check(cfg.model.name)
    _check_prompts(cfg, prompts)
    if isinstance(evaluator, TorchMetrics):
        evaluator.check_prompts(prompts)
    given = read_scores(cfg.scores, [prompt.id for prompt in prompts])
    target = build.build_fast_target(cfg)
    matched: dict[str, Any] = {}
    if searches:
        cfg, matched = expected_length.matched(cfg, target, directory, processes)
        rule = build.build_rule(cfg)
    pipeline = build.build_pipeline(cfg, target, rule)
    choices = _hydra(cfg, "choices") or {}
    options = {str(key): cfg[key] for key in cfg if key not in FREE}
    identity = run_identity(options, choices, pipeline, build.parse_dtype(cfg.dtype, device))
    notes = about(device, overrides) | matched
    notes |= {"changes": changes(cfg, choices), "paper": paper}
    notes["data"] = _data(cfg, choices) | described(prompts)
    searched = matched.get(expected_length.MATCHED, {}).get("option")
    named = notes["changes"], identity.get("delta"), searched, cfg.expected_length
    name = run_name(identity["method"], *named)
    found = {"directory": directory, "name": name, "settings": identity, "about": notes}
    plan = from_options(cfg, "tempera.evaluation.run.RunPlan", **found, **_batches(cfg, device))
    claim(directory, identity, notes, write=processes.is_main)
    tracker = build.start_tracker(cfg, directory, "eval", choices, {**identity, **notes})
    result = evaluate(plan, pipeline, prompts, evaluator, protocol, processes, given)
    if result is None:
        return {}
    from tempera.reporting import run_report  # matplotlib takes a second to import

    with side_service(f"no report ({{why}}): the results are in {directory}."):
        run_report.write(directory, result, tracker, cfg.verbose)
    values = {key: one["value"] for key, one in result["metrics"].items()}
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


def _check_prompts(cfg: DictConfig, prompts: Sequence[Prompt]) -> None:
    """Raise TemperaError for prompts that the model cannot draw, or that calibrate it."""
    if cfg.expected_length is not None:
        expected_length.check_prompts(cfg, prompts)
    captions = build.build_captions(cfg)
    numbers = cfg.prompt is None and all(one.text.isdigit() for one in prompts)
    if numbers and not isinstance(captions, ClassLabels):
        raise TemperaError(
            f"these prompts are numbers of classes, and model={cfg.model.name} draws texts: choose "
            "data=coco, parti or file, or a model of classes",
            option="data",
        )
    if captions is not None:
        check_prompts(prompts, captions)


def _batches(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """The arguments of a plan that say how many prompts are decoded together."""
    auto = cfg.batch_size == "auto"
    most = LARGEST if auto and device.type == "cuda" else build.batch_size(cfg)
    return {"batch_size": most, "shrinks": auto}


def _data(cfg: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """Where the prompts come from."""
    if cfg.prompt is not None:
        return {"prompts": cfg.prompt, "preset": "prompt"}
    return {"prompts": _hydra(cfg, "data"), "preset": choices.get("data")}


def _paper(cfg: DictConfig) -> Any:
    """The option `paper` as plain values; raises TemperaError if it is no table's."""
    if (node := cfg.get("paper")) is None:
        return None
    from tempera.reporting.paper_results import find

    given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    find(given.get("table") if isinstance(given, Mapping) else given)
    return given


def _hydra(cfg: DictConfig, name: str) -> Any:
    """A fact that Hydra knows about the run; empty if the script is called as a function."""
    node = OmegaConf.select(cfg, name, throw_on_resolution_failure=False)
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
