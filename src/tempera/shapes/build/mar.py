"""Training of the shipped MAR: a KL tokenizer, then a small network and a smaller one that drafts
for it, on scenes of one shape.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tempera.continuous.diffusion import TRAINING_STEPS, NoiseSchedule
from tempera.continuous.mar import MAR, MARConfig, initialise
from tempera.image_tokenizers.kl import KLConfig, KLModel
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.files import replacing
from tempera.runtime.network_identity import identity_of
from tempera.shapes.build.evaluators import LogMetrics
from tempera.shapes.build.target import _resume, _save, shape_tokens
from tempera.shapes.labels import CLASSES, class_of
from tempera.shapes.networks import load_tokenizer
from tempera.shapes.world import COLOURS, SHAPES, Sample, World
from tempera.training.lr_schedules import cosine, trapezoid

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
TINY_MAR = MARConfig(
    grid=(8, 8),
    channels=4,
    patch=2,
    width=128,
    depth=4,
    heads=4,
    buffer=8,
    classes=len(CLASSES),
    head_width=256,
    head_depth=3,
)
TINY_DRAFT = replace(TINY_MAR, width=64, depth=2, head_width=128, head_depth=2)


@dataclass(frozen=True)
class MARTraining:
    """How the three networks are trained.

    Scenes are rendered and encoded once: what the network and its draft are trained on are draws of
    the latents of `scenes` of them.

    Attributes:
        tokenizer_steps, tokenizer_batch_size, tokenizer_lr: of the KL tokenizer.
        tokenizer_start: start from the encoder and decoder of the shipped VQ tokenizer; random
            weights take several times as many steps.
        kl: weight of its latents' KL divergence from N(0, 1).
        scenes: how many are encoded.
        steps, draft_steps: of the network and of its draft.
        lr: AdamW's, for embeddings, norms, biases and what is not in a block.
        matrix_lr: Muon's, for the matrices of all blocks.
        repeats: noise levels a token is trained at, for one pass of the transformer.
        shown: spread of the share of tokens that the network is shown: |N(0, shown²)|, less than 1.
            MAR's own training has 0.25, cut off at 0.3, which leaves one-token-a-step decoding to
            generalise from the first third of an image.
        emphasis: the squared error of the noise counts min(1/ᾱ, emphasis) times as much, relative
            to its mean; 1 is MAR's own training. The noisy levels decide what a token shows, and
            have next to no share in the plain error.
        object_weight: loss weight of tokens that touch a shape: what kind of shape it is, one sees
            in few tokens, and there but little.
        calm: last share of steps, without this weight.
        variance: weight of the variational bound that teaches the variances, beside the squared
            error of the noise.
        denoising_steps, denoising_start: of the sampling that the variances are learned for, as in
            `Sampling`. In a step from one of 1,000 levels to the next their bounds are next to each
            other, and nothing is learned of what a step over forty needs.
        cfg_dropout: share of images without a class, for guidance.
        ema: decay of the moving average of the weights, which is what is kept.
        bf16: compute the forward pass in bfloat16 autocast; worth it on processors with bfloat16
            units only.
    """

    tokenizer_steps: int = 400
    tokenizer_batch_size: int = 16
    tokenizer_lr: float = 2e-3
    tokenizer_start: bool = True
    kl: float = 1e-3
    scenes: int = 8192
    steps: int = 11_500
    draft_steps: int = 6000
    batch_size: int = 32
    lr: float = 2e-3
    matrix_lr: float = 5e-3
    weight_decay: float = 0.02
    warmup_steps: int = 100
    repeats: int = 1
    shown: float = 0.5
    emphasis: float = 10.0
    object_weight: float = 5.0
    calm: float = 0.25
    variance: float = 0.3
    denoising_steps: int = 25
    denoising_start: int = 960
    cfg_dropout: float = 0.1
    ema: float = 0.998
    bf16: bool = False
    seed: int = 0
    save_every: int = 500


OF_TOKENIZER = (
    "tokenizer_steps",
    "tokenizer_batch_size",
    "tokenizer_lr",
    "tokenizer_start",
    "kl",
    "bf16",
    "seed",
)
"""The settings that the KL tokenizer depends on."""


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
    images = (
        torch.from_numpy(np.stack([sample.image for sample in samples])).permute(0, 3, 1, 2) * 2 - 1
    )
    return images, torch.tensor([class_of(sample.scene.caption) for sample in samples])


def train_kl(
    settings: MARTraining, config: KLConfig, report: LogMetrics | None = None
) -> tuple[KLModel, dict[str, float]]:
    """Train the tokenizer; its scale is set to give tokens of unit variance. Returns it with PSNR
    in dB on unseen scenes.
    """
    torch.manual_seed(settings.seed)
    model, world, batch = KLModel(config), World(settings.seed), settings.tokenizer_batch_size
    if settings.tokenizer_start:
        _take_over(model, load_tokenizer())
    optimiser = torch.optim.Adam(model.parameters(), settings.tokenizer_lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, cosine(30, settings.tokenizer_steps, floor=0.02)
    )
    for step in range(settings.tokenizer_steps):
        images, _ = images_and_classes(single_shapes(world, step * batch, batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            mean, log_variance = model.moments(images)
            latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            generated = model.decoder(model.post_quant_conv(latents)).float()
        error = F.mse_loss(generated, images)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().mean()
        loss = error + 0.5 * F.l1_loss(generated, images) + settings.kl * divergence
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if report and step % 50 == 0:
            report(
                {"loss": loss.item(), "psnr": _psnr(error), "divergence": divergence.item()}, step
            )
    model.eval().requires_grad_(False)
    images, _ = images_and_classes(single_shapes(World(settings.seed + 1), 0, 64))
    mean, log_variance = model.moments(images)
    drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    model.config = replace(config, scale=1 / float(drawn.std()))
    return model, {
        "psnr": _psnr(F.mse_loss(model.decode_codes(model.encode(images)), images)),
        "scale": model.config.scale,
    }


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


class Latents(NamedTuple):
    """Encoded scenes: moments of the latents as `KLModel.moments` gives them, float16 [N, 2, C, h,
    w], classes int64 [N], and which tokens touch the shape, bool [N, T].
    """

    moments: Tensor
    classes: Tensor
    touched: Tensor

    def draw(self, chosen: Tensor, tokenizer: KLModel) -> Tensor:
        """Tokens float32 [B, T, D] of the scenes int64 [B], drawn from their latents' law."""
        mean, log_variance = self.moments[chosen].float().unbind(1)
        return tokenizer.tokens(mean + (0.5 * log_variance).exp() * torch.randn_like(mean)).flatten(
            1, 2
        )


