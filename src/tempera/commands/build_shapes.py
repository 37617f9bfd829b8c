"""`tempera-build`: train the networks of the shipped model on the procedural world: image
tokenizer, target with text encoder, half-size target, classifier, tiny CLIP and MAR.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from tempera.config.instantiate import check_value, instantiate
from tempera.errors import TemperaError
from tempera.shapes.build import stages

log = logging.getLogger(__name__)
STAGES: dict[str, Callable[..., None]] = {
    "tokenizer": stages.build_tokenizer,
    "target": stages.build_target,
    "independent": stages.build_independent,
    "classifier": stages.build_classifier,
    "clip": stages.build_clip,
    "mar": stages.build_mar,
}


def main(cfg: DictConfig) -> None:
    """Run the chosen stages in order; each writes its weights and its record into `output`."""
    for name, kind in (("threads", int | None), ("output", Path)):
        check_value(cfg, name, cfg[name], kind)
    if cfg.threads is not None and not 1 <= cfg.threads <= 1024:
        raise TemperaError(f"threads={cfg.threads} is not possible: give 1 to 1024, or null")
    unknown = [stage for stage in cfg.stages if stage not in STAGES]
    if unknown:
        raise TemperaError(f"stages={unknown} are unknown; choose among {', '.join(STAGES)}")
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    settings = {stage: instantiate(cfg[stage]) for stage in cfg.stages}
    for stage in cfg.stages:
        _check(stage, settings[stage])
    for stage in cfg.stages:
        STAGES[stage](
            Path(str(cfg.output)),
            settings[stage],
            lambda values, step, stage=stage: log.info("%s %d: %s", stage, step, values),
        )
    stages.write_readme(Path(str(cfg.output)))


AT_LEAST_1 = ("steps", "batch_size", "scenes", "repeats", "save_every")
SHARES = ("caption_dropout", "cfg_dropout", "calm", "blurred", "ema", "shown")


def _check(stage: str, settings: Any) -> None:
    """Raise TemperaError for a number that no network can be trained with."""
    for name, value in asdict(settings).items():
        option = f"{stage}.{name}={value}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if value < 0:
            raise TemperaError(f"{option} is not possible: give 0 or more")
        if name.endswith(AT_LEAST_1) and not name.endswith("warmup_steps") and value < 1:
            raise TemperaError(f"{option} is too small: give at least 1")
        if name in SHARES and value > 1:
            raise TemperaError(f"{option} is not a share: give a number from 0 to 1")
        if name.endswith("lr") and not value:
            raise TemperaError(f"{option} would train nothing: give a number above 0")
