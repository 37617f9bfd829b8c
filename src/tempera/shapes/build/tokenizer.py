"""Training of the shapes VQ tokenizer: an autoencoder first, then a k-means codebook, then EMA
quantisation, straight-through.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.shapes.build.resumable import remaining_steps
from tempera.shapes.world import World, object_masks
from tempera.training.checkpoint import State, TrainingProgress
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


@dataclass(frozen=True)
class TokenizerTraining:
    """How the tokenizer is trained. `free_steps` run without quantisation; then the codebook is
    fitted to the encodings.

    Attributes:
        lr: Adam's, for biases, norms and the first and last convolutions; `matrix_lr` is Muon's,
            for all others.
        warmup_steps, decay: steps in which learning rates rise, and the last share of steps in
            which they fall to zero.
        object_weight: weight of pixels within one pixel of a shape, relative to the others: texture
            has most of the plain error, and edges most of what a picture shows.
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


def images_of(world: World, first: int, count: int) -> Tensor:
    """World images as the tokenizer reads them: float32 [count, 3, 48, 48] in [−1, 1]."""
    stack = np.stack([sample.image for sample in world.batch(first, count)])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).mul(2).sub(1).contiguous()


def images_and_weights(
    settings: TokenizerTraining, world: World, step: int
) -> tuple[Tensor, Tensor]:
    """The images of a step, as `images_of` gives them, and the weights of their pixels, [B, 1, 48,
    48] of mean 1.
    """
    samples = world.batch(step * settings.batch_size, settings.batch_size)
    images = (
        torch.from_numpy(np.stack([sample.image for sample in samples]))
        .permute(0, 3, 1, 2)
        .mul(2)
        .sub(1)
    )
    shapes = torch.from_numpy(
        np.stack([object_masks(sample.scene).any(0) for sample in samples])
    ).unsqueeze(1)
    weights = 1 + (settings.object_weight - 1) * shapes
    return images.contiguous(), weights / weights.mean()


class EmaCodebook:
    """Exponential moving averages of the codebook (van den Oord et al. 2017, appendix A.1) with
    restart of dead codes.

    Attributes:
        table: the model's codes, [K, D], changed in place.
        state: what a checkpoint keeps beside the table: counts [K] and sums [K, D] of the encodings
            that chose a code, and the state of the random numbers.
    """

    def __init__(self, model: VQModel, decay: float, dead_below: float, seed: int) -> None:
        self.table = model.quantize.embedding.weight.data
        self.decay, self.dead_below = decay, dead_below
        self.state = {
            "counts": torch.ones(len(self.table)),
            "sums": self.table.clone(),
            "generator": torch.Generator().manual_seed(seed).get_state(),
        }

    def fit(self, vectors: Tensor, rounds: int = 10) -> None:
        """Spherical k-means on encodings [M, D], started at random encodings."""
        with self._random() as generator:
            first = torch.randperm(len(vectors), generator=generator)[: len(self.table)]
        self.table.copy_(vectors[first])
        for _ in range(rounds):
            codes = (vectors @ F.normalize(self.table, dim=-1).T).argmax(-1)
            self._accumulate(vectors, codes, decay=0.0)

    def update(self, vectors: Tensor, codes: Tensor) -> None:
        """Move every code towards the encodings [M, D] that chose it."""
        self._accumulate(vectors, codes, self.decay)

    def _accumulate(self, vectors: Tensor, codes: Tensor, decay: float) -> None:
        counts, sums = self.state["counts"], self.state["sums"]
        counts.mul_(decay).add_(
            torch.bincount(codes, minlength=len(self.table)).float(), alpha=1 - decay
        )
        sums.mul_(decay).add_(torch.zeros_like(sums).index_add_(0, codes, vectors), alpha=1 - decay)
        dead = counts < self.dead_below
        with self._random() as generator:
            fresh = torch.randint(len(vectors), (int(dead.sum()),), generator=generator)
        sums[dead], counts[dead] = vectors[fresh], 1.0
        self.table.copy_(F.normalize(sums / counts[:, None], dim=-1))

    @contextmanager
    def _random(self) -> Iterator[torch.Generator]:
        """Random numbers that continue where the last ones ended."""
        generator = torch.Generator()
        generator.set_state(self.state["generator"])
        yield generator
        self.state["generator"].copy_(generator.get_state())


