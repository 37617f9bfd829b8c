"""Training of the shapes target: a tiny LlamaGen and its text encoder, jointly, on scenes of the
world as codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures
from shapes_recipe.stage import Ahead, arithmetic, device, minimise, muon
from tempera.shapes.classifier import ATTRIBUTES, UNTOLD, labels
from tempera.shapes.mosaic import Mosaic
from tempera.shapes.networks import TextEncoder, tokenize
from tempera.shapes.world import GRAINS, Sample, World, parse_caption
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask
from tempera.training.lr_schedules import trapezoid

TINY_TARGET = LlamaGenConfig(
    vocab_size=Mosaic().vocab_size,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    grid=(12, 12),
    prefix_length=16,
    caption_dim=96,
)
HALF_TARGET = replace(
    TINY_TARGET,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=2,
    caption_dim=64,
)
"""Half as wide and half as deep: the independent draft of the tiny target."""
READOUT_LAYER = 3
FLAT_GROUPS = Mosaic().flat // len(GRAINS)
"""Groups of codes that differ by their grain alone; the codes of outlines follow them."""


@dataclass
class TargetTraining:
    """How the target is trained.

    Of an image's nats nine in ten are grains, which are chance. A token's probability is that of
    its grain's group times that of the grain in the group, and each is learned by its own
    cross-entropy: whatever their weights, the best model is the calibrated one.

    Attributes:
        batch_size: images a step, none seen twice; `part`: images in one forward pass of a CPU, few
            enough for its cache.
        lr: AdamW's, for embeddings, norms, head and text encoder; `matrix_lr` is Muon's, for the
            decoder layers' matrices.
        decay: last share of steps in which the learning rates fall to zero.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        pairs: share of scenes with two shapes.
        structure_weight: weight of the groups' cross-entropy; the grains' is 1.
        readout: weight of an auxiliary loss: what the caption tells must be readable at every image
            token after `READOUT_LAYER` layers.
        ema: decay of the moving average of the weights, which is what is kept.
        measured: unseen scenes that its metrics come from.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 6000
    batch_size: int = 32
    part: int = 8
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    weight_decay: float = 0.02
    warmup_steps: int = 60
    decay: float = 0.5
    caption_dropout: float = 0.1
    pairs: float = 0.5
    structure_weight: float = 10.0
    readout: float = 0.3
    seed: int = 0
    ema: float = 0.998
    save_every: int = 100
    measured: int = 512
    bf16: bool = True


class Scenes(NamedTuple):
    """Encoded scenes.

    Attributes:
        words: word ids, int64 [N, T].
        codes: int64 [N, h·w].
        attributes: what captions tell, the classes of `ATTRIBUTES` or UNTOLD, int64
            [N, A].
    """

    words: Tensor
    codes: Tensor
    attributes: Tensor

    def to(self, place: torch.device) -> Self:
        """The same on a device."""
        return type(self)(*(part.to(place) for part in self))


