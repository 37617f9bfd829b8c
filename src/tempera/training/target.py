"""Training of the embedded target: a tiny LlamaGen and its text encoder, jointly, on world images encoded by the embedded tokenizer."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempera.data.world import Sample, World, object_mask
from tempera.targets.embedded import TextEncoder, tokenize
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.training.anneal import trapezoid
from tempera.vq import VQModel

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


@dataclass(frozen=True)
class TargetTraining:
    """How the target is trained.

    Attributes:
        object_weight: loss weight of tokens that touch a shape (they are few and carry the meaning); 1 in the last `calm` share of steps,
            so that the final model is calibrated.
        caption_dropout: share of captions replaced by the null caption, for guidance.
        matrix_lr: Muon's learning rate for the decoder's matrices; `lr` is AdamW's for everything else.
    """

    steps: int = 2800
    batch_size: int = 16
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    weight_decay: float = 0.02
    warmup: int = 60
    caption_dropout: float = 0.1
    object_weight: float = 2.5
    calm: float = 0.3
    seed: int = 0
    save_every: int = 100
    compile: bool = True


class TargetModel(nn.Module):
    """The two networks that are trained together."""

    def __init__(self, config: LlamaGenConfig, codebook: Tensor) -> None:
        super().__init__()
        assert config.caption_dim is not None
        self.text = TextEncoder(config.prefix_length, config.caption_dim)
        self.network = LlamaGen(config)
        _initialise(self.network, codebook)

    def forward(self, words: Tensor, drop: Tensor, codes: Tensor) -> Tensor:
        """Words [B, T], drop [B], codes [B, length] → loss of every token [B, length] in nats."""
        features, keep = self.text(words)
        _, hidden, _ = self.network(features, keep, drop, codes)
        logits = self.network.lm_head(hidden[:, self.network.config.prefix_length - 1 :])
        return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten(), reduction="none").view(codes.shape)


def _initialise(network: LlamaGen, codebook: Tensor) -> None:
    """Start token embedding and head as random projections of the codebook, so that similar codes start out similar."""
    width = network.config.hidden_size
    for weight, scale in ((network.model.embed_tokens.weight, 0.3), (network.lm_head.weight, width**-0.5)):
        projected = codebook @ torch.randn(codebook.shape[1], width)
        weight.data.copy_(scale * (projected + 0.3 * torch.randn_like(projected)))
    for layer in network.model.layers:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.data.mul_((2 * network.config.num_hidden_layers) ** -0.5)


def _optimisers(model: TargetModel, settings: TargetTraining) -> list[torch.optim.Optimizer]:
    """Muon for the decoder layers' matrices, AdamW for embeddings, norms, head and text encoder."""
    matrices = [p for p in model.network.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def encode_batch(samples: list[Sample], tokenizer: VQModel, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples → word ids [B, T], codes [B, h·w], and which tokens touch a shape, bool [B, h·w]."""
    images = torch.from_numpy(np.stack([s.image for s in samples])).permute(0, 3, 1, 2) * 2 - 1
    factor = tokenizer.config.factor
    touched = torch.from_numpy(np.stack([object_mask(s.scene) for s in samples])).float().unsqueeze(1)
    with torch.no_grad():
        codes = tokenizer.encode(images).flatten(1)
    return tokenize([s.caption for s in samples], length), codes, F.max_pool2d(touched, factor).flatten(1) > 0


def train_target(
    settings: TargetTraining,
    tokenizer: VQModel,
    directory: Path,
    config: LlamaGenConfig = TINY_TARGET,
    report: Callable[[dict[str, float], int], None] | None = None,
) -> tuple[TargetModel, dict[str, float]]:
    """Train, saving to `directory`/checkpoint.pt as it goes and continuing from there; returns the model and its metrics on unseen scenes."""
    torch.manual_seed(settings.seed)
    model = TargetModel(config, tokenizer.quantize.codebook)
    optimisers = _optimisers(model, settings)
    shape = trapezoid(settings.warmup, settings.steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimiser, shape) for optimiser in optimisers]
    first = _resume(directory, model, optimisers, schedules)
    forward = torch.compile(model) if settings.compile else model
    world = World(settings.seed)
    for step in range(first, settings.steps):
        words, codes, touched = encode_batch(world.batch(step * settings.batch_size, settings.batch_size), tokenizer, config.prefix_length)
        drop = torch.from_numpy(np.random.default_rng([settings.seed, step]).random(len(words)) < settings.caption_dropout)
        losses = forward(words, drop, codes)
        emphasis = settings.object_weight if step < (1 - settings.calm) * settings.steps else 1.0
        weight = 1 + (emphasis - 1) * touched.float()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        if report and step % 20 == 0:
            report({"loss": losses.mean().item(), "object_loss": losses[touched].mean().item()}, step)
        if (step + 1) % settings.save_every == 0:
            _save(directory, step + 1, model, optimisers, schedules)
    return model.eval(), measure_target(model, tokenizer, World(settings.seed + 1))


@torch.no_grad()
def measure_target(model: TargetModel, tokenizer: VQModel, world: World, count: int = 128) -> dict[str, float]:
    """Loss in nats per token on unseen scenes, over all tokens and over those that touch a shape."""
    words, codes, touched = encode_batch(world.batch(0, count), tokenizer, model.network.config.prefix_length)
    drop = torch.zeros(16, dtype=torch.bool)
    losses = torch.cat([model(w, drop[: len(w)], c) for w, c in zip(words.split(16), codes.split(16), strict=True)])
    return {"validation_loss": losses.mean().item(), "validation_object_loss": losses[touched].mean().item()}


def _save(directory: Path, step: int, model: nn.Module, optimisers: list[Any], schedules: list[Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers]}
    torch.save(state | {"schedules": [s.state_dict() for s in schedules]}, directory / "checkpoint.tmp")
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
    log.info("continuing the target's training at step %d", state["step"])
    return int(state["step"])
