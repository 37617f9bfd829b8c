"""Training of the shapes evaluation networks: the attribute classifier and the tiny CLIP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures
from shapes_recipe.stage import arithmetic, minimise
from tempera.image_tokenizers.vq import VQModel
from tempera.shapes.classifier import UNTOLD, Classifier, correct, labels
from tempera.shapes.clip import CONTEXT, END, tokenize
from tempera.shapes.world import Sample, World
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
        blurred: share of the images that pass through the tokenizer first, as generated images do.
        measured: unseen scenes that its metrics come from.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 4000
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    blurred: float = 0.15
    seed: int = 100
    save_every: int = 200
    measured: int = 4096
    bf16: bool = True


def _train(
    model: nn.Module,
    loss_of: Callable[[list[Sample], Tensor], Tensor],
    settings: EvaluatorTraining,
    tokenizer: VQModel,
    run: Path,
) -> None:
    """Minimise the loss of samples and their images, some of these as the tokenizer renders them,
    from where `run` left off.
    """
    world = World(settings.seed)
    size = settings.batch_size
    blurred = round(settings.blurred * size)

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        samples = world.batch(step * size, size)
        images = pictures(samples)
        with arithmetic(settings.bf16):
            with torch.no_grad():
                rendered = tokenizer.decode_codes(tokenizer.encode(images[:blurred])).float()
            loss = loss_of(samples, torch.cat([rendered, images[blurred:]]))
        yield {"loss": loss}

    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    minimise(model.train(), [optimiser], cosine(50, settings.steps), losses, settings, run)


def train_classifier(
    settings: EvaluatorTraining, tokenizer: VQModel, run: Path
) -> tuple[Classifier, dict[str, float]]:
    """Train the classifier, from where `run` left off; returns it with the accuracy of every
    attribute on unseen real images.
    """
    torch.manual_seed(settings.seed)
    model = Classifier()

    def loss_of(samples: list[Sample], images: Tensor) -> Tensor:
        truth = [labels(sample.scene) for sample in samples]
        losses = []
        for name, scores in model(images).items():
            classes = torch.tensor([of_scene[name] for of_scene in truth])
            losses.append(F.cross_entropy(scores.float(), classes, ignore_index=UNTOLD))
        return torch.stack(losses).sum()

    _train(model, loss_of, settings, tokenizer, run)
    return model, measure_classifier(model, World(settings.seed + 1), settings.measured)


@torch.no_grad()
def measure_classifier(model: Classifier, world: World, count: int) -> dict[str, float]:
    """Accuracy of every attribute on `count` real images."""
    parts = []
    for first in range(0, count, 256):
        samples = world.batch(first, min(256, count - first))
        logits = model(pictures(samples))
        parts.append(correct(logits, [sample.scene for sample in samples]))
    hits = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: right.nanmean().item() for name, right in hits.items() if right.isfinite().any()}


def train_clip(
    settings: EvaluatorTraining, tokenizer: VQModel, run: Path
) -> tuple[nn.Module, dict[str, float]]:
    """Train the CLIP with the symmetric contrastive loss, from where `run` left off; returns it
    with its text→image retrieval accuracy among 64 unseen images.
    """
    import open_clip  # takes seconds

    torch.manual_seed(settings.seed)
    model = open_clip.CLIP(**TINY_CLIP["model_cfg"])

    def loss_of(samples: list[Sample], images: Tensor) -> Tensor:
        captions = [sample.scene.caption for sample in samples]
        return contrastive_loss(model, images, tokenize(captions))

    _train(model, loss_of, settings, tokenizer, run)
    return model, measure_clip(model, World(settings.seed + 1), settings.measured)


def contrastive_loss(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's loss: cross-entropy of matching each image with its text and each text with
    its image.
    """
    image_features, text_features, scale = model(images, texts)
    logits = scale * image_features @ text_features.T
    target = torch.arange(len(images))
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
        image_features, text_features, _ = model(pictures(samples), texts)
        similarity = text_features @ image_features.T
        hits.append((similarity.argmax(-1) == torch.arange(len(samples))).float())
        cosines.append(similarity.diag())
    return {"retrieval": torch.cat(hits).mean().item(), "cosine": torch.cat(cosines).mean().item()}
