"""Training of the shapes target: a tiny LlamaGen and its text encoder, jointly, on world images
encoded by the shapes tokenizer.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tempera.image_tokenizers.vq import VQModel
from tempera.runtime.files import replacing
from tempera.runtime.network_identity import identity_of
from tempera.shapes.build.record import LogMetrics
from tempera.shapes.build.resumable import follow, remaining_steps, take_step
from tempera.shapes.classifier import ATTRIBUTES, UNTOLD, labels
from tempera.shapes.networks import TextEncoder, tokenize
from tempera.shapes.world import Sample, World, object_masks, parse_caption
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask
from tempera.training.checkpoint import State, TrainingProgress
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

Look = Callable[["TargetModel", int], None]
"""Called after every step with the model and the number of steps done; to draw pictures now and
then.
"""


@dataclass(frozen=True)
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
        object_weight: loss weight of tokens that touch a shape.
        onset_weight: loss weight of tokens in the first two rows of a shape, where its colour and
            kind are chosen.
        readout: weight of an auxiliary loss: what the caption tells must be readable at every image
            token after `READOUT_LAYER` layers.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        pairs: share of scenes with two shapes.
        matrix_lr: Muon's learning rate for the decoder's matrices; `lr` is AdamW's for everything
            else.
        decay: last share of steps in which the learning rates fall to zero.
        ema: decay of the moving average of the weights, which is what is kept.
        bf16: compute in bfloat16; worth it on processors with bfloat16 units only.
        compile: compile the decoder's layers, for a quarter less time; needs a C++ compiler.
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
    bf16: bool = True
    compile: bool = True


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
        self.readout = nn.Linear(
            config.hidden_size, sum(len(classes) for classes in ATTRIBUTES.values())
        )
        _initialise(self.network, codebook)

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The decoder's matrices in `dtype`, the norms' weights multiplied into those that follow:
        embedding, head, and of every layer queries with keys and values [3H, H], output, gate with
        up [2I, H], down.
        """
        model, layers = self.network.model, list[Any](self.network.model.layers)
        joined = [model.embed_tokens.weight, self.network.lm_head.weight * model.norm.weight]
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            joined += [torch.cat(qkv) * layer.input_layernorm.weight, attention.o_proj.weight]
            joined += [gate_up * layer.post_attention_layernorm.weight, mlp.down_proj.weight]
        return [weight.to(dtype) for weight in joined]

    def forward(self, words: Tensor, drop: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """words [B, T], drop [B], codes [B, length] → loss of every token [B, length] in nats, and
        what the read-out layer sees [B, length, H].
        """
        features, keep = self.text(words)
        prefix, weights = (
            self.network.embed_prefix(features, drop),
            self.weights(self.network.lm_head.weight.dtype),
        )
        return self.image_losses(prefix, keep, weights, codes)

    def image_losses(
        self,
        prefix: Tensor,
        keep: Tensor,
        weights: list[Tensor],
        codes: Tensor,
        layer: "LayerFunction | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """What `forward` gives, from condition tokens [B, T, H] and `weights`. It computes what the
        network's own forward pass does, in half the time of a training step on a processor; `layer`
        is `decoder_layer`, or that compiled.
        """
        layer = layer or decoder_layer
        config, first = self.network.config, self.network.config.prefix_length - 1
        table, head, *layers = weights
        x = torch.cat([prefix.to(table.dtype), F.embedding(codes[:, :-1], table)], 1)
        mask = causal_mask(keep, x.shape[1], x.dtype)
        turns = self._turns(x)
        early = x
        for i in range(config.num_hidden_layers):
            x = layer(
                x,
                layers[4 * i : 4 * i + 4],
                config.num_attention_heads,
                config.norm_eps,
                mask,
                turns,
            )
            if i + 1 == READOUT_LAYER:
                early = x
        logits = F.linear(_normed(x[:, first:], config.norm_eps), head)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), codes.flatten(), reduction="none"
        ).view(codes.shape)
        return losses, early[:, first:]

    def read(self, early: Tensor) -> Tensor:
        """What the read-out layer sees [..., H] → logits of all attributes [..., classes]."""
        out: Tensor = self.readout(F.layer_norm(early.float(), early.shape[-1:]))
        return out

    def _turns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotation, [S, 1, head size] each, sin negative in the first half: for
        `roll` in place of turning halves.
        """
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cos, sin = (part[0, :, None] for part in self.network.model.rotary_emb(x, positions))
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


LayerFunction = Callable[[Tensor, list[Tensor], int, float, Tensor, tuple[Tensor, Tensor]], Tensor]


def _normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps)


def decoder_layer(
    x: Tensor,
    weights: list[Tensor],
    heads: int,
    eps: float,
    mask: Tensor,
    turns: tuple[Tensor, Tensor],
) -> Tensor:
    """One layer of the decoder with joined matrices (`TargetModel.weights`), [B, S, H] →
    [B, S, H].
    """
    qkv, out, gate_up, down = weights
    cos, sin = turns
    size = cos.shape[-1]
    projected = F.linear(_normed(x, eps), qkv).unflatten(-1, (3 * heads, size))
    both, value = projected[:, :, : 2 * heads], projected[:, :, 2 * heads :]
    both = torch.addcmul(both * cos, both.roll(size // 2, -1), sin)
    query, key, value = (
        part.transpose(1, 2) for part in (both[:, :, :heads], both[:, :, heads:], value)
    )
    scores = query @ (key * size**-0.5).transpose(-1, -2) + mask
    x = x + F.linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), out)
    gate, up = F.linear(_normed(x, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def readout_loss(logits: Tensor, told: Tensor) -> Tensor:
    """Cross-entropy of reading the caption's attributes: logits [B, length, classes], told int64
    [B, attributes] with UNTOLD → scalar.
    """
    parts = logits.split([len(classes) for classes in ATTRIBUTES.values()], -1)
    wanted = [truth[:, None].expand(logits.shape[:2]).flatten() for truth in told.T]
    pairs = zip(parts, wanted, strict=True)
    losses = [
        F.cross_entropy(part.flatten(0, 1).float(), truth, ignore_index=UNTOLD, reduction="none")
        for part, truth in pairs
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


def _optimisers(model: TargetModel, settings: TargetTraining) -> list[torch.optim.Optimizer]:
    """Muon for the decoder layers' matrices, AdamW for embeddings, norms, head and text encoder."""
    matrices = [p for p in model.network.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=settings.matrix_lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def encode_scenes(
    world: World, first: int, count: int, tokenizer: VQModel, length: int, bf16: bool = False
) -> Scenes:
    """Scenes `first` … of a world as the target's training reads them, captions of at most `length`
    words.
    """
    made = []
    for start in range(first, first + count, 64):
        samples = world.batch(start, min(64, first + count - start))
        images = torch.from_numpy(np.stack([s.image for s in samples])).permute(0, 3, 1, 2) * 2 - 1
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            codes = tokenizer.encode(images).flatten(1)
        touched, onset = (
            torch.stack(part)
            for part in zip(
                *(shape_tokens(s, tokenizer.config.factor) for s in samples), strict=True
            )
        )
        told = [
            list(labels(parsed).values()) for s in samples if (parsed := parse_caption(s.caption))
        ]
        words = tokenize([s.caption for s in samples], length)
        made.append(
            Scenes(
                words.byte(),
                codes.short(),
                (touched.byte() + onset.byte()),
                torch.tensor(told).to(torch.int8),
            )
        )
    return Scenes(*map(torch.cat, zip(*made, strict=True)))


def kept_scenes(settings: TargetTraining, tokenizer: VQModel, length: int, path: Path) -> Scenes:
    """The encoded scenes in `path`; made and written if they are not there, or of another tokenizer
    or world.
    """
    made = {"tokenizer": identity_of(tokenizer), "length": str(length)}
    made |= {name: str(getattr(settings, name)) for name in ("scenes", "pairs", "seed", "bf16")}
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == made:
                return Scenes(*map(file.get_tensor, Scenes._fields))
    world = World(settings.seed, pairs=settings.pairs)
    scenes = encode_scenes(world, 0, settings.scenes, tokenizer, length, settings.bf16)
    with replacing(path) as temporary:
        save_file(scenes._asdict(), temporary, made)
    return scenes


def shape_tokens(sample: Sample, factor: int) -> tuple[Tensor, Tensor]:
    """Tokens that touch a shape, and those of each shape's first two rows, bool [h·w] each."""
    shapes = F.max_pool2d(torch.from_numpy(object_masks(sample.scene)).float(), factor) > 0
    rows = torch.arange(shapes.shape[1])[:, None]
    top = shapes.any(-1).int().argmax(-1)[:, None, None]
    return shapes.any(0).flatten(), (shapes & (rows <= top + 1)).any(0).flatten()


def train_target(
    settings: TargetTraining,
    tokenizer: VQModel,
    directory: Path,
    config: LlamaGenConfig = TINY_TARGET,
    report: LogMetrics | None = None,
    look: Look | None = None,
) -> tuple[TargetModel, dict[str, float]]:
    """Train, from where `directory` left off; returns the model and its metrics on unseen
    scenes.
    """
    scenes = kept_scenes(
        settings, tokenizer, config.prefix_length, directory / "scenes.safetensors"
    )
    torch.manual_seed(settings.seed)
    model = TargetModel(config, tokenizer.quantize.codebook)
    average = copy.deepcopy(model).requires_grad_(False)
    layer = torch.compile(decoder_layer) if settings.compile else None
    optimisers = _optimisers(model, settings)
    state = State(model, optimisers, average.state_dict(), TrainingProgress())
    schedule = trapezoid(settings.warmup_steps, settings.steps, settings.decay)
    for step in remaining_steps(directory, state, settings, schedule):
        # so that an interrupted training ends the same
        rng = np.random.default_rng([settings.seed, step])
        chosen = torch.from_numpy(rng.integers(settings.scenes, size=settings.batch_size))
        drop = torch.from_numpy(rng.random(settings.batch_size) < settings.caption_dropout)
        calm = step >= (1 - settings.calm) * settings.steps
        values = _gradients(model, scenes.batch(chosen), drop, settings, calm, layer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimisers)
        follow(average, model, settings.ema, step)
        if report and step % 20 == 0:
            report(values, step)
        if look:
            look(average, step + 1)
    return average.eval(), measure_target(average, tokenizer, World(settings.seed + 1))


def _gradients(
    model: TargetModel,
    batch: Scenes,
    drop: Tensor,
    settings: TargetTraining,
    calm: bool,
    layer: LayerFunction | None = None,
) -> dict[str, float]:
    """Add the gradients of one batch's loss, taken in parts; returns losses without weights, in
    nats a token.

    Captions and joined weights are computed once; each part's gradients with respect to them add up
    and are passed on at the end.
    """
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    features, keep = model.text(batch.words)
    computed = [model.network.embed_prefix(features, drop), *model.weights(dtype)]
    prefix, *weights = (part.detach().requires_grad_() for part in computed)
    told = batch.told.masked_fill(drop[:, None], UNTOLD)
    emphasis = torch.tensor(
        [1.0, 1.0, 1.0] if calm else [1.0, settings.object_weight, settings.onset_weight]
    )[batch.parts]
    emphasis = emphasis / emphasis.sum()
    all_losses, reads = [], []
    for part in torch.arange(len(drop)).split(settings.part):
        losses, early = model.image_losses(
            prefix[part], keep[part], weights, batch.codes[part], layer
        )
        read = readout_loss(model.read(early), told[part]) * len(part) / len(drop)
        loss: Tensor = (losses * emphasis[part]).sum() + (0.0 if calm else settings.readout) * read
        loss.backward()
        all_losses.append(losses.detach())
        reads.append(read.detach())
    torch.autograd.backward(computed, [leaf.grad for leaf in (prefix, *weights)])
    losses = torch.cat(all_losses)
    told_apart = {"loss": losses, "onset_loss": losses[batch.parts == 2]}
    return {name: value.mean().item() for name, value in told_apart.items()} | {
        "readout": torch.stack(reads).sum().item()
    }


@torch.no_grad()
def measure_target(
    model: TargetModel, tokenizer: VQModel, world: World, count: int = 512
) -> dict[str, float]:
    """Loss in nats per token on unseen scenes, over all tokens and where shapes begin, and what
    captions are worth.
    """
    scenes = encode_scenes(world, 0, count, tokenizer, model.network.config.prefix_length)
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
