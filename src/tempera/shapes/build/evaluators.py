"""Training of the shapes evaluation networks: the attribute classifier and the tiny CLIP."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.image_tokenizers.vq import VQModel
from tempera.runtime.torchvision import import_open_clip
from tempera.shapes.classifier import UNTOLD, Classifier, correct, labels
from tempera.shapes.clip import TINY_CLIP
from tempera.shapes.world import Sample, World
from tempera.training.lr_schedules import cosine

LogMetrics = Callable[[dict[str, float], int], None]


@dataclass(frozen=True)
class EvaluatorTraining:
    """How an evaluation network is trained. A `blurred` share of the images passes through the
    tokenizer first, as generated images do.
    """

    steps: int = 3000
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    blurred: float = 0.3
    seed: int = 100


class Stream:
    """Batches of world samples and their images [B, 3, 64, 64] in [−1, 1], some of them as the
    tokenizer renders them.
    """

    def __init__(self, settings: EvaluatorTraining, tokenizer: VQModel) -> None:
        self.world, self.size, self.tokenizer = World(settings.seed), settings.batch_size, tokenizer
        self.blurred = round(settings.blurred * settings.batch_size)

    def batch(self, step: int) -> tuple[list[Sample], Tensor]:
        """Batch number `step`."""
        samples = self.world.batch(step * self.size, self.size)
        images = (
            torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2
            - 1
        )
        with torch.no_grad():
            rendered = self.tokenizer.decode_codes(self.tokenizer.encode(images[: self.blurred]))
        return samples, torch.cat([rendered, images[self.blurred :]])


def _optimiser(
    model: nn.Module, settings: EvaluatorTraining
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, cosine(50, settings.steps))


def train_classifier(
    settings: EvaluatorTraining, tokenizer: VQModel, report: LogMetrics | None = None
) -> tuple[Classifier, dict[str, float]]:
    """Train the classifier; returns it with the accuracy of each attribute on unseen images."""
    torch.manual_seed(settings.seed)
    model, stream = Classifier(), Stream(settings, tokenizer)
    optimiser, schedule = _optimiser(model, settings)
    for step in range(settings.steps):
        samples, images = stream.batch(step)
        truth = [labels(sample.scene) for sample in samples]
        logits = model.attributes(images)
        losses = [
            F.cross_entropy(
                logits[name], torch.tensor([t[name] for t in truth]), ignore_index=UNTOLD
            )
            for name in logits
        ]
        loss = torch.stack(losses).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if report and step % 50 == 0:
            report({"loss": loss.item()}, step)
    return model.eval(), measure_classifier(model, World(settings.seed + 1))


@torch.no_grad()
def measure_classifier(model: Classifier, world: World, count: int = 2000) -> dict[str, float]:
    """Accuracy of every attribute on `count` real images."""
    hits: dict[str, list[Tensor]] = {}
    for first in range(0, count, 250):
        samples = world.batch(first, 250)
        images = (
            torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2
            - 1
        )
        for name, right in correct(
            model.attributes(images), [sample.scene for sample in samples]
        ).items():
            hits.setdefault(name, []).append(right)
    return {name: torch.cat(parts).nanmean().item() for name, parts in hits.items()}


def new_clip() -> tuple[nn.Module, Callable[[list[str]], Tensor]]:
    """An untrained CLIP of the shapes configuration and its tokenizer, built by open_clip."""
    open_clip = import_open_clip()
    with TemporaryDirectory() as directory:
        (Path(directory) / "open_clip_config.json").write_text(json.dumps(TINY_CLIP))
        name = f"local-dir:{directory}"
        return open_clip.create_model(name, load_weights=False), open_clip.get_tokenizer(name)


def train_clip(
    settings: EvaluatorTraining, tokenizer: VQModel, report: LogMetrics | None = None
) -> tuple[nn.Module, dict[str, float]]:
    """Train the CLIP with the symmetric contrastive loss; returns it with its text→image retrieval
    accuracy among 64 unseen images.
    """
    torch.manual_seed(settings.seed)
    (model, words), stream = new_clip(), Stream(settings, tokenizer)
    optimiser, schedule = _optimiser(model, settings)
    model.train()
    for step in range(settings.steps):
        samples, images = stream.batch(step)
        loss = contrastive_loss(model, images, words([sample.scene.caption for sample in samples]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if report and step % 50 == 0:
            report({"loss": loss.item()}, step)
    return model.eval(), measure_clip(model, words, World(settings.seed + 1))


def contrastive_loss(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's loss: cross-entropy of matching images with texts and texts with images."""
    seen, read, scale = model(images, texts)
    logits, target = scale * seen @ read.T, torch.arange(len(images))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def measure_clip(
    model: nn.Module, words: Callable[[list[str]], Tensor], world: World, batches: int = 8
) -> dict[str, float]:
    """Share of captions whose own image scores highest among 64 real images, and the mean cosine of
    matching pairs.
    """
    hits, cosines = [], []
    for i in range(batches):
        samples = world.batch(64 * i, 64)
        images = (
            torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2
            - 1
        )
        seen, read, _ = model(images, words([sample.scene.caption for sample in samples]))
        similarity = read @ seen.T
        hits.append((similarity.argmax(-1) == torch.arange(64)).float())
        cosines.append(similarity.diag())
    return {"retrieval": torch.cat(hits).mean().item(), "cosine": torch.cat(cosines).mean().item()}
