"""Training of the shapes VQ tokenizer: an autoencoder first, then a k-means codebook, then EMA
quantisation, straight-through.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures, pixel_weights
from shapes_recipe.stage import arithmetic, minimise, muon
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.world import World
from tempera.training.lr_schedules import trapezoid

TINY_VQ = VQConfig(
    codebook_size=1024,
    codebook_dim=8,
    channels=16,
    encoder_multipliers=(1, 2, 4),
    decoder_multipliers=(1, 2, 4),
    res_blocks=1,
    z_channels=64,
    # official sizes have 4 and more channels a group; with fewer, normalisation wipes out the
    # picture's colours
    norm_groups=4,
)


@dataclass
class TokenizerTraining:
    """How the tokenizer is trained. `free_steps` run without quantisation; then the codebook is
    fitted to the encodings.

    Attributes:
        lr: Adam's, for biases, norms and the first and last convolutions; `matrix_lr` is Muon's,
            for all others.
        warmup_steps, decay: steps in which learning rates rise, and the last share of steps in
            which they fall to zero.
        object_weight: weight of pixels within one pixel of a shape, relative to the others.
        commitment: weight of the encodings' distance to their codes.
        ema: decay of the codebook's moving averages.
        dead_below: codes used less often start again at an encoding.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 1500
    free_steps: int = 80
    batch_size: int = 16
    lr: float = 2e-3
    matrix_lr: float = 8e-3
    warmup_steps: int = 20
    decay: float = 0.5
    commitment: float = 0.25
    object_weight: float = 3.0
    ema: float = 0.98
    dead_below: float = 0.05
    seed: int = 0
    save_every: int = 100
    bf16: bool = True


class EmaCodebook:
    """Exponential moving averages of the codebook (van den Oord et al. 2017, appendix A.1) with
    restart of dead codes.

    Attributes:
        table: the model's codes, [K, D], changed in place.
        state: counts [K] and sums [K, D] of the encodings that chose a code, changed in place.
    """

    def __init__(self, model: VQModel, decay: float, dead_below: float) -> None:
        self.table = model.quantize.embedding.weight.data
        self.decay = decay
        self.dead_below = dead_below
        self.state = {"counts": torch.ones(len(self.table)), "sums": self.table.clone()}

    def fit(self, vectors: Tensor, rounds: int = 10) -> None:
        """Spherical k-means on encodings [M, D], started at random encodings."""
        self.table.copy_(vectors[torch.randperm(len(vectors))[: len(self.table)]])
        for _ in range(rounds):
            codes = (vectors @ F.normalize(self.table, dim=-1).T).argmax(-1)
            self.update(vectors, codes, decay=0.0)

    def update(self, vectors: Tensor, codes: Tensor, decay: float | None = None) -> None:
        """Move every code towards the encodings [M, D] that chose it."""
        kept = self.decay if decay is None else decay
        counts = self.state["counts"]
        sums = self.state["sums"]
        new_counts = torch.bincount(codes, minlength=len(self.table)).float()
        new_sums = torch.zeros_like(sums).index_add_(0, codes, vectors)
        counts.mul_(kept).add_(new_counts, alpha=1 - kept)
        sums.mul_(kept).add_(new_sums, alpha=1 - kept)
        dead = counts < self.dead_below
        sums[dead] = vectors[torch.randint(len(vectors), (int(dead.sum()),))]
        counts[dead] = 1.0
        self.table.copy_(F.normalize(sums / counts[:, None], dim=-1))


def train_tokenizer(
    settings: TokenizerTraining, run: Path, config: VQConfig = TINY_VQ
) -> tuple[VQModel, dict[str, float]]:
    """Train a tokenizer on the world, from where `run` left off; returns it with its metrics on
    unseen images (PSNR in dB, codes in use).
    """
    torch.manual_seed(settings.seed)
    world = World(settings.seed)
    model = VQModel(config)
    start_residuals(model)
    codebook = EmaCodebook(model, settings.ema, settings.dead_below)

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        if step == settings.free_steps:
            with torch.no_grad():
                encodings = model.latents(pictures(world.batch(10**7, 128)))
                codebook.fit(encodings.flatten(0, 2))
        samples = world.batch(step * settings.batch_size, settings.batch_size)
        images = pictures(samples)
        weights = pixel_weights(samples, settings.object_weight)
        with arithmetic(settings.bf16):
            latents = model.latents(images)
        latents = latents.float()
        vectors = latents
        commit = latents.new_zeros(())
        if step >= settings.free_steps:
            codes = model.quantize.nearest(latents.detach())
            chosen = F.embedding(codes, model.quantize.codebook).detach()
            commit = F.mse_loss(latents, chosen) * latents.shape[-1]
            vectors = latents + (chosen - latents).detach()
            codebook.update(latents.detach().flatten(0, 2), codes.flatten())
        with arithmetic(settings.bf16):
            output = model.decode_latents(vectors).float()
        yield {
            "loss": painted(output, images, weights) + settings.commitment * commit,
            "psnr": psnr(output, images),
        }

    trained = [
        parameter for name, parameter in model.named_parameters() if not name.startswith("quantize")
    ]
    optimisers = convolution_optimisers(trained, settings.lr, settings.matrix_lr)
    schedule = trapezoid(settings.warmup_steps, settings.steps, settings.decay)
    minimise(model, optimisers, schedule, losses, settings, run, 1.0, buffers=codebook.state)
    return model, measure_tokenizer(model, pictures(World(settings.seed + 1).batch(0, 256)))


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


@torch.no_grad()
def measure_tokenizer(model: VQModel, images: Tensor) -> dict[str, float]:
    """PSNR in dB, and how many codes the images use."""
    codes = torch.cat([model.encode(chunk) for chunk in images.split(32)])
    output = torch.cat([model.decode_codes(chunk) for chunk in codes.split(32)])
    return {"psnr": psnr(output, images).item(), "codes_used": codes.unique().numel()}
