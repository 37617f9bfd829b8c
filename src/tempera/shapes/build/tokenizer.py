"""Training of the shapes VQ tokenizer: an autoencoder first, then a k-means codebook, then EMA
quantisation, straight-through.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.world import World
from tempera.training.lr_schedules import cosine

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class TokenizerTraining:
    """How the tokenizer is trained. `warmup_steps` run without quantisation; then the codebook is
    fitted to the encodings.
    """

    steps: int = 1100
    warmup_steps: int = 120
    batch_size: int = 16
    lr: float = 1.5e-3
    commitment: float = 0.25
    ema: float = 0.98
    dead_below: float = 0.05
    seed: int = 0


def images_of(world: World, first: int, count: int) -> Tensor:
    """World images as the tokenizer reads them: float32 [count, 3, 64, 64] in [−1, 1]."""
    stack = np.stack([sample.image for sample in world.batch(first, count)])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).mul(2).sub(1).contiguous()


class EmaCodebook:
    """Exponential moving averages of the codebook (van den Oord et al. 2017, appendix A.1) with
    restart of dead codes.
    """

    def __init__(
        self, model: VQModel, decay: float, dead_below: float, generator: torch.Generator
    ) -> None:
        self.table = model.quantize.embedding.weight.data
        self.decay, self.dead_below, self.generator = decay, dead_below, generator
        self.counts = torch.ones(len(self.table))
        self.sums = self.table.clone()

    def fit(self, vectors: Tensor, rounds: int = 10) -> None:
        """Spherical k-means on encodings [M, D], started at random encodings."""
        self.table.copy_(
            vectors[torch.randperm(len(vectors), generator=self.generator)[: len(self.table)]]
        )
        for _ in range(rounds):
            codes = (vectors @ F.normalize(self.table, dim=-1).T).argmax(-1)
            self._accumulate(vectors, codes, decay=0.0)

    def update(self, vectors: Tensor, codes: Tensor) -> None:
        """Move every code towards the encodings [M, D] that chose it."""
        self._accumulate(vectors, codes, self.decay)

    def _accumulate(self, vectors: Tensor, codes: Tensor, decay: float) -> None:
        counts = torch.bincount(codes, minlength=len(self.table)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, codes, vectors)
        self.counts.mul_(decay).add_(counts, alpha=1 - decay)
        self.sums.mul_(decay).add_(sums, alpha=1 - decay)
        dead = self.counts < self.dead_below
        fresh = vectors[torch.randint(len(vectors), (int(dead.sum()),), generator=self.generator)]
        self.sums[dead], self.counts[dead] = fresh, 1.0
        self.table.copy_(F.normalize(self.sums / self.counts[:, None], dim=-1))


def train_tokenizer(
    settings: TokenizerTraining,
    config: VQConfig = TINY_VQ,
    report: Callable[[dict[str, float], int], None] | None = None,
) -> tuple[VQModel, dict[str, float]]:
    """Train a tokenizer on the world; returns it with its metrics on unseen images (PSNR in dB,
    codes in use).
    """
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    world, model = World(settings.seed), VQModel(config)
    codebook = EmaCodebook(model, settings.ema, settings.dead_below, generator)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("quantize")]
    optimiser = torch.optim.Adam(parameters, lr=settings.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, cosine(30, settings.steps, floor=0.02))
    for step in range(settings.steps):
        if step == settings.warmup_steps:
            with torch.no_grad():
                codebook.fit(model.latents(images_of(world, 10**7, 128)).flatten(0, 2))
        images = images_of(world, step * settings.batch_size, settings.batch_size)
        loss, error = _step(
            model, images, codebook if step >= settings.warmup_steps else None, settings.commitment
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if report and step % 25 == 0:
            report({"loss": loss.item(), "psnr": _psnr(error.item())}, step)
    return model.eval(), measure_tokenizer(model, images_of(World(settings.seed + 1), 0, 256))


def _step(
    model: VQModel, images: Tensor, codebook: EmaCodebook | None, commitment: float
) -> tuple[Tensor, Tensor]:
    """One loss: reconstruction, plus commitment once there is a codebook to commit to."""
    latents = model.latents(images)
    vectors, commit = latents, latents.new_zeros(())
    if codebook is not None:
        codes = model.quantize.nearest(latents.detach())
        chosen = F.embedding(codes, model.quantize.codebook).detach()
        commit = F.mse_loss(latents, chosen) * latents.shape[-1]
        vectors = latents + (chosen - latents).detach()
        codebook.update(latents.detach().flatten(0, 2), codes.flatten())
    output = model.decode_latents(vectors)
    error = F.mse_loss(output, images)
    return error + 0.5 * F.l1_loss(output, images) + commitment * commit, error.detach()


def measure_tokenizer(model: VQModel, images: Tensor) -> dict[str, float]:
    """PSNR in dB on the [0, 1] scale, and how many codes the images use."""
    with torch.no_grad():
        codes = torch.cat([model.encode(chunk) for chunk in images.split(32)])
        output = torch.cat([model.decode_codes(chunk) for chunk in codes.split(32)])
    return {
        "psnr": _psnr(float(F.mse_loss(output, images))),
        "codes_used": float(codes.unique().numel()),
    }


def _psnr(error: float) -> float:
    return float(-10 * np.log10(error / 4))
