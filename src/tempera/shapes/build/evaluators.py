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
from tempera.shapes.build.broken import BREAKS, broken_pictures
from tempera.shapes.build.looks import attribute_means
from tempera.shapes.build.record import LogMetrics
from tempera.shapes.build.resumable import remaining_steps
from tempera.shapes.classifier import UNTOLD, Classifier, correct, labels
from tempera.shapes.clip import TINY_CLIP
from tempera.shapes.world import Sample, World
from tempera.training.checkpoint import State, TrainingProgress
from tempera.training.lr_schedules import cosine


@dataclass(frozen=True)
class EvaluatorTraining:
    """How an evaluation network is trained.

    Attributes:
        blurred: share of the images that pass through the tokenizer first, as generated images do.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 4000
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    blurred: float = 0.15
    seed: int = 100
    save_every: int = 200
    bf16: bool = True


class Stream:
    """Batches of world samples and their images [B, 3, 48, 48] in [−1, 1], some of them as the
    tokenizer renders them.
    """

    def __init__(self, settings: EvaluatorTraining, tokenizer: VQModel) -> None:
        self.world, self.size, self.tokenizer = World(settings.seed), settings.batch_size, tokenizer
        self.blurred, self.bf16 = round(settings.blurred * settings.batch_size), settings.bf16

    def batch(self, step: int) -> tuple[list[Sample], Tensor]:
        """Batch number `step`."""
        samples = self.world.batch(step * self.size, self.size)
        images = _pictures(samples)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            rendered = self.tokenizer.decode_codes(self.tokenizer.encode(images[: self.blurred]))
        return samples, torch.cat([rendered.float(), images[self.blurred :]])


BatchLoss = Callable[[list[Sample], Tensor], Tensor]
"""Of samples and their images, as `Stream.batch` gives them."""


def _train(
    model: nn.Module,
    loss_of: BatchLoss,
    settings: EvaluatorTraining,
    tokenizer: VQModel,
    directory: Path,
    report: LogMetrics | None,
) -> None:
    """Minimise the loss, from where `directory` left off."""
    stream = Stream(settings, tokenizer)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    state = State(model, [optimiser], {}, TrainingProgress())
    for step in remaining_steps(directory, state, settings, cosine(50, settings.steps)):
        samples, images = stream.batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            loss = loss_of(samples, images)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if report and step % 50 == 0:
            report({"loss": loss.item()}, step)


def train_classifier(
    settings: EvaluatorTraining,
    tokenizer: VQModel,
    directory: Path,
    report: LogMetrics | None = None,
) -> tuple[Classifier, dict[str, float]]:
    """Train the classifier, from where `directory` left off; returns it with the accuracy of every
    attribute on unseen real images.
    """
    torch.manual_seed(settings.seed)
    model = Classifier()

    def loss_of(samples: list[Sample], images: Tensor) -> Tensor:
        truth = [labels(sample.scene) for sample in samples]
        losses = [
            F.cross_entropy(
                scores.float(), torch.tensor([t[name] for t in truth]), ignore_index=UNTOLD
            )
            for name, scores in model.attributes(images).items()
        ]
        return torch.stack(losses).sum()

    _train(model, loss_of, settings, tokenizer, directory, report)
    return model.eval(), measure_classifier(model, World(settings.seed + 1))


@torch.no_grad()
def measure_classifier(model: Classifier, world: World, count: int = 4096) -> dict[str, float]:
    """Accuracy of every attribute on `count` real images; and of 512 broken pictures of every kind
    the share in which it finds something that the caption does not tell.
    """
    batches = []
    for first in range(0, count, 256):
        samples = world.batch(first, min(256, count - first))
        logits = model.attributes(_pictures(samples))
        batches.append(correct(logits, [sample.scene for sample in samples]))
    found = {}
    for kind in BREAKS:
        samples, images = broken_pictures(world, kind, max(count // 8, 1))
        right = torch.stack(
            list(correct(model.attributes(images), [s.scene for s in samples]).values())
        )
        found[f"finds_{kind}"] = (right == 0).any(0).float().mean().item()
    return attribute_means(batches) | found


def _pictures(samples: list[Sample]) -> Tensor:
    """Images [B, 3, 48, 48] in [−1, 1]."""
    stack = np.stack([sample.image for sample in samples])
    return torch.from_numpy(stack).permute(0, 3, 1, 2) * 2 - 1


def new_clip() -> tuple[nn.Module, Callable[[list[str]], Tensor]]:
    """An untrained CLIP of the shipped configuration and its tokenizer, built by open_clip."""
    open_clip = import_open_clip()
    with TemporaryDirectory() as directory:
        (Path(directory) / "open_clip_config.json").write_text(json.dumps(TINY_CLIP))
        name = f"local-dir:{directory}"
        return open_clip.create_model(name, load_weights=False), open_clip.get_tokenizer(name)


def train_clip(
    settings: EvaluatorTraining,
    tokenizer: VQModel,
    directory: Path,
    report: LogMetrics | None = None,
) -> tuple[nn.Module, dict[str, float]]:
    """Train the CLIP with the symmetric contrastive loss, from where `directory` left off; returns
    it with its text→image retrieval accuracy among 64 unseen images.
    """
    torch.manual_seed(settings.seed)
    model, words = new_clip()
    model.train()

    def loss_of(samples: list[Sample], images: Tensor) -> Tensor:
        return contrastive_loss(model, images, words([s.scene.caption for s in samples]))

    _train(model, loss_of, settings, tokenizer, directory, report)
    return model.eval(), measure_clip(model, words, World(settings.seed + 1))


def contrastive_loss(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's loss: cross-entropy of matching each image with its text and each text with
    its image.
    """
    seen, read, scale = model(images, texts)
    logits, target = scale * seen @ read.T, torch.arange(len(images))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def measure_clip(
    model: nn.Module, words: Callable[[list[str]], Tensor], world: World, count: int = 4096
) -> dict[str, float]:
    """Share of captions whose own image scores highest among 64 real images, the mean cosine of
    matching pairs; and of 512 broken pictures of every kind the share that scores lower with its
    caption than the picture of the caption's scene.
    """
    hits, cosines = [], []
    for first in range(0, count, 64):
        samples = world.batch(first, min(64, count - first))
        seen, read, _ = model(_pictures(samples), words([s.scene.caption for s in samples]))
        similarity = read @ seen.T
        hits.append((similarity.argmax(-1) == torch.arange(len(samples))).float())
        cosines.append(similarity.diag())
    means = {"retrieval": torch.cat(hits).mean().item(), "cosine": torch.cat(cosines).mean().item()}
    for kind in BREAKS:
        samples, images = broken_pictures(world, kind, max(count // 8, 1))
        texts = words([sample.scene.caption for sample in samples])
        right, wrong = (
            (seen * read).sum(-1)
            for seen, read, _ in (model(part, texts) for part in (_pictures(samples), images))
        )
        means[f"finds_{kind}"] = (wrong < right).float().mean().item()
    return means
