"""`tempera-build`: train the networks of the shipped model on the procedural world: image
tokenizer, target with text encoder, half-size target, classifier, tiny CLIP and MAR.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig

from tempera.config.instantiate import instantiate
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
    unknown = [stage for stage in cfg.stages if stage not in STAGES]
    if unknown:
        raise TemperaError(f"stages={unknown} are unknown; choose among {', '.join(STAGES)}")
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    settings = {stage: instantiate(cfg[stage]) for stage in cfg.stages}
    for stage in cfg.stages:
        STAGES[stage](
            Path(cfg.output),
            settings[stage],
            lambda values, step, stage=stage: log.info("%s %d: %s", stage, step, values),
        )
    stages.write_readme(Path(cfg.output))
