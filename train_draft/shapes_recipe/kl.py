"""Training of the continuous tokenizer of the shipped MAR, on scenes of one shape."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures, pixel_weights, single_shapes
from shapes_recipe.stage import arithmetic, minimise, muon
from tempera.image_tokenizers.kl import KLConfig, KLModel
from tempera.image_tokenizers.vq import VQConfig
from tempera.shapes.world import World
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


@dataclass
class KLTraining:
    """How the continuous tokenizer is trained, and then its decoder further while the encoder, and
    so every latent, stays as it is.

    Attributes:
        lr: Adam's, for biases, norms and the first and last convolutions; `matrix_lr` is Muon's,
            for all others. Both are halved for the decoder.
        kl: weight of the latents' KL divergence from N(0, 1).
        decoder_steps: steps of the decoder alone.
        object_weight: in these, weight of pixels of shapes and their edges.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 2400
    batch_size: int = 16
    lr: float = 2e-3
    matrix_lr: float = 8e-3
    kl: float = 1e-3
    decoder_steps: int = 1200
    object_weight: float = 3.0
    bf16: bool = True
    seed: int = 0
    save_every: int = 200


def train_kl(settings: KLTraining, run: Path, config: KLConfig = TINY_KL) -> KLModel:
    """Train the tokenizer, from where `run` left off; its scale is set to give tokens of unit
    variance.
    """
    torch.manual_seed(settings.seed)
    model = KLModel(config)
    start_residuals(model)
    _minimise(model, list(model.parameters()), settings, run)
    mean, log_variance = model.moments(_unseen(settings))
    drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    model.config = replace(config, scale=1 / float(drawn.std()))
    return model


def train_decoder(settings: KLTraining, run: Path, model: KLModel) -> KLModel:
    """Train the decoder of `model` on draws of its latents, from where `run` left off."""
    model.requires_grad_(False)
    parameters = [*model.decoder.parameters(), *model.post_quant_conv.parameters()]
    for parameter in parameters:
        parameter.requires_grad_()
    further = replace(
        settings,
        steps=settings.decoder_steps,
        lr=settings.lr / 2,
        matrix_lr=settings.matrix_lr / 2,
        kl=0.0,
    )
    _minimise(model, parameters, further, run, settings.object_weight)
    return model


def _minimise(
    model: KLModel,
    parameters: list[nn.Parameter],
    settings: KLTraining,
    run: Path,
    object_weight: float = 1.0,
) -> None:
    """Train some parameters on draws of the latents of scenes, from where `run` left off."""
    world = World(settings.seed, texture="clouds")
    size = settings.batch_size

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        samples = single_shapes(world, step * size, size)
        images = pictures(samples)
        weights = pixel_weights(samples, object_weight)
        with arithmetic(settings.bf16):
            mean, log_variance = model.moments(images)
            latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            output = model.decoder(model.post_quant_conv(latents)).float()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().mean()
        loss = painted(output, images, weights) + settings.kl * divergence
        yield {"loss": loss, "psnr": psnr(output, images), "divergence": divergence}

    optimisers = convolution_optimisers(parameters, settings.lr, settings.matrix_lr)
    minimise(model, optimisers, cosine(30, settings.steps, 0.02), losses, settings, run, 1.0)


def painted(output: Tensor, images: Tensor, weights: Tensor) -> Tensor:
    """How wrong a picture is: squared error and half the absolute one, a mean over weighted
    pixels.
    """
    difference = output - images
    error = difference.square() + 0.5 * difference.abs()
    return (weights * error).mean()


def psnr(output: Tensor, images: Tensor) -> Tensor:
    """In dB, of images in [−1, 1]."""
    return -10 * torch.log10(F.mse_loss(output.detach(), images) / 4)


def measure_kl(model: KLModel, settings: KLTraining) -> dict[str, float]:
    """PSNR in dB on unseen scenes, and the scale of the latents."""
    images = _unseen(settings)
    output = model.decode_codes(model.encode(images))
    return {"psnr": psnr(output, images).item(), "scale": model.config.scale}


def _unseen(settings: KLTraining) -> Tensor:
    """Pictures of scenes of another world."""
    return pictures(single_shapes(World(settings.seed + 1, texture="clouds"), 0, 64))


def start_residuals(model: nn.Module) -> None:
    """Start every residual branch at zero: the network begins as its shortcuts, and learns several
    times as fast.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("conv2.weight", "proj_out.weight")):
            nn.init.zeros_(parameter)


def convolution_optimisers(
    parameters: list[nn.Parameter], lr: float, matrix_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for convolutions between hidden channels, Adam for everything else."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.ndim == 4 and min(parameter.shape[:2]) > 3:
            hidden.append(parameter)
        else:
            others.append(parameter)
    return [muon(hidden, matrix_lr, 0.0), torch.optim.Adam(others, lr=lr, betas=(0.9, 0.95))]
