"""Training of the embedded MAR: a KL tokenizer, then a small network and a smaller one that drafts for it, on scenes of one shape."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.continuous.diffusion import TRAINING_STEPS, Schedule
from tempera.continuous.kl import KLConfig, KLModel
from tempera.continuous.labels import CLASSES, class_of
from tempera.continuous.mar import MAR, MARConfig, initialise
from tempera.data.world import Sample, World
from tempera.training.anneal import trapezoid, warmup_cosine
from tempera.training.target import _resume, _save
from tempera.vq import VQConfig

Report = Callable[[dict[str, float], int], None]

TINY_KL = KLConfig(
    VQConfig(channels=16, encoder_multipliers=(1, 2, 4), decoder_multipliers=(1, 2, 4), res_blocks=1, z_channels=4, norm_groups=4), patch=2
)
TINY_MAR = MARConfig(
    grid=(8, 8), channels=4, patch=2, width=128, depth=4, heads=4, buffer=8, classes=len(CLASSES), head_width=256, head_depth=3
)
TINY_DRAFT = replace(TINY_MAR, width=64, depth=2, head_width=128, head_depth=2)


@dataclass(frozen=True)
class MARTraining:
    """How the three networks are trained.

    Attributes:
        tokenizer_steps, tokenizer_lr: of the KL tokenizer.
        kl: weight of its latents' KL divergence from N(0, 1).
        steps, draft_steps: of the network and of its draft.
        lr: AdamW's, for both.
        repeats: noise levels a token is trained at, for one pass of the transformer.
        variance: weight of the variational bound that teaches the variances, beside the squared error of the noise.
        drop: share of images without a class, for guidance.
        ema: decay of the moving average of the weights, which is what is kept.
    """

    tokenizer_steps: int = 1500
    tokenizer_lr: float = 1.5e-3
    kl: float = 1e-5
    steps: int = 12000
    draft_steps: int = 12000
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.02
    warmup: int = 200
    repeats: int = 4
    variance: float = 0.1
    drop: float = 0.1
    ema: float = 0.998
    seed: int = 0
    save_every: int = 500


def single_shapes(world: World, first: int, count: int) -> list[Sample]:
    """The next `count` scenes of one shape, from scene `first`·2 on: pure in (world, first)."""
    return [sample for sample, _ in zip(_single(world, 2 * first), range(count), strict=False)]


def _single(world: World, index: int) -> Iterator[Sample]:
    while True:
        sample = world.sample(index)
        if len(sample.scene.things) == 1:
            yield sample
        index += 1


def images_and_classes(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Images float32 [B, 3, 64, 64] in [−1, 1], and their classes int64 [B]."""
    images = torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2 - 1
    return images, torch.tensor([class_of(sample.scene.caption) for sample in samples])


def train_kl(settings: MARTraining, config: KLConfig, report: Report | None = None) -> tuple[KLModel, dict[str, float]]:
    """Train the tokenizer; its scale is set to give latents of unit variance. Returns it with PSNR in dB on unseen scenes."""
    torch.manual_seed(settings.seed)
    model, world = KLModel(config), World(settings.seed)
    optimiser = torch.optim.Adam(model.parameters(), settings.tokenizer_lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, warmup_cosine(30, settings.tokenizer_steps))
    for step in range(settings.tokenizer_steps):
        images, _ = images_and_classes(single_shapes(world, step * settings.batch_size, settings.batch_size))
        mean, log_variance = model.moments(images)
        latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        painted = model.decoder(model.post_quant_conv(latents))
        error = F.mse_loss(painted, images)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = error + 0.5 * F.l1_loss(painted, images) + settings.kl * divergence
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if report and step % 25 == 0:
            report({"loss": loss.item(), "psnr": _psnr(error)}, step)
    model.eval().requires_grad_(False)
    images, _ = images_and_classes(single_shapes(World(settings.seed + 1), 0, 64))
    mean, _ = model.moments(images)
    model.config = replace(config, scale=1 / float(mean.std()))
    return model, {"psnr": _psnr(F.mse_loss(model.decode_codes(model.encode(images)), images)), "scale": model.config.scale}


def _psnr(error: Tensor) -> float:
    return float(-10 * torch.log10(error.detach() / 4))


class _Averaged(nn.Module):
    """A network and the moving average of its weights."""

    def __init__(self, network: MAR, decay: float) -> None:
        super().__init__()
        self.network, self.average, self.decay = network, copy.deepcopy(network).requires_grad_(False), decay

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the average; faster in the first steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for mean, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)