class TargetModel(nn.Module):
    """The two networks that are trained together, and the read-out that helps."""

    def __init__(self, config: LlamaGenConfig, codebook: Tensor) -> None:
        super().__init__()
        assert config.caption_dim is not None
        self.text = TextEncoder(config.prefix_length, config.caption_dim)
        self.network = LlamaGen(config)
        self.classes = [len(names) for names in ATTRIBUTES.values()]
        self.readout = nn.Linear(config.hidden_size, sum(self.classes))
        _initialise(self.network, codebook)

    def forward(self, words: Tensor, drop: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """words [B, T], drop [B], codes [B, length] → cross-entropy in nats of every token's group
        [B, length], and of its grain in the group [B, length], and the attributes' logits that are
        read at it, [B, length, classes].
        """
        features, keep = self.text(words)
        prefix, _ = self.network.embed_prefix(features, keep, drop)
        inputs = torch.cat([prefix, self.network.embed_tokens(codes[:, :-1])], dim=1)
        first = self.network.config.prefix_length - 1
        decoder = self.network.model
        rotation = decoder.rotary.table(inputs.shape[1], first + 1, inputs.device)[:, None]
        mask = causal_mask(keep, inputs.shape[1], inputs.dtype)
        states = decoder(inputs, mask, rotation.to(inputs), features=(READOUT_LAYER,))
        last, early = states[:, first:].chunk(2, dim=-1)
        logits = self.network.lm_head(last).float()
        tokens = _cross_entropy(logits, codes)
        groups = _cross_entropy(*in_groups(logits, codes))
        early = early.float()
        return groups, tokens - groups, self.readout(F.layer_norm(early, early.shape[-1:]))

    def readout_loss(self, logits: Tensor, attributes: Tensor) -> Tensor:
        """Cross-entropy of reading the caption's attributes: logits [B, length, classes],
        attributes int64 [B, attributes] with UNTOLD → scalar.
        """
        losses = []
        by_attribute = logits.split(self.classes, dim=-1)
        for scores, classes in zip(by_attribute, attributes.T, strict=True):
            truth = classes[:, None].expand(scores.shape[:2])
            loss = F.cross_entropy(
                scores.flatten(0, 1).float(),
                truth.flatten(),
                ignore_index=UNTOLD,
                reduction="none",
            )
            losses.append(loss.mean())
        return torch.stack(losses).mean()


def in_groups(logits: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., V] and codes [...], those that differ by their grain alone made one: [..., V']
    and [...].
    """
    flat = len(GRAINS) * FLAT_GROUPS
    by_grain = logits[..., :flat].unflatten(-1, (FLAT_GROUPS, len(GRAINS)))
    merged = torch.cat([by_grain.logsumexp(-1), logits[..., flat:]], dim=-1)
    return merged, torch.where(codes < flat, codes // len(GRAINS), codes - flat + FLAT_GROUPS)


def _cross_entropy(logits: Tensor, codes: Tensor) -> Tensor:
    """Of every token, in nats: logits [B, length, V], codes [B, length] → [B, length]."""
    losses = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
    return losses.view(codes.shape)


def _initialise(network: LlamaGen, codebook: Tensor) -> None:
    """Start token embedding and head as random projections of the codebook, so that similar codes
    start out similar.
    """
    codebook = F.normalize(codebook - codebook.mean(0), dim=-1)
    width = network.config.hidden_size
    scales = [(network.model.embed_tokens.weight, 0.3), (network.lm_head.weight, width**-0.5)]
    for weight, scale in scales:
        projected = codebook @ torch.randn(codebook.shape[1], width)
        weight.data.copy_(scale * (projected + 0.3 * torch.randn_like(projected)))
    for name, weight in network.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_((2 * network.config.num_hidden_layers) ** -0.5)


@torch.no_grad()
def encode_scenes(tokenizer: Mosaic, samples: list[Sample], length: int) -> Scenes:
    """Scenes as the target's training reads them, captions of at most `length` words."""
    captions = [sample.caption for sample in samples]
    codes = tokenizer.encode(pictures(samples)).flatten(1)
    attributes = torch.stack([_attributes(caption) for caption in captions])
    return Scenes(tokenize(captions, length), codes, attributes)


def _attributes(caption: str) -> Tensor:
    """What a caption tells, as in `Scenes`: int64 [A]."""
    scene = parse_caption(caption)
    assert scene is not None
    return torch.tensor(list(labels(scene).values()))


def train_target(
    settings: TargetTraining, run: Path, config: LlamaGenConfig
) -> tuple[TargetModel, dict[str, float]]:
    """Train, from where `run` left off; returns the averaged model and its metrics on unseen
    scenes.
    """
    world = World(settings.seed, pairs=settings.pairs)
    tokenizer = Mosaic()
    make = partial(_batch, world, tokenizer, settings.batch_size, config.prefix_length)
    scenes = Ahead(make, settings.steps)
    torch.manual_seed(settings.seed)
    place = device()
    model = TargetModel(config, tokenizer.codebook).to(place)

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        drop = torch.rand(settings.batch_size) < settings.caption_dropout
        return losses_in_parts(model, scenes.batch(step).to(place), drop.to(place), settings)

    layers = model.network.model.layers.parameters()
    matrices = [parameter for parameter in layers if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimisers = [
        muon(matrices, settings.matrix_lr, settings.weight_decay),
        torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedule = trapezoid(settings.warmup_steps, settings.steps, settings.decay)
    average = minimise(model, optimisers, schedule, losses, settings, run, 1.0, settings.ema)
    assert isinstance(average, TargetModel)
    unseen = World(settings.seed + 1).batch(0, settings.measured)
    encoded = encode_scenes(tokenizer, unseen, config.prefix_length)
    return average, measure_target(average, encoded.to(place))


def _batch(world: World, tokenizer: Mosaic, size: int, length: int, step: int) -> Scenes:
    """A step's scenes, which no other step has."""
    return encode_scenes(tokenizer, world.batch(step * size, size), length)


def losses_in_parts(
    model: TargetModel, batch: Scenes, drop: Tensor, settings: TargetTraining
) -> Iterator[dict[str, Tensor]]:
    """Part by part, what adds up to the loss of a batch, and to its mean cross-entropies of a group
    and of a grain, in nats per token.
    """
    attributes = batch.attributes.masked_fill(drop[:, None], UNTOLD)
    size = settings.part if drop.device.type == "cpu" else len(drop)
    for part in torch.arange(len(drop)).split(size):
        with arithmetic(settings.bf16, drop.device.type):
            groups, grains, read = model(batch.words[part], drop[part], batch.codes[part])
        structure = groups.sum() / batch.codes.numel()
        grain = grains.sum() / batch.codes.numel()
        readout = model.readout_loss(read, attributes[part]) * len(part) / len(drop)
        loss = settings.structure_weight * structure + grain + settings.readout * readout
        yield {"loss": loss, "structure": structure, "grain": grain}


@torch.no_grad()
def measure_target(model: TargetModel, scenes: Scenes) -> dict[str, float]:
    """Cross-entropies on unseen scenes, in nats: per image, of structure with and without captions,
    and per token of the grains.
    """
    structure = []
    untold = []
    grain = []
    for part in torch.arange(len(scenes.words)).split(16):
        inputs = scenes.words[part], scenes.codes[part]
        dropped = torch.ones(len(part), dtype=torch.bool, device=inputs[0].device)
        groups, grains, _ = model(inputs[0], ~dropped, inputs[1])
        without, _, _ = model(inputs[0], dropped, inputs[1])
        structure.append(groups.sum(-1))
        untold.append(without.sum(-1))
        grain.append(grains.flatten())
    return {
        "structure_per_image": torch.cat(structure).mean().item(),
        "structure_per_image_without_captions": torch.cat(untold).mean().item(),
        "grain_per_token": torch.cat(grain).mean().item(),
    }
