"""Training of the smaller MAR that drafts for the shipped one: it starts from blocks of its target
and learns its kernels.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tempera.continuous.diffusion import TRAINING_STEPS, NoiseSchedule
from tempera.continuous.mar import MAR, MARConfig
from tempera.image_tokenizers.kl import KLModel
from tempera.shapes.build.mar import (
    TINY_MAR,
    Latents,
    MARSettings,
    MaskedBatch,
    averaged_training,
    computation,
    unseen_batches,
)
from tempera.shapes.build.record import LogMetrics

TINY_DRAFT = replace(TINY_MAR, depth=2)


@dataclass(frozen=True)
class MARDistillation(MARSettings):
    """How the draft learns the kernels of its target.

    Attributes:
        repeats: stages of sampling that a token is trained at, for one pass of the transformers.
        guidance: kernels are compared under guidance, its scale uniform from 1 to this.
    """

    size: str | None = "large"
    steps: int = 3000
    repeats: int = 2
    save_every: int = 250
    guidance: float = 3.0


def pruned(target: MAR, config: MARConfig) -> MAR:
    """A network of fewer blocks with weights of the target's: the first, the last and evenly spaced
    ones between them, as DistilBERT starts (Sanh et al. 2019).

    Args:
        target: of the same widths.
        config: sizes of the new network.
    """
    network, weights = MAR(config), target.state_dict()
    depths = {
        "encoder_blocks": (config.depth, target.config.depth),
        "decoder_blocks": (config.depth, target.config.depth),
        "res_blocks": (config.head_depth, target.config.head_depth),
    }

    def source(name: str) -> str:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part in depths:
                mine, theirs = depths[part]
                block = int(parts[place + 1]) * (theirs - 1) / max(mine - 1, 1)
                parts[place + 1] = str(round(block))
        return ".".join(parts)

    network.load_state_dict({name: weights[source(name)] for name in network.state_dict()})
    return network


def distil_mar(
    settings: MARDistillation,
    tokenizer: KLModel,
    latents: Latents,
    directory: Path,
    target: MAR,
    config: MARConfig,
    report: LogMetrics | None = None,
) -> MAR:
    """Train a draft for `target`, from where `directory` left off, and return the averaged
    network.
    """
    target = target.requires_grad_(False)

    def losses(network: MAR, step: int) -> dict[str, Tensor]:
        chosen = torch.randint(len(latents.classes), (settings.batch_size,))
        batch = MaskedBatch.drawn(
            latents.draw(chosen, tokenizer), latents.classes[chosen], settings.shown
        )
        return {"loss": _divergence(network, target, batch, settings)}

    return averaged_training(pruned(target, config), losses, settings, directory, report)


def kernel_divergence(
    draft: MAR,
    target: MAR,
    batch: MaskedBatch,
    scale: Tensor,
    taken: NoiseSchedule,
    repeats: int = 1,
) -> Tensor:
    """KL(P‖Q) of the target's reverse kernel P from the draft's Q, at `repeats` stages of `taken` a
    token, in nats a number: what a path of S stages gives up is S·D times as much.

    Both are guided as in sampling: noise u + s(c − u), the variance of the row with a class.

    Args:
        draft, target: the networks.
        batch: images and what is shown of them; `drop` is not used.
        scale: s of every image, [B].
        taken: the stages of sampling.
        repeats: stages a token.
    """
    start = batch.hidden.flatten(0, 1).repeat(repeats, 1)
    stage = torch.randint(len(taken.times), (len(start),))
    kept = NoiseSchedule(TRAINING_STEPS).kept[taken.times[stage]].unsqueeze(-1)
    x = (kept.sqrt() * start + (1 - kept).sqrt() * torch.randn_like(start)).float()
    by_token = scale.repeat_interleave(batch.hidden.shape[1]).repeat(repeats).unsqueeze(-1)
    kernels = []
    for network in (target, draft):
        (c, place), (u, _) = (
            network.head(x, taken.times[stage], vectors).float().chunk(2, -1)
            for vectors in (
                batch.vectors(network, torch.full_like(batch.drop, dropped))
                .flatten(0, 1)
                .repeat(repeats, 1)
                for dropped in (False, True)
            )
        )
        kernels.append(taken.kernel(torch.cat([u + by_token * (c - u), place], -1), x, stage))
    true, mine = kernels
    ratio = (true.std / mine.std).square()
    gap = ((true.mean - mine.mean) / mine.std).square()
    return 0.5 * (ratio - 1 - ratio.log() + gap).mean()


@torch.no_grad()
def measure_draft(
    draft: MAR, target: MAR, tokenizer: KLModel, settings: MARDistillation, count: int = 512
) -> dict[str, float]:
    """The divergence of a token's path, in nats, on unseen scenes."""
    divergences = []
    for batch in unseen_batches(tokenizer, settings, count):
        with computation(bf16=False):
            divergences.append(_divergence(draft, target, batch, settings))
    numbers = settings.denoising_steps * draft.config.token_channels
    return {"validation_path_divergence": numbers * torch.stack(divergences).mean().item()}


def _divergence(draft: MAR, target: MAR, batch: MaskedBatch, settings: MARDistillation) -> Tensor:
    """At guidances drawn between 1 and the largest one."""
    scale = 1 + (settings.guidance - 1) * torch.rand(len(batch.labels))
    return kernel_divergence(draft, target, batch, scale, settings.taken, settings.repeats)
