"""Training of the shipped MAR on scenes of one shape."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from shapes_recipe.scenes import pictures, shape_tokens, single_shapes
from shapes_recipe.stage import arithmetic, minimise, muon
from tempera.continuous.diffusion import TRAINING_STEPS, Kernel, NoiseSchedule
from tempera.continuous.mar import MAR, MARConfig
from tempera.image_tokenizers.kl import KLModel
from tempera.shapes.labels import CLASSES, class_of
from tempera.shapes.world import COLOURS, SHAPES, World
from tempera.training.lr_schedules import trapezoid

TINY_MAR = MARConfig(
    grid=(6, 6),
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


@dataclass
class MARSettings:
    """What the trainings of the small MAR and of its draft have in common.

    Scenes are rendered and encoded once: what a network is trained on are draws of the latents of
    `scenes` of them.

    Attributes:
        scenes: how many are encoded.
        size: of the shapes in them, `small` or `large`; null for both.
        lr: AdamW's, for embeddings, norms, biases and what is not in a block.
        matrix_lr: Muon's, for the matrices of all blocks.
        repeats: noise levels a token is trained at, for one pass of the transformer.
        mask_std: spread of the share of tokens that the network sees: |N(0, mask_std²)|, less
            than 1. MAR's own training has 0.25, cut off at 0.3, which leaves one-token-a-step
            decoding to generalise from the first third of an image.
        denoising_steps, denoising_start: of the sampling that the kernels are learned for, as in
            `DiffusionSampling`. In a step from one of 1,000 levels to the next, the bounds of the
            variance are close to each other, and nothing is learned of what a step over forty
            needs.
        ema: decay of the moving average of the weights, which is what is kept.
        measured: unseen scenes that its metrics come from.
        bf16: compute the forward pass in bfloat16 autocast; worth it on processors with bfloat16
            units only.
    """

    scenes: int = 16_384
    size: str | None = None
    steps: int = 12000
    batch_size: int = 32
    lr: float = 2e-3
    matrix_lr: float = 5e-3
    weight_decay: float = 0.02
    warmup_steps: int = 100
    repeats: int = 1
    mask_std: float = 0.5
    denoising_steps: int = 25
    denoising_start: int = 960
    ema: float = 0.998
    bf16: bool = True
    seed: int = 0
    save_every: int = 500
    measured: int = 512

    @property
    def sampling(self) -> NoiseSchedule:
        """The stages of sampling."""
        return NoiseSchedule(self.denoising_steps, start=self.denoising_start)


@dataclass
class Cycle:
    """What is different in a further cycle of training, which starts from the averaged weights of
    the one before; see `MARTraining`.
    """

    steps: int = 5000
    size: str | None = None
    lr: float = 1.5e-3
    matrix_lr: float = 4e-3
    repeats: int = 4
    plain_share: float = 0.4
    save_every: int = 250


@dataclass
class MARTraining(MARSettings):
    """How the small MAR is trained.

    Attributes:
        snr_clip: the squared error of the noise counts min(1/ᾱ, snr_clip) times as much, relative
            to its mean; 1 is MAR's own training. The noisy levels decide what a token shows, and
            have next to no share in the plain error.
        object_weight: loss weight of tokens that touch a shape: what kind of shape it is, one sees
            in few tokens, and there but little.
        plain_share: last share of steps, without this weight.
        variance: weight of the variational bound that teaches the variances, beside the squared
            error of the noise.
        cfg_dropout: share of images without a class, for guidance.
        further: cycles of training after the first; the last one has the size of all shapes that
            the MAR draws in the end.
    """

    snr_clip: float = 10.0
    object_weight: float = 5.0
    plain_share: float = 0.25
    variance: float = 0.3
    cfg_dropout: float = 0.1
    further: list[Cycle] = field(default_factory=lambda: [Cycle(), Cycle(steps=4000, size="large")])

    @property
    def cycles(self) -> list[Self]:
        """The settings of every cycle."""
        first = replace(self, further=[])
        return [first, *(replace(first, **asdict(cycle)) for cycle in self.further)]


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
        latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return tokenizer.tokens(latents).flatten(1, 2)


@torch.no_grad()
def encode_scenes(world: World, count: int, tokenizer: KLModel, size: str | None = None) -> Latents:
    """Render and encode the first `count` scenes of one shape, of a size or of any, centred on a
    corner of tokens.

    With shapes anywhere on the world's finer lattice, a shape has several patterns of tokens, and a
    network of this size did not learn to tell circles from squares.
    """
    moments = []
    classes = []
    touched = []
    side = tokenizer.config.networks.factor * tokenizer.config.patch
    for first in range(0, count, 64):
        samples = single_shapes(world, first, min(64, count - first), side, size)
        moments.append(torch.stack(tokenizer.moments(pictures(samples)), 1).half())
        classes += [class_of(sample.scene.caption) for sample in samples]
        touched += [shape_tokens(sample, side) for sample in samples]
    return Latents(torch.cat(moments), torch.tensor(classes), torch.stack(touched))


class MaskedBatch(NamedTuple):
    """Images of which the networks are shown some tokens.

    Attributes:
        tokens: by place in the image, [B, T, D].
        labels, drop: classes int64 [B], and which of them are left out, bool [B].
        known: how many tokens are shown.
        order: int64 [B, T].
    """

    tokens: Tensor
    labels: Tensor
    drop: Tensor
    known: int
    order: Tensor

    @classmethod
    def drawn(cls, tokens: Tensor, labels: Tensor, spread: float, cfg_dropout: float = 0.0) -> Self:
        """A random order and a random share of the tokens, at least one of them hidden; see
        `MARSettings.mask_std`.
        """
        length = tokens.shape[1]
        share = torch.empty(1)
        nn.init.trunc_normal_(share, mean=0.0, std=spread, a=0.0, b=1.0)
        known = min(int(length * share), length - 1)
        order = torch.rand(len(tokens), length).argsort()
        drop = torch.rand(len(tokens)) < cfg_dropout
        return cls(tokens, labels, drop, known, order)

    @property
    def ordered(self) -> Tensor:
        """The tokens by `order`, [B, T, D]."""
        return self.tokens.gather(1, self.order.unsqueeze(-1).expand_as(self.tokens))

    @property
    def hidden(self) -> Tensor:
        """Those that are not shown, [B, T − known, D]."""
        return self.ordered[:, self.known :]

    def vectors(self, network: MAR, drop: Tensor) -> Tensor:
        """The network's vectors for the hidden tokens, [B, T − known, C]."""
        count = len(self.tokens)
        places = torch.arange(self.known, self.order.shape[1]).expand(count, -1)
        condition = network.class_embedding(self.labels, drop)
        counts = torch.full((count,), self.known)
        shown = self.ordered[:, : self.known]
        out: Tensor = network(shown, self.order, counts, condition, places)
        return out


