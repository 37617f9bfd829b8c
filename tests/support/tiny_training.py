"""A tiny random target with the world's data, for the training tests; as a script it is one
training run of theirs.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tempera.commands.train import build_recipe
from tempera.config.compose import composed
from tempera.data.shards import CodedImages
from tempera.decoding.probabilities import Sampling
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.eagle_network import EagleModel
from tempera.runtime.network_identity import identity_of
from tempera.runtime.tracking import Tracker
from tempera.shapes.networks import TextEncoder
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.transformer import TransformerTarget
from tempera.training.dataset import ShardCodes
from tempera.training.losses import EagleLoss, Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import TrainingRun

GRID = (3, 4)
RECIPE: dict[str, Any] = {
    "steps": 12,
    "batch_size": 4,
    "lr": 3e-3,
    "warmup_steps": 2,
    "validate_every": 4,
    "checkpoint_every": 5,
    "log_every": 1,
    "holdout": 4,
    "decodes": 2,
    "depth": 2,
    "ema": 0.9,
    "seed": 1,
}


@functools.cache
def usual_recipe() -> Recipe:
    """The defaults of conf/train_draft.yaml."""
    return build_recipe(composed("train_draft", ["recipe=default"]))


def recipe_with(**changes: Any) -> Recipe:
    """A recipe that differs from the usual one."""
    return replace(usual_recipe(), **changes)


def tiny_target(guidance: float = 2.0, dtype: torch.dtype = torch.float32) -> TransformerTarget:
    """A random LlamaGen of 2 layers × 16 on 3×4 tokens of 24 codes, conditioned on the shapes
    world's words.
    """
    torch.manual_seed(0)
    config = LlamaGenConfig(24, 16, 32, 2, 2, GRID, prefix_length=6, caption_dim=8)
    network = LlamaGen(config)
    with torch.no_grad():
        network.lm_head.weight.normal_(0, 0.5)
    encoder = TextEncoder(6, 8, layers=1, heads=2).eval()

    def conditioner(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            features, keep = encoder.encode(prompts)
        return features.to(dtype), keep

    network = network.to(dtype).requires_grad_(False)
    identity = identity_of(network)
    return TransformerTarget(network, conditioner, Sampling(guidance=guidance), identity=identity)


def tiny_draft(
    target: TransformerTarget,
    features: tuple[int, ...] = (),
    kind: type[DraftNetwork] = EagleModel,
) -> Any:
    """An untrained draft, always the same."""
    torch.manual_seed(0)
    return kind.of(target.network, "tiny", identity=target.identity, features=features)


def tiny_codes(count: int = 60) -> ShardCodes:
    """Random images with world-like captions."""
    generator = torch.Generator().manual_seed(0)
    colours = ("red", "green", "blue", "white", "black")
    captions = [f"a {'small ' if i % 2 else ''}{colours[i % 5]} ring" for i in range(count)]
    codes = torch.randint(24, (count, GRID[0] * GRID[1]), generator=generator)
    return ShardCodes(
        CodedImages([f"image-{i}" for i in range(count)], captions, codes.int().numpy())
    )


def tiny_train(
    directory: Path,
    tracker: Any = None,
    target: TransformerTarget | None = None,
    loss: Loss = EagleLoss(),  # noqa: B008  frozen
    kind: type[DraftNetwork] = EagleModel,
    **changes: Any,
) -> dict[str, Any]:
    """A whole training run."""
    target = target or tiny_target()
    recipe = recipe_with(**RECIPE | changes)
    draft, record = tiny_draft(target, kind=kind), {"data": {"source": "tiny"}, "loss": {}}
    run = TrainingRun(target, draft, tiny_codes(), loss, recipe, directory, record)
    return run.train(lambda: tracker or Tracker())
