"""Training of the continuous tokenizer of the shipped MAR, on scenes of one shape."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tempera.image_tokenizers.kl import KLConfig, KLModel
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.build.record import LogMetrics
from tempera.shapes.build.resumable import remaining_steps
from tempera.shapes.build.single_shapes import images_and_classes, single_shapes
from tempera.shapes.build.tokenizer import convolution_optimisers, step_convolutions
from tempera.shapes.world import World, object_masks
from tempera.training.checkpoint import State, TrainingProgress
from tempera.training.lr_schedules import cosine

TINY_KL = KLConfig(
    VQConfig(
        channels=16,
        encoder_multipliers=(1, 2, 4),
        decoder_multipliers=(1, 2, 4),
        res_blocks=1,
        z_channels=4,
        norm_groups=4,
    ),
    patch=2,
)


@dataclass(frozen=True)
class KLTraining:
    """How the continuous tokenizer is trained.

    Attributes:
        lr: Adam's, for biases, norms and the first and last convolutions; `matrix_lr` is Muon's,
            for all others.
        start: start from the encoder and decoder of the VQ tokenizer; random weights take several
            times as many steps.
        kl: weight of the latents' KL divergence from N(0, 1).
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 600
    batch_size: int = 16
    lr: float = 2e-3
    matrix_lr: float = 8e-3
    start: bool = True
    kl: float = 1e-3
    bf16: bool = True
    seed: int = 0
    save_every: int = 200


@dataclass(frozen=True)
class DecoderTraining:
    """How the decoder is trained further while the encoder, and so every latent, stays as it is.

    Attributes:
        lr, matrix_lr: see `KLTraining`.
        object_weight: weight of pixels of shapes and their edges.
        bf16: see `KLTraining`.
    """

    steps: int = 1200
    batch_size: int = 16
    lr: float = 1e-3
    matrix_lr: float = 4e-3
    object_weight: float = 3.0
    bf16: bool = True
    seed: int = 0
    save_every: int = 200


def train_kl(
    settings: KLTraining,
    directory: Path,
    config: KLConfig,
    start: VQModel | None = None,
    report: LogMetrics | None = None,
) -> tuple[KLModel, dict[str, float]]:
    """Train the tokenizer, from where `directory` left off, at first from the networks of `start`
    if there is one; its scale is set to give tokens of unit variance. Returns it with PSNR in dB on
    unseen scenes.
    """
    torch.manual_seed(settings.seed)
    model, world, batch = KLModel(config), World(settings.seed), settings.batch_size
    if start is not None:
        _take_over(model, start)
    parameters = list(model.parameters())
    optimisers, matrices = convolution_optimisers(
        model, parameters, settings.lr, settings.matrix_lr
    )
    state = State(model, optimisers, {}, TrainingProgress())
    schedule = cosine(30, settings.steps, floor=0.02)
    for step in remaining_steps(directory, state, settings, schedule):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        images, _ = images_and_classes(single_shapes(world, step * batch, batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            mean, log_variance = model.moments(images)
            latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            generated = model.decoder(model.post_quant_conv(latents)).float()
        error = F.mse_loss(generated, images)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().mean()
        loss = error + 0.5 * F.l1_loss(generated, images) + settings.kl * divergence
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        step_convolutions(model, matrices, optimisers)
        if report and step % 50 == 0:
            report(
                {"loss": loss.item(), "psnr": _psnr(error), "divergence": divergence.item()}, step
            )
    return _scaled(model.eval().requires_grad_(False), config, settings)


def _scaled(
    model: KLModel, config: KLConfig, settings: KLTraining
) -> tuple[KLModel, dict[str, float]]:
    """Set the scale that gives tokens of unit variance, and measure, on unseen scenes."""
    images, _ = images_and_classes(single_shapes(World(settings.seed + 1), 0, 64))
    mean, log_variance = model.moments(images)
    drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    model.config = replace(config, scale=1 / float(drawn.std()))
    error = F.mse_loss(model.decode_codes(model.encode(images)), images)
    return model, {"psnr": _psnr(error), "scale": model.config.scale}


def _take_over(model: KLModel, trained: VQModel) -> None:
    """Give a KL tokenizer the weights of a VQ tokenizer's networks, all but those of the layers
    next to the latents.
    """
    for mine, theirs in ((model.encoder, trained.encoder), (model.decoder, trained.decoder)):
        own = mine.state_dict()
        mine.load_state_dict(
            own
            | {
                name: value
                for name, value in theirs.state_dict().items()
                if value.shape == own[name].shape
            }
        )


def _psnr(error: Tensor) -> float:
    return float(-10 * torch.log10(error.detach() / 4))


def train_decoder(
    settings: DecoderTraining,
    directory: Path,
    model: KLModel,
    report: LogMetrics | None = None,
) -> tuple[KLModel, dict[str, float]]:
    """Train the decoder of `model` on draws of its latents, from where `directory` left off.
    Returns the model with PSNR in dB on unseen scenes.
    """
    trained = model.requires_grad_(False)
    parameters = [*trained.decoder.parameters(), *trained.post_quant_conv.parameters()]
    for parameter in parameters:
        parameter.requires_grad_()
    optimisers, matrices = convolution_optimisers(
        trained, parameters, settings.lr, settings.matrix_lr
    )
    state = State(trained, optimisers, {}, TrainingProgress())
    world, schedule = World(settings.seed), cosine(30, settings.steps, floor=0.02)
    for step in remaining_steps(directory, state, settings, schedule):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        samples = single_shapes(world, step * settings.batch_size, settings.batch_size)
        images, _ = images_and_classes(samples)
        shapes = np.stack([object_masks(sample.scene).any(0) for sample in samples])
        weights = 1 + (settings.object_weight - 1) * torch.from_numpy(shapes).unsqueeze(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            with torch.no_grad():
                mean, log_variance = trained.moments(images)
                latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            generated = trained.decoder(trained.post_quant_conv(latents)).float()
        difference = (generated - images) * weights.sqrt() / weights.mean().sqrt()
        loss = difference.square().mean() + 0.5 * difference.abs().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        step_convolutions(trained, matrices, optimisers)
        if report and step % 50 == 0:
            report({"loss": loss.item(), "psnr": _psnr(F.mse_loss(generated, images))}, step)
    trained = trained.eval().requires_grad_(False)
    images, _ = images_and_classes(single_shapes(World(settings.seed + 1), 0, 64))
    error = F.mse_loss(trained.decode_codes(trained.encode(images)), images)
    return trained, {"psnr": _psnr(error)}