def divergence_of(p: Kernel, q: Kernel) -> Tensor:
    """KL(p‖q) in nats of every number."""
    return kl_divergence(Normal(p.mean, p.std), Normal(q.mean, q.std))


def token_losses(
    network: MAR, batch: MaskedBatch, settings: MARTraining, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How well the tokens that are not known are predicted (Li et al. 2024, Eq. 2; Nichol and
    Dhariwal 2021, Eq. 16).

    Args:
        network: the network.
        batch: images and what is shown of them.
        settings: the noise levels a token, their weights, and the steps that the variances are
            learned for, on half of the tokens.
        weights: of the tokens by place in the image, [B, T]; equal unless given.

    Returns:
        The squared error of the noise, weighted, and, not weighted, the divergence of the predicted
        kernel from the true posterior in nats: means over the numbers of all tokens.
    """
    schedule = NoiseSchedule(TRAINING_STEPS)
    sampling = settings.sampling
    repeats = settings.repeats
    condition = batch.vectors(network, batch.drop).flatten(0, 1).repeat(repeats, 1)
    start = batch.hidden.flatten(0, 1).repeat(repeats, 1)

    # levels of training; half of the tokens are at a step that the sampler takes
    on_way = torch.rand(len(start)) < 0.5
    stage = torch.randint(len(sampling.times), (len(start),))
    level = torch.randint(TRAINING_STEPS, (len(start),))
    level = torch.where(on_way, sampling.times[stage], level)
    noise = torch.randn_like(start)
    signal = schedule.alphas_cumprod[level].unsqueeze(-1)
    noisy = (signal.sqrt() * start + (1 - signal).sqrt() * noise).float()

    channels = batch.tokens.shape[-1]
    predicted, place = network.head(noisy, level, condition).float().split(channels, -1)
    by_level = (1 / schedule.alphas_cumprod).clamp(max=settings.snr_clip).float()
    error = (predicted - noise).square().mean(-1) * (by_level / by_level.mean())[level]
    if weights is not None:
        by_token = weights.gather(1, batch.order)[:, batch.known :].flatten().repeat(repeats)
        error = error * by_token / by_token.mean()

    def kernel(mean: Tensor, variance: Tensor) -> Kernel:
        """The step of the sampler for a predicted noise and a place between both variances."""
        output = torch.cat([mean, variance], -1)
        return sampling.kernel(output[on_way], noisy[on_way], stage[on_way])

    learned = kernel(predicted.detach(), place)
    true = kernel(noise, -torch.ones_like(noise))
    return error.mean(), divergence_of(true, learned).mean()


def train_mar(settings: MARTraining, tokenizer: KLModel, run: Path, network: MAR) -> MAR:
    """Train one cycle from the weights of `network`, or from where `run` left off, and return the
    averaged network.
    """
    latents = encode_scenes(
        World(settings.seed, texture="clouds"), settings.scenes, tokenizer, settings.size
    )

    def losses(step: int) -> dict[str, Tensor]:
        chosen = torch.randint(len(latents.classes), (settings.batch_size,))
        plain = step >= (1 - settings.plain_share) * settings.steps
        weights = 1 + (settings.object_weight - 1) * latents.touched[chosen].float()
        tokens = latents.draw(chosen, tokenizer)
        classes = latents.classes[chosen]
        batch = MaskedBatch.drawn(tokens, classes, settings.mask_std, settings.cfg_dropout)
        error, divergence = token_losses(network, batch, settings, None if plain else weights)
        loss = error + settings.variance * divergence
        return {"loss": loss, "noise_error": error, "divergence": divergence}

    return averaged(network, losses, settings, run)


def averaged(
    network: MAR, losses: Callable[[int], dict[str, Tensor]], settings: MARSettings, run: Path
) -> MAR:
    """Train a network and return the moving average of it."""
    network.requires_grad_().class_emb.weight.register_hook(taught_together)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if "blocks." in name and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            others.append(parameter)
    optimisers = [
        muon(matrices, settings.matrix_lr, settings.weight_decay),
        torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def of_step(step: int) -> Iterator[dict[str, Tensor]]:
        with arithmetic(settings.bf16):
            values = losses(step)
        yield values

    schedule = trapezoid(settings.warmup_steps, settings.steps)
    average = minimise(network, optimisers, schedule, of_step, settings, run, 3.0, settings.ema)
    assert isinstance(average, MAR)
    return average


def new_mar(config: MARConfig, seed: int) -> MAR:
    """A network without training. Its position embeddings start as sines of row and column: a small
    network with few images does not find the grid by itself.
    """
    torch.manual_seed(seed)
    network = MAR(config)
    initialise(network)
    height, width = config.grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    rates = torch.logspace(math.log10(2), -1, config.width // 4)
    row_angles = rows.flatten().float()[:, None] * rates
    column_angles = columns.flatten().float()[:, None] * rates
    angles = torch.cat([row_angles, column_angles], dim=1)
    for embedding in (
        network.encoder_pos_embed_learned,
        network.decoder_pos_embed_learned,
        network.diffusion_pos_embed_learned,
    ):
        embedding.data[0, -config.length :] = torch.cat([angles.sin(), angles.cos()], dim=1)
    return network


def initialise(network: MAR) -> None:
    """Initialise for training: Xavier for linear layers, N(0, 0.02²) for embeddings, and zeros for
    the head's last layer and modulations.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for name, parameter in network.named_parameters():
        if "embed_learned" in name or name in ("class_emb.weight", "fake_latent", "mask_token"):
            nn.init.normal_(parameter, std=0.02)
    head = network.head
    for name, parameter in head.named_parameters():
        if "adaLN_modulation" in name or name.startswith("final_layer.linear"):
            nn.init.zeros_(parameter)


def taught_together(gradient: Tensor) -> Tensor:
    """The gradient of the classes' embeddings, [classes, W], of which each takes those of its shape
    and its colour as well, as if it were a sum of three: one of 48 classes is seldom seen, and a
    network that has no use for the shape yet would hardly find it.
    """
    by_class = gradient.unflatten(0, (len(SHAPES), len(COLOURS)))
    of_shape = by_class.sum(1, keepdim=True)
    of_colour = by_class.sum(0, keepdim=True)
    shared: Tensor = by_class + of_shape + of_colour
    return shared.flatten(0, 1)


@torch.no_grad()
def measure_mar(network: MAR, tokenizer: KLModel, settings: MARTraining) -> dict[str, float]:
    """The losses with a class on unseen scenes, the error without weights."""
    plain = replace(settings, snr_clip=1.0)
    losses = []
    for batch in unseen_batches(tokenizer, settings):
        losses.append(torch.stack(token_losses(network, batch, plain)))
    error, divergence = torch.stack(losses).mean(0).tolist()
    return {"validation_noise_error": error, "validation_divergence": divergence}


def unseen_batches(tokenizer: KLModel, settings: MARSettings) -> Iterator[MaskedBatch]:
    """Scenes of another world, by 64."""
    torch.manual_seed(settings.seed)
    unseen = encode_scenes(
        World(settings.seed + 1, texture="clouds"), settings.measured, tokenizer, settings.size
    )
    for part in torch.arange(settings.measured).split(64):
        tokens = unseen.draw(part, tokenizer)
        yield MaskedBatch.drawn(tokens, unseen.classes[part], settings.mask_std)
