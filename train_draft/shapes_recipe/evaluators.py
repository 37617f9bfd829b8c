"""Training of the shapes evaluation networks: the attribute classifier and the tiny CLIP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures
from shapes_recipe.stage import Ahead, arithmetic, device, minimise
from tempera.shapes.classifier import UNTOLD, Classifier, correct, labels
from tempera.shapes.clip import CONTEXT, END, tokenize
from tempera.shapes.world import Sample, Texture, World
from tempera.training.lr_schedules import cosine

TINY_CLIP: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": 48,
            "layers": [1, 1, 1, 1],
            "width": 16,
            "patch_size": None,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": CONTEXT,
            "vocab_size": END + 1,
            "width": 48,
            "heads": 3,
            "layers": 3,
        },
    },
    "preprocess_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}
"""The shipped CLIP's configuration, in open_clip's format."""


@dataclass
class EvaluatorTraining:
    """How an evaluation network is trained.

    Attributes:
        smoothed: share of the images that are smoothed, all clouds, as a continuous tokenizer
            smooths them.
        measured: unseen scenes that its metrics come from.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 4000
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    smoothed: float = 0.15
    seed: int = 100
    save_every: int = 200
    measured: int = 4096
    bf16: bool = True


def _train(
    model: nn.Module,
    told: Callable[[list[Sample]], Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    settings: EvaluatorTraining,
    run: Path,
) -> None:
    """Minimise a loss of what is told of samples of both textures and of their images, from where
    `run` left off.
    """
    worlds = [World(settings.seed, texture=texture) for texture in get_args(Texture)]
    scenes = Ahead(partial(_batch, worlds, told, settings), settings.steps)
    place = device()

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        truth, images = scenes.batch(step)
        with arithmetic(settings.bf16, place.type):
            loss = loss_of(truth.to(place), images.to(place))
        yield {"loss": loss}

    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    minimise(model.train(), [optimiser], cosine(50, settings.steps), losses, settings, run)


def _batch(
    worlds: list[World],
    told: Callable[[list[Sample]], Tensor],
    settings: EvaluatorTraining,
    step: int,
) -> tuple[Tensor, Tensor]:
    """What is told of a step's samples, as many of each world, and their images."""
    size = settings.batch_size
    samples = []
    for row in range(size):
        samples.append(worlds[len(worlds) * row // size].sample(step * size + row))
    images = pictures(samples)
    sharp = size - round(settings.smoothed * size)
    images[sharp:] = F.avg_pool2d(images[sharp:], 3, 1, 1, count_include_pad=False)
    return told(samples), images


def _classes(samples: list[Sample]) -> Tensor:
    """The classes of every attribute, int64 [B, A]."""
    return torch.tensor([list(labels(sample.scene).values()) for sample in samples])


def _captions(samples: list[Sample]) -> Tensor:
    """Their whole captions as tokens, int64 [B, `CONTEXT`]."""
    return tokenize([sample.scene.caption for sample in samples])


def train_classifier(settings: EvaluatorTraining, run: Path) -> tuple[Classifier, dict[str, float]]:
    """Train the classifier, from where `run` left off; returns it with the accuracy of every
    attribute on unseen real images.
    """
    torch.manual_seed(settings.seed)
    model = Classifier().to(device())

    def loss_of(truth: Tensor, images: Tensor) -> Tensor:
        losses = []
        for scores, classes in zip(model(images).values(), truth.T, strict=True):
            losses.append(F.cross_entropy(scores.float(), classes, ignore_index=UNTOLD))
        return torch.stack(losses).sum()

    _train(model, _classes, loss_of, settings, run)
    return model, measure_classifier(model, World(settings.seed + 1), settings.measured)


@torch.no_grad()
def measure_classifier(model: Classifier, world: World, count: int) -> dict[str, float]:
    """Accuracy of every attribute on `count` real images."""
    parts = []
    for first in range(0, count, 256):
        samples = world.batch(first, min(256, count - first))
        logits = model(pictures(samples).to(device()))
        parts.append(correct(logits, [sample.scene for sample in samples]))
    hits = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: right.nanmean().item() for name, right in hits.items() if right.isfinite().any()}


def train_clip(settings: EvaluatorTraining, run: Path) -> tuple[nn.Module, dict[str, float]]:
    """Train the CLIP with the symmetric contrastive loss, from where `run` left off; returns it
    with its text→image retrieval accuracy among 64 unseen images.
    """
    import open_clip  # takes seconds

    torch.manual_seed(settings.seed)
    model = open_clip.CLIP(**TINY_CLIP["model_cfg"]).to(device())
    _train(model, _captions, partial(contrastive_loss, model), settings, run)
    return model, measure_clip(model, World(settings.seed + 1), settings.measured)


def contrastive_loss(model: nn.Module, texts: Tensor, images: Tensor) -> Tensor:
    """CLIP's loss: cross-entropy of matching each image with its text and each text with
    its image.
    """
    image_features, text_features, scale = model(images, texts)
    logits = scale * image_features @ text_features.T
    target = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def measure_clip(model: nn.Module, world: World, count: int) -> dict[str, float]:
    """Share of captions whose own image scores highest among 64 real images, and the mean cosine of
    matching pairs.
    """
    hits = []
    cosines = []
    for first in range(0, count, 64):
        samples = world.batch(first, min(64, count - first))
        texts = tokenize([sample.scene.caption for sample in samples])
        images = pictures(samples).to(device())
        image_features, text_features, _ = model(images, texts.to(device()))
        similarity = text_features @ image_features.T
        hits.append((similarity.argmax(-1).cpu() == torch.arange(len(samples))).float())
        cosines.append(similarity.diag())
    return {"retrieval": torch.cat(hits).mean().item(), "cosine": torch.cat(cosines).mean().item()}