def token_losses(
    network: MAR, tokens: Tensor, labels: Tensor, known: int, order: Tensor, drop: Tensor, repeats: int
) -> tuple[Tensor, Tensor]:
    """How well the tokens that are not known are predicted (Li et al. 2024, Eq. 2; Nichol and Dhariwal 2021, Eq. 16).

    Args:
        network: the network.
        tokens: by place in the image, [B, T, D].
        labels, drop: classes int64 [B], and which of them are left out, bool [B].
        known: how many tokens are shown.
        order: int64 [B, T].
        repeats: noise levels a token.

    Returns:
        The squared error of the noise, and the divergence of the predicted kernel from the true posterior in nats, means a number.
    """
    schedule, channels = Schedule(TRAINING_STEPS), tokens.shape[-1]
    ordered = tokens.gather(1, order.unsqueeze(-1).expand_as(tokens))
    places = torch.arange(known, order.shape[1]).expand(len(tokens), -1)
    counts = torch.full((len(tokens),), known)
    vectors = network(ordered[:, :known], order, counts, network.class_embedding(labels, drop), places)
    condition, start = (part.flatten(0, 1).repeat(repeats, 1) for part in (vectors, ordered[:, known:]))
    t, noise = torch.randint(TRAINING_STEPS, (len(start),)), torch.randn_like(start)
    kept = schedule.kept[t].unsqueeze(-1)
    x = (kept.sqrt() * start + (1 - kept).sqrt() * noise).float()
    predicted, place = network.head(x, t, condition).split(channels, -1)
    mine = schedule.kernel(torch.cat([predicted.detach(), place], -1), x, t)
    true = schedule.kernel(torch.cat([noise, -torch.ones_like(noise)], -1), x, t)
    ratio = (true.std / mine.std).square()
    divergence = 0.5 * (ratio - 1 - ratio.log() + ((true.mean - mine.mean) / mine.std).square())
    return F.mse_loss(predicted, noise), divergence.mean()


def train_mar(
    settings: MARTraining, steps: int, tokenizer: KLModel, directory: Path, config: MARConfig, report: Report | None = None
) -> tuple[MAR, dict[str, float]]:
    """Train for `steps`, saving to `directory`/checkpoint.pt and continuing from there; returns the averaged network and its losses on
    unseen scenes.
    """
    torch.manual_seed(settings.seed)
    network = MAR(config)
    initialise(network)
    model = _Averaged(network, settings.ema)
    optimiser = torch.optim.AdamW(network.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, trapezoid(settings.warmup, steps))
    world = World(settings.seed)
    for step in range(_resume(directory, model, [optimiser], [schedule]), steps):
        torch.manual_seed(settings.seed * 1_000_003 + step)  # so that an interrupted training ends the same
        samples = single_shapes(world, step * settings.batch_size, settings.batch_size)
        error, divergence = _losses(network, tokenizer, samples, settings)
        loss = error + settings.variance * divergence
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 3.0)
        optimiser.step()
        schedule.step()
        model.follow(step)
        if report and step % 25 == 0:
            report({"noise_error": error.item(), "divergence": divergence.item()}, step)
        if (step + 1) % settings.save_every == 0:
            _save(directory, step + 1, model, [optimiser], [schedule])
    torch.manual_seed(settings.seed)
    with torch.no_grad():
        error, divergence = _losses(model.average, tokenizer, single_shapes(World(settings.seed + 1), 0, 64), replace(settings, drop=0.0))
    return model.average.eval(), {"validation_noise_error": error.item(), "validation_divergence": divergence.item()}


def _losses(network: MAR, tokenizer: KLModel, samples: list[Sample], settings: MARTraining) -> tuple[Tensor, Tensor]:
    """One batch: random order, 70 to 100 % of the tokens hidden (a normal law around all of them, cut off), as MAR is trained."""
    images, labels = images_and_classes(samples)
    with torch.no_grad():
        mean, _ = tokenizer.moments(images)
        tokens = tokenizer.encode(images, torch.randn_like(mean)).flatten(1, 2)
    length = network.config.length
    ratio = torch.empty(1)
    nn.init.trunc_normal_(ratio, 1.0, 0.25, 0.7, 1.0)
    known = length - int((length * ratio).ceil())
    order = torch.rand(len(tokens), length).argsort()
    drop = torch.rand(len(tokens)) < settings.drop
    return token_losses(network, tokens, labels, known, order, drop, settings.repeats)