@torch.no_grad()
def encode_scenes(world: World, count: int, tokenizer: KLModel) -> Latents:
    """Render and encode the first `count` scenes of one shape."""
    moments, classes, touched = [], [], []
    size = tokenizer.config.networks.factor * tokenizer.config.patch
    for first in range(0, count, 64):
        samples = single_shapes(world, first, min(64, count - first))
        images, labels = images_and_classes(samples)
        moments.append(torch.stack(tokenizer.moments(images), 1).half())
        classes.append(labels)
        touched += [shape_tokens(sample, size)[0] for sample in samples]
    return Latents(torch.cat(moments), torch.cat(classes), torch.stack(touched))


def kept_latents(settings: MARTraining, tokenizer: KLModel, path: Path) -> Latents:
    """The latents in `path` if they are those of this tokenizer and these scenes; else encode them
    and keep them there.
    """
    made = {
        "tokenizer": identity_of(tokenizer),
        "scenes": str(settings.scenes),
        "seed": str(settings.seed),
        "holds": str(Latents._fields),
    }
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == made:
                return Latents(*map(file.get_tensor, Latents._fields))
    latents = encode_scenes(World(settings.seed), settings.scenes, tokenizer)
    with replacing(path) as temporary:
        save_file(latents._asdict(), temporary, made)
    return latents


