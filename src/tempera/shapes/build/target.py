"""Training of the shipped target: a tiny LlamaGen and its text encoder, jointly, on world images
encoded by the shapes tokenizer.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.image_tokenizers.vq import VQModel
from tempera.shapes.classifier import ATTRIBUTES, UNTOLD, labels
from tempera.shapes.networks import TextEncoder, load_target_network, load_text_encoder, tokenize
from tempera.shapes.world import Sample, World, object_masks, parse_caption
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask
from tempera.training.lr_schedules import trapezoid

log = logging.getLogger(__name__)

TINY_TARGET = LlamaGenConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=12,
    num_attention_heads=4,
    grid=(16, 16),
    prefix_length=16,
    caption_dim=96,
)
HALF_TARGET = replace(
    TINY_TARGET,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=6,
    num_attention_heads=2,
    caption_dim=64,
)
"""Half as wide and half as deep: the independent draft of the tiny target."""


READOUT_LAYER = 3


@dataclass(frozen=True)
class TargetTraining:
    """How the target is trained.

    A caption decides a few nats of an image's several hundred, most of them in the rows where a
    shape begins: plain cross-entropy learns textures first and captions very late. Three remedies
    act until the last `calm` share of steps, which is plain cross-entropy, so that the final model
    is calibrated.

    Attributes:
        object_weight: loss weight of tokens that touch a shape.
        onset_weight: loss weight of tokens in the first two rows of a shape, where its colour and
            kind are chosen.
        readout: weight of an auxiliary loss: what the caption tells must be readable at every image
            token after `READOUT_LAYER` layers.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        matrix_lr: Muon's learning rate for the decoder's matrices; `lr` is AdamW's for everything
            else.
        bf16: compute the forward pass in bfloat16 autocast; worth it on processors with bfloat16
            units only.
        start: a built bundle whose target and text encoder training starts from; `None` starts from
            random weights.
    """

    steps: int = 2800
    batch_size: int = 16
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    weight_decay: float = 0.02
    warmup_steps: int = 60
    caption_dropout: float = 0.1
    object_weight: float = 3.0
    onset_weight: float = 8.0
    readout: float = 0.3
    calm: float = 0.25
    seed: int = 0
    save_every: int = 100
    compile: bool = False
    bf16: bool = False
    start: str | None = None


class TargetModel(nn.Module):
    """The two networks that are trained together."""

    def __init__(self, config: LlamaGenConfig, codebook: Tensor) -> None:
        super().__init__()
        assert config.caption_dim is not None
        self.text = TextEncoder(config.prefix_length, config.caption_dim)
        self.network = LlamaGen(config)
        self.readout = nn.Linear(
            config.hidden_size, sum(len(classes) for classes in ATTRIBUTES.values())
        )
        _initialise(self.network, codebook)

    def forward(self, words: Tensor, drop: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """words [B, T], drop [B], codes [B, length] → loss of every token [B, length] in nats, and
        read-out logits [B, length, classes].
        """
        features, keep = self.text(words)
        network, first = self.network, self.network.config.prefix_length - 1
        inputs = network.inputs(features, drop, codes)
        mask = causal_mask(keep, inputs.shape[1], inputs.dtype)
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
        turns = network.model.rotary_emb(inputs, positions)
        hidden = early = inputs
        for i, layer in enumerate(network.model.layers):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=turns)
            if i + 1 == READOUT_LAYER:
                early = hidden
        logits = network.lm_head(network.model.norm(hidden[:, first:]))
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), codes.flatten(), reduction="none"
        ).view(codes.shape)
        return losses, self.readout(F.layer_norm(early[:, first:], early.shape[-1:]))


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


@dataclass(frozen=True)
class SceneBatch:
    """Word ids [B, T], codes [B, h·w], tokens that touch a shape and where one begins, bool [B,
    h·w], what captions tell [B, A].
    """

    words: Tensor
    codes: Tensor
    touched: Tensor
    onset: Tensor
    told: Tensor


def encode_batch(samples: list[Sample], tokenizer: VQModel, length: int) -> SceneBatch:
    """Samples as the target's training reads them."""
    images = torch.from_numpy(np.stack([s.image for s in samples])).permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        codes = tokenizer.encode(images).flatten(1)
    masks = [shape_tokens(sample, tokenizer.config.factor) for sample in samples]
    told = [
        list(labels(parsed).values())
        for sample in samples
        if (parsed := parse_caption(sample.caption))
    ]
    touched, onset = (torch.stack(part) for part in zip(*masks, strict=True))
    return SceneBatch(
        tokenize([s.caption for s in samples], length), codes, touched, onset, torch.tensor(told)
    )


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
    report: Callable[[dict[str, float], int], None] | None = None,
) -> tuple[TargetModel, dict[str, float]]:
    """Train, saving to `directory`/checkpoint.pt and continuing from there; returns the model and
    its metrics on unseen scenes.
    """
    torch.manual_seed(settings.seed)
    model = TargetModel(config, tokenizer.quantize.codebook)
    if settings.start:
        _start_from(Path(settings.start), model)
    # on a CPU, fused attention's backward pass takes twice as long
    model.network.model.set_attn_implementation("eager")
    optimisers = _optimisers(model, settings)
    shape = trapezoid(settings.warmup_steps, settings.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimiser, shape) for optimiser in optimisers]
    first = _resume(directory, model, optimisers, schedules)
    forward = torch.compile(model) if settings.compile else model
    world = World(settings.seed)
    for step in range(first, settings.steps):
        batch = encode_batch(
            world.batch(step * settings.batch_size, settings.batch_size),
            tokenizer,
            config.prefix_length,
        )
        drop = torch.from_numpy(
            np.random.default_rng([settings.seed, step]).random(len(batch.words))
            < settings.caption_dropout
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            losses, read = forward(batch.words, drop, batch.codes)
        emphasised = step < (1 - settings.calm) * settings.steps
        loss = losses.mean()
        if emphasised:
            weight = (
                1
                + (settings.object_weight - 1) * batch.touched
                + (settings.onset_weight - settings.object_weight) * batch.onset
            )
            told = batch.told.masked_fill(drop[:, None], UNTOLD)
            loss = (losses * weight).sum() / weight.sum() + settings.readout * readout_loss(
                read, told
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        if report and step % 20 == 0:
            onset, all_read = losses[batch.onset].mean(), readout_loss(read, batch.told)
            values = {"loss": losses.mean(), "onset_loss": onset, "readout": all_read}
            report({name: value.item() for name, value in values.items()}, step)
        if (step + 1) % settings.save_every == 0:
            _save(directory, step + 1, model, optimisers, schedules)
    return model.eval(), measure_target(model, tokenizer, World(settings.seed + 1))


def _start_from(directory: Path, model: TargetModel) -> None:
    """Load the text encoder and the target that an earlier build left in `directory`."""
    model.text.load_state_dict(load_text_encoder(directory / "text_encoder").state_dict())
    model.network.load_state_dict(load_target_network(directory / "target").state_dict())


@torch.no_grad()
def measure_target(
    model: TargetModel, tokenizer: VQModel, world: World, count: int = 128
) -> dict[str, float]:
    """Loss in nats per token on unseen scenes, over all tokens and where shapes begin, and what
    captions are worth.
    """
    batch = encode_batch(world.batch(0, count), tokenizer, model.network.config.prefix_length)
    chunks = list(zip(batch.words.split(16), batch.codes.split(16), strict=True))
    told, untold = (
        torch.cat([model(w, torch.full((len(w),), drop), c)[0] for w, c in chunks])
        for drop in (False, True)
    )
    return {
        "validation_loss": told.mean().item(),
        "validation_onset_loss": told[batch.onset].mean().item(),
        "nats_per_image_told_by_captions": (untold - told).sum(-1).mean().item(),
    }


def _save(
    directory: Path, step: int, model: nn.Module, optimisers: list[Any], schedules: list[Any]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimisers": [o.state_dict() for o in optimisers],
    }
    torch.save(
        state | {"schedules": [s.state_dict() for s in schedules]}, directory / "checkpoint.tmp"
    )
    os.replace(directory / "checkpoint.tmp", directory / "checkpoint.pt")


def _resume(directory: Path, model: nn.Module, optimisers: list[Any], schedules: list[Any]) -> int:
    path = directory / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for kind, parts in (("optimisers", optimisers), ("schedules", schedules)):
        for part, saved in zip(parts, state[kind], strict=True):
            part.load_state_dict(saved)
    log.info("continuing at step %d of %s", state["step"], directory)
    return int(state["step"])
