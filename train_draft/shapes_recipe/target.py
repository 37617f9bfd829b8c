"""Training of the shapes target: a tiny LlamaGen and its text encoder, jointly, on world images
encoded by the shapes tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_recipe.scenes import pictures, shape_tokens
from shapes_recipe.stage import arithmetic, minimise, muon
from tempera.image_tokenizers.vq import VQModel
from tempera.shapes.classifier import ATTRIBUTES, UNTOLD, labels
from tempera.shapes.networks import TextEncoder, tokenize
from tempera.shapes.world import World, parse_caption
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask
from tempera.training.lr_schedules import trapezoid

TINY_TARGET = LlamaGenConfig(
    vocab_size=1024,
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


@dataclass
class TargetTraining:
    """How the target is trained.

    A caption decides a few nats of an image's several hundred, most of them in the rows where a
    shape begins: plain cross-entropy learns textures first and captions very late. Three remedies
    act until the last `calm` share of steps, which is plain cross-entropy, so that the final model
    is calibrated.

    Attributes:
        scenes: how many are rendered and encoded, once; training draws from them.
        batch_size: images a step; `part`: images in one forward pass, few enough for the
            processor's cache.
        lr: AdamW's, for embeddings, norms, head and text encoder; `matrix_lr` is Muon's, for the
            decoder layers' matrices.
        decay: last share of steps in which the learning rates fall to zero.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        pairs: share of scenes with two shapes.
        object_weight: loss weight of tokens that touch a shape.
        onset_weight: loss weight of tokens in the first two rows of a shape, where its colour and
            kind are chosen.
        readout: weight of an auxiliary loss: what the caption tells must be readable at every image
            token after `READOUT_LAYER` layers.
        ema: decay of the moving average of the weights, which is what is kept.
        measured: unseen scenes that its metrics come from.
        bf16: compute in bfloat16 autocast; worth it on processors with bfloat16 units only.
    """

    steps: int = 4000
    scenes: int = 65_536
    batch_size: int = 32
    part: int = 8
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    weight_decay: float = 0.02
    warmup_steps: int = 60
    decay: float = 0.35
    caption_dropout: float = 0.1
    pairs: float = 0.5
    object_weight: float = 3.0
    onset_weight: float = 8.0
    readout: float = 0.3
    calm: float = 0.25
    seed: int = 0
    ema: float = 0.998
    save_every: int = 100
    measured: int = 512
    bf16: bool = True


class Scenes(NamedTuple):
    """Encoded scenes.

    Attributes:
        words: word ids, uint8 [N, T].
        codes: int16 [N, h·w].
        parts: 0 where no shape is touched, 1 where one is, 2 in its first two rows, uint8 [N, h·w].
        told: what captions tell, the classes of `ATTRIBUTES` or UNTOLD, int8 [N, A].
    """

    words: Tensor
    codes: Tensor
    parts: Tensor
    told: Tensor

    def batch(self, chosen: Tensor) -> Self:
        """The scenes int64 [B], as int64 tensors."""
        return type(self)(*(part[chosen].long() for part in self))


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

    def forward(self, words: Tensor, drop: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """words [B, T], drop [B], codes [B, length] → loss of every token [B, length] in nats, and
        the attributes' logits that are read at it, [B, length, classes].
        """
        features, keep = self.text(words)
        prefix, _ = self.network.embed_prefix(features, keep, drop)
        inputs = torch.cat([prefix, self.network.embed_tokens(codes[:, :-1])], 1)
        first = self.network.config.prefix_length - 1
        decoder = self.network.model
        rotation = decoder.rotary.table(inputs.shape[1], first + 1, inputs.device)[:, None]
        mask = causal_mask(keep, inputs.shape[1], inputs.dtype)
        states = decoder(inputs, mask, rotation.to(inputs), features=(READOUT_LAYER,))
        last, early = states[:, first:].chunk(2, -1)
        logits = self.network.lm_head(last).float()
        losses = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
        early = early.float()
        return losses.view(codes.shape), self.readout(F.layer_norm(early, early.shape[-1:]))

    def readout_loss(self, logits: Tensor, told: Tensor) -> Tensor:
        """Cross-entropy of reading the caption's attributes: logits [B, length, classes], told
        int64 [B, attributes] with UNTOLD → scalar.
        """
        losses = [
            F.cross_entropy(
                part.flatten(0, 1).float(),
                truth[:, None].expand(part.shape[:2]).flatten(),
                ignore_index=UNTOLD,
                reduction="none",
            )
            for part, truth in zip(logits.split(self.classes, -1), told.T, strict=True)
        ]
        return torch.stack([loss.mean() for loss in losses]).mean()


def _initialise(network: LlamaGen, codebook: Tensor) -> None:
    """Start token embedding and head as random projections of the codebook, so that similar codes
    start out similar.
    """
    width = network.config.hidden_size
    for weight, scale in (
        (network.model.embed_tokens.weight, 0.3),
        (network.lm_head.weight, width**-0.5),
    ):
        projected = codebook @ torch.randn(codebook.shape[1], width)
        weight.data.copy_(scale * (projected + 0.3 * torch.randn_like(projected)))
    for name, weight in network.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_((2 * network.config.num_hidden_layers) ** -0.5)


@torch.no_grad()
def encode_scenes(
    world: World, count: int, tokenizer: VQModel, length: int, bf16: bool = False
) -> Scenes:
    """The first scenes of a world as the target's training reads them, captions of at most `length`
    words.
    """
    made = []
    for start in range(0, count, 64):
        samples = world.batch(start, min(64, count - start))
        with arithmetic(bf16):
            codes = tokenizer.encode(pictures(samples)).flatten(1)
        tokens = [shape_tokens(sample, tokenizer.config.factor) for sample in samples]
        parts = torch.stack([touched.byte() + onset.byte() for touched, onset in tokens])
        told = [labels(scene) for s in samples if (scene := parse_caption(s.caption))]
        truth = torch.tensor([list(classes.values()) for classes in told])
        words = tokenize([sample.caption for sample in samples], length)
        made.append(Scenes(words.byte(), codes.short(), parts, truth.to(torch.int8)))
    return Scenes(*map(torch.cat, zip(*made, strict=True)))


def train_target(
    settings: TargetTraining, tokenizer: VQModel, run: Path, config: LlamaGenConfig
) -> tuple[TargetModel, dict[str, float]]:
    """Train, from where `run` left off; returns the averaged model and its metrics on unseen
    scenes.
    """
    world, length = World(settings.seed, pairs=settings.pairs), config.prefix_length
    scenes = encode_scenes(world, settings.scenes, tokenizer, length, settings.bf16)
    torch.manual_seed(settings.seed)
    model = TargetModel(config, tokenizer.quantize.codebook)

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        batch = scenes.batch(torch.randint(settings.scenes, (settings.batch_size,)))
        drop = torch.rand(settings.batch_size) < settings.caption_dropout
        calm = step >= (1 - settings.calm) * settings.steps
        return losses_in_parts(model, batch, drop, settings, calm)

    matrices = [p for p in model.network.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimisers = [
        muon(matrices, settings.matrix_lr, settings.weight_decay),
        torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedule = trapezoid(settings.warmup_steps, settings.steps, settings.decay)
    average = minimise(model, optimisers, schedule, losses, settings, run, 1.0, settings.ema)
    assert isinstance(average, TargetModel)
    unseen = World(settings.seed + 1)
    return average, measure_target(average, tokenizer, unseen, settings.measured)


def losses_in_parts(
    model: TargetModel, batch: Scenes, drop: Tensor, settings: TargetTraining, calm: bool
) -> Iterator[dict[str, Tensor]]:
    """Part by part, what adds up to the loss of a batch, and to its mean over all tokens and over
    those where a shape begins, in nats.
    """
    told = batch.told.masked_fill(drop[:, None], UNTOLD)
    by_part = [1.0, 1.0, 1.0] if calm else [1.0, settings.object_weight, settings.onset_weight]
    weights = torch.tensor(by_part)[batch.parts]
    weights, onset = weights / weights.sum(), (batch.parts == 2) / (batch.parts == 2).sum()
    for part in torch.arange(len(drop)).split(settings.part):
        with arithmetic(settings.bf16):
            tokens, read = model(batch.words[part], drop[part], batch.codes[part])
        readout = model.readout_loss(read, told[part]) * len(part) / len(drop)
        loss = (tokens * weights[part]).sum() + (0.0 if calm else settings.readout) * readout
        yield {
            "loss": loss,
            "nats": tokens.sum() / batch.codes.numel(),
            "onset_nats": (tokens * onset[part]).sum(),
        }


@torch.no_grad()
def measure_target(
    model: TargetModel, tokenizer: VQModel, world: World, count: int
) -> dict[str, float]:
    """Loss in nats per token on unseen scenes, over all tokens and where shapes begin, and what
    captions are worth.
    """
    scenes = encode_scenes(world, count, tokenizer, model.network.config.prefix_length)
    chunks = [scenes.batch(part) for part in torch.arange(count).split(16)]
    told, untold = (
        torch.cat([model(c.words, torch.full((len(c.words),), drop), c.codes)[0] for c in chunks])
        for drop in (False, True)
    )
    return {
        "validation_loss": told.mean().item(),
        "validation_onset_loss": told[scenes.parts == 2].mean().item(),
        "nats_per_image_told_by_captions": (untold - told).sum(-1).mean().item(),
    }
