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
        attributes: what captions tell, the classes of `ATTRIBUTES` or UNTOLD, int8 [N, A].
    """

    words: Tensor
    codes: Tensor
    parts: Tensor
    attributes: Tensor

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
        inputs = torch.cat([prefix, self.network.embed_tokens(codes[:, :-1])], dim=1)
        first = self.network.config.prefix_length - 1
        decoder = self.network.model
        rotation = decoder.rotary.table(inputs.shape[1], first + 1, inputs.device)[:, None]
        mask = causal_mask(keep, inputs.shape[1], inputs.dtype)
        states = decoder(inputs, mask, rotation.to(inputs), features=(READOUT_LAYER,))
        last, early = states[:, first:].chunk(2, dim=-1)
        logits = self.network.lm_head(last).float()
        losses = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
        early = early.float()
        return losses.view(codes.shape), self.readout(F.layer_norm(early, early.shape[-1:]))

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


def _initialise(network: LlamaGen, codebook: Tensor) -> None:
    """Start token embedding and head as random projections of the codebook, so that similar codes
    start out similar.
    """
    width = network.config.hidden_size
    scales = [(network.model.embed_tokens.weight, 0.3), (network.lm_head.weight, width**-0.5)]
    for weight, scale in scales:
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
    batches = []
    for start in range(0, count, 64):
        samples = world.batch(start, min(64, count - start))
        with arithmetic(bf16):
            codes = tokenizer.encode(pictures(samples)).flatten(1)
        parts = []
        attributes = []
        for sample in samples:
            touched, onset = shape_tokens(sample, tokenizer.config.factor)
            parts.append(touched.byte() + onset.byte())
            attributes.append(_attributes(sample.caption))
        words = tokenize([sample.caption for sample in samples], length)
        batch = Scenes(words.byte(), codes.short(), torch.stack(parts), torch.stack(attributes))
        batches.append(batch)
    return Scenes(
        torch.cat([batch.words for batch in batches]),
        torch.cat([batch.codes for batch in batches]),
        torch.cat([batch.parts for batch in batches]),
        torch.cat([batch.attributes for batch in batches]),
    )


def _attributes(caption: str) -> Tensor:
    """What a caption tells, as in `Scenes`: int8 [A]."""
    scene = parse_caption(caption)
    assert scene is not None
    return torch.tensor(list(labels(scene).values()), dtype=torch.int8)


def train_target(
    settings: TargetTraining, tokenizer: VQModel, run: Path, config: LlamaGenConfig
) -> tuple[TargetModel, dict[str, float]]:
    """Train, from where `run` left off; returns the averaged model and its metrics on unseen
    scenes.
    """
    world = World(settings.seed, pairs=settings.pairs)
    scenes = encode_scenes(world, settings.scenes, tokenizer, config.prefix_length, settings.bf16)
    torch.manual_seed(settings.seed)
    model = TargetModel(config, tokenizer.quantize.codebook)

    def losses(step: int) -> Iterator[dict[str, Tensor]]:
        batch = scenes.batch(torch.randint(settings.scenes, (settings.batch_size,)))
        drop = torch.rand(settings.batch_size) < settings.caption_dropout
        calm = step >= (1 - settings.calm) * settings.steps
        return losses_in_parts(model, batch, drop, settings, calm)

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
    unseen = World(settings.seed + 1)
    return average, measure_target(average, tokenizer, unseen, settings.measured)


def losses_in_parts(
    model: TargetModel, batch: Scenes, drop: Tensor, settings: TargetTraining, calm: bool
) -> Iterator[dict[str, Tensor]]:
    """Part by part, what adds up to the loss of a batch, and to its mean over all tokens and over
    those where a shape begins, in nats.
    """
    attributes = batch.attributes.masked_fill(drop[:, None], UNTOLD)
    by_part = [1.0, 1.0, 1.0] if calm else [1.0, settings.object_weight, settings.onset_weight]
    readout_weight = 0.0 if calm else settings.readout
    weights = torch.tensor(by_part)[batch.parts]
    weights = weights / weights.sum()
    begins = batch.parts == 2
    onset = begins / begins.sum()
    for part in torch.arange(len(drop)).split(settings.part):
        with arithmetic(settings.bf16):
            tokens, read = model(batch.words[part], drop[part], batch.codes[part])
        readout = model.readout_loss(read, attributes[part]) * len(part) / len(drop)
        loss = (tokens * weights[part]).sum() + readout_weight * readout
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
    batches = [scenes.batch(part) for part in torch.arange(count).split(16)]

    def losses(dropped: bool) -> Tensor:
        """Of every token, [count, length], with or without captions."""
        by_batch = []
        for batch in batches:
            drop = torch.full((len(batch.words),), dropped)
            of_batch, _ = model(batch.words, drop, batch.codes)
            by_batch.append(of_batch)
        return torch.cat(by_batch)

    with_captions = losses(dropped=False)
    without_captions = losses(dropped=True)
    worth = (without_captions - with_captions).sum(-1).mean()
    return {
        "validation_loss": with_captions.mean().item(),
        "validation_onset_loss": with_captions[scenes.parts == 2].mean().item(),
        "nats_per_image_told_by_captions": worth.item(),
    }