class _Averaged(nn.Module):
    """A network and the moving average of its weights."""

    def __init__(self, network: MAR, decay: float) -> None:
        super().__init__()
        self.network, self.average, self.decay = (
            network,
            copy.deepcopy(network).requires_grad_(False),
            decay,
        )

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the average; faster in the first steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.network.parameters()), 1 - decay
        )


def token_losses(
    network: MAR,
    tokens: Tensor,
    labels: Tensor,
    known: int,
    order: Tensor,
    drop: Tensor,
    repeats: int,
    emphasis: float = 1.0,
    weights: Tensor | None = None,
    taken: NoiseSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """How well the tokens that are not known are predicted (Li et al. 2024, Eq. 2; Nichol and
    Dhariwal 2021, Eq. 16).

    Args:
        network: the network.
        tokens: by place in the image, [B, T, D].
        labels, drop: classes int64 [B], and which of them are left out, bool [B].
        known: how many tokens are shown.
        order: int64 [B, T].
        repeats: noise levels a token.
        emphasis: see `MARTraining`.
        weights: of the tokens by place in the image, [B, T]; equal unless given.
        taken: the steps that the variances are learned for, on half of the tokens; all of the
            process's unless given.

    Returns:
        The squared error of the noise, weighted, and, not weighted, the divergence of the predicted
        kernel from the true posterior in
        nats: means over the numbers of all tokens.
    """
    schedule, channels = NoiseSchedule(TRAINING_STEPS), tokens.shape[-1]
    taken = schedule if taken is None else taken
    ordered = tokens.gather(1, order.unsqueeze(-1).expand_as(tokens))
    places = torch.arange(known, order.shape[1]).expand(len(tokens), -1)
    counts = torch.full((len(tokens),), known)
    vectors = network(
        ordered[:, :known], order, counts, network.class_embedding(labels, drop), places
    )
    condition, start = (
        part.flatten(0, 1).repeat(repeats, 1) for part in (vectors, ordered[:, known:])
    )
    on_way, stage = torch.rand(len(start)) < 0.5, torch.randint(len(taken.times), (len(start),))
    t = torch.where(on_way, taken.times[stage], torch.randint(TRAINING_STEPS, (len(start),)))
    noise, kept = torch.randn_like(start), schedule.kept[t].unsqueeze(-1)
    x = (kept.sqrt() * start + (1 - kept).sqrt() * noise).float()
    predicted, place = network.head(x, t, condition).float().split(channels, -1)
    mine, true = (
        taken.kernel(torch.cat(output, -1)[on_way], x[on_way], stage[on_way])
        for output in ((predicted.detach(), place), (noise, -torch.ones_like(noise)))
    )
    ratio = (true.std / mine.std).square()
    divergence = 0.5 * (ratio - 1 - ratio.log() + ((true.mean - mine.mean) / mine.std).square())
    by_level = (1 / schedule.kept).clamp(max=emphasis).float()
    error = (predicted - noise).square().mean(-1) * (by_level / by_level.mean())[t]
    if weights is not None:
        by_token = weights.gather(1, order)[:, known:].flatten().repeat(repeats)
        error = error * by_token / by_token.mean()
    return error.mean(), divergence.mean()


def train_mar(
    settings: MARTraining,
    steps: int,
    tokenizer: KLModel,
    latents: Latents,
    directory: Path,
    config: MARConfig,
    report: LogMetrics | None = None,
) -> tuple[MAR, dict[str, float]]:
    """Train for `steps`, saving to `directory`/checkpoint.pt and continuing from there; returns the
    averaged network and its losses on unseen scenes.
    """
    torch.manual_seed(settings.seed)
    network = MAR(config)
    initialise(network)
    _lay_out(network)
    model = _Averaged(network, settings.ema)
    network.class_emb.weight.register_hook(_taught_together)
    optimisers = _optimisers(network, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimiser, trapezoid(settings.warmup_steps, steps))
        for optimiser in optimisers
    ]
    for step in range(_resume(directory, model, optimisers, schedules), steps):
        # so that an interrupted training ends the same
        torch.manual_seed(settings.seed * 1_000_003 + step)
        chosen = torch.randint(len(latents.classes), (settings.batch_size,))
        calm = step >= (1 - settings.calm) * steps
        weights = (
            None if calm else 1 + (settings.object_weight - 1) * latents.touched[chosen].float()
        )
        error, divergence = _losses(
            network, latents.draw(chosen, tokenizer), latents.classes[chosen], settings, weights
        )
        (error + settings.variance * divergence).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 3.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        model.follow(step)
        if report and step % 50 == 0:
            report({"noise_error": error.item(), "divergence": divergence.item()}, step)
        if (step + 1) % settings.save_every == 0:
            _save(directory, step + 1, model, optimisers, schedules)
    return model.average.eval(), _measure(model.average, tokenizer, settings)