def train_tokenizer(
    settings: TokenizerTraining,
    directory: Path,
    config: VQConfig = TINY_VQ,
    report: Callable[[dict[str, float], int], None] | None = None,
) -> tuple[VQModel, dict[str, float]]:
    """Train a tokenizer on the world, from where `directory` left off; returns it with its metrics
    on unseen images (PSNR in dB, codes in use).
    """
    torch.manual_seed(settings.seed)
    world, model = World(settings.seed), VQModel(config)
    start_residuals(model)
    codebook = EmaCodebook(model, settings.ema, settings.dead_below, settings.seed)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("quantize")]
    optimisers, matrices = convolution_optimisers(
        model, parameters, settings.lr, settings.matrix_lr
    )
    state = State(model, optimisers, codebook.state, TrainingProgress())
    schedule = trapezoid(settings.warmup_steps, settings.steps, settings.decay)
    for step in remaining_steps(directory, state, settings, schedule):
        if step == settings.free_steps:
            with torch.no_grad():
                codebook.fit(model.latents(images_of(world, 10**7, 128)).flatten(0, 2))
        seen = images_and_weights(settings, world, step)
        loss, error = _step(
            model, *seen, codebook if step >= settings.free_steps else None, settings
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        step_convolutions(model, matrices, optimisers)
        if report and step % 25 == 0:
            report({"loss": loss.item(), "psnr": _psnr(error.item())}, step)
    return model.eval(), measure_tokenizer(model, images_of(World(settings.seed + 1), 0, 256))


def start_residuals(model: nn.Module) -> None:
    """Start every residual branch at zero: the network begins as its shortcuts, and learns several
    times as fast.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("conv2.weight", "proj_out.weight")):
            nn.init.zeros_(parameter)


Matrices = list[tuple[nn.Parameter, nn.Parameter]]
"""Convolution weights [out, in, h, w], and the same memory as matrices [out, in·h·w], as Muon takes
them.
"""


def convolution_optimisers(
    model: nn.Module, parameters: list[nn.Parameter], lr: float, matrix_lr: float
) -> tuple[list[torch.optim.Optimizer], Matrices]:
    """Muon for convolutions between hidden channels, Adam for everything else."""
    hidden = [p for p in parameters if p.ndim == 4 and min(p.shape[:2]) > 3]
    chosen = {id(p) for p in hidden}
    matrices = [(p, nn.Parameter(p.data.flatten(1))) for p in hidden]
    return [
        torch.optim.Muon(
            [flat for _, flat in matrices],
            lr=matrix_lr,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.Adam([p for p in parameters if id(p) not in chosen], lr=lr, betas=(0.9, 0.95)),
    ], matrices


def step_convolutions(
    model: nn.Module, matrices: Matrices, optimisers: Sequence[torch.optim.Optimizer]
) -> None:
    """One step of `convolution_optimisers`; gradients are zero afterwards."""
    for weight, flat in matrices:
        flat.grad = None if weight.grad is None else weight.grad.flatten(1)
    for optimiser in optimisers:
        optimiser.step()
    model.zero_grad()


def _step(
    model: VQModel,
    images: Tensor,
    weights: Tensor,
    codebook: EmaCodebook | None,
    settings: TokenizerTraining,
) -> tuple[Tensor, Tensor]:
    """One loss: reconstruction, plus commitment once there is a codebook to commit to."""
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
        latents = model.latents(images)
    latents = latents.float()
    vectors, commit = latents, latents.new_zeros(())
    if codebook is not None:
        codes = model.quantize.nearest(latents.detach())
        chosen = F.embedding(codes, model.quantize.codebook).detach()
        commit = F.mse_loss(latents, chosen) * latents.shape[-1]
        vectors = latents + (chosen - latents).detach()
        codebook.update(latents.detach().flatten(0, 2), codes.flatten())
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
        output = model.decode_latents(vectors)
    difference = output.float() - images
    painted = (weights * (difference.square() + 0.5 * difference.abs())).mean()
    return painted + settings.commitment * commit, difference.detach().square().mean()


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
