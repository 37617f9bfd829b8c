"""`tempera-train`: train the draft of a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import check_values, from_options, instantiate
from tempera.drafters.draft_network import DraftNetwork
from tempera.runtime.distributed import Processes
from tempera.runtime.installation import command
from tempera.runtime.tracking import Tracker
from tempera.training.fsdp import launched, split_target
from tempera.training.losses import Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import DRAFT, train


def main(cfg: DictConfig) -> dict[str, Any]:
    """Train in the run directory, or resume there; return the metrics of the best draft."""
    processes = Processes(cpu=build.parse_device(cfg.device).type == "cpu")
    recipe: Recipe = from_options(cfg, "tempera.training.recipe.Recipe")
    target: Any = build.build_target(cfg, split_target if launched() else None)
    directory = Path(str(cfg.directory))
    check_values(cfg.tracking)
    codes = instantiate(
        cfg.train_data, target=target, tokenizer=build.build_tokenizer(cfg), directory=directory
    )
    torch.manual_seed(recipe.seed)
    draft: DraftNetwork = instantiate(cfg.draft, target=target, model=cfg.model.name)
    loss: Loss = instantiate(cfg.loss)
    apart = {*asdict(recipe), "device", "directory", "tracking"}
    choices: Any = OmegaConf.to_container(
        OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in apart])
    )

    def start_tracker() -> Tracker:
        chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        return build.start_tracker(cfg, directory, "train_draft", chosen)

    metrics = train(target, draft, codes, loss, recipe, directory, start_tracker, choices)
    if processes.is_main:
        print(
            f"the draft is in {directory / DRAFT}: {command('eval')} "
            f"{pasted('drafter.path', directory / DRAFT)}"
        )
    return metrics