@torch.no_grad()
def _lay_out(network: MAR) -> None:
    """Start the position embeddings as sines of row and column: a small network with few images
    does not find the grid by itself.
    """
    config = network.config
    rows, columns = (
        part.flatten().float()
        for part in torch.meshgrid(*map(torch.arange, config.grid), indexing="ij")
    )
    rates = torch.logspace(math.log10(2), -1, config.width // 4)
    angles = torch.cat([rows[:, None] * rates, columns[:, None] * rates], 1)
    for embedding in (
        network.encoder_pos_embed_learned,
        network.decoder_pos_embed_learned,
        network.diffusion_pos_embed_learned,
    ):
        embedding[0, -config.length :] = torch.cat([angles.sin(), angles.cos()], 1)


def _taught_together(gradient: Tensor) -> Tensor:
    """The gradient of the classes' embeddings, [classes, W], of which each takes those of its shape
    and its colour as well, as if it were a sum of three: one of 48 classes is seldom seen, and a
    network that has no use for the shape yet would hardly find it.
    """
    own = gradient.unflatten(0, (len(SHAPES), len(COLOURS)))
    shared: Tensor = own + own.sum(1, keepdim=True) + own.sum(0, keepdim=True)
    return shared.flatten(0, 1)


def _optimisers(network: MAR, settings: MARTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of transformer and head, AdamW for everything else."""
    matrices = {
        name: weight
        for name, weight in network.named_parameters()
        if "blocks." in name and weight.ndim == 2
    }
    rest = [weight for name, weight in network.named_parameters() if name not in matrices]
    return [
        torch.optim.Muon(
            matrices.values(),
            lr=settings.matrix_lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def _measure(
    network: MAR, tokenizer: KLModel, settings: MARTraining, count: int = 512
) -> dict[str, float]:
    """The losses with a class on unseen scenes."""
    torch.manual_seed(settings.seed)
    unseen, told = (
        encode_scenes(World(settings.seed + 1), count, tokenizer),
        replace(settings, cfg_dropout=0.0, emphasis=1.0, bf16=False),
    )
    batches = torch.arange(count).split(64)
    losses = [
        _losses(network, unseen.draw(batch, tokenizer), unseen.classes[batch], told)
        for batch in batches
    ]
    error, divergence = (torch.stack(part).mean().item() for part in zip(*losses, strict=True))
    return {"validation_noise_error": error, "validation_divergence": divergence}


def _losses(
    network: MAR,
    tokens: Tensor,
    labels: Tensor,
    settings: MARTraining,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One batch: a random order and a random share of the tokens, at least one of them hidden."""
    length, share = network.config.length, torch.empty(1)
    nn.init.trunc_normal_(share, 0.0, settings.shown, 0.0, 1.0)
    known = min(int(length * share), length - 1)
    order = torch.rand(len(tokens), length).argsort()
    drop = torch.rand(len(tokens)) < settings.cfg_dropout
    taken = NoiseSchedule(settings.denoising_steps, start=settings.denoising_start)
    # on a CPU, fused attention's backward pass takes twice as long
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
        return token_losses(
            network,
            tokens,
            labels,
            known,
            order,
            drop,
            settings.repeats,
            settings.emphasis,
            weights,
            taken,
        )
