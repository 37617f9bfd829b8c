"""Training of the smaller MAR that drafts for the shipped one: it starts from blocks of its target
and learns its kernels.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shapes_recipe.mar import (
    TINY_MAR,
    MARSettings,
    MaskedBatch,
    averaged,
    divergence_of,
    encode_scenes,
    unseen_batches,
)
from tempera.continuous.diffusion import TRAINING_STEPS, Kernel, NoiseSchedule
from tempera.continuous.mar import MAR, MARConfig
from tempera.image_tokenizers.kl import KLModel
from tempera.shapes.world import World

TINY_DRAFT = replace(TINY_MAR, depth=2)


@dataclass
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
    network = MAR(config)
    weights = target.state_dict()
    depths = {
        "encoder_blocks": (config.depth, target.config.depth),
        "decoder_blocks": (config.depth, target.config.depth),
        "res_blocks": (config.head_depth, target.config.head_depth),
    }

    def source(name: str) -> str:
        """The target's weight that the weight of this name starts from."""
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part in depths:
                depth, target_depth = depths[part]
                block = int(parts[place + 1]) * (target_depth - 1) / max(depth - 1, 1)
                parts[place + 1] = str(round(block))
        return ".".join(parts)

    network.load_state_dict({name: weights[source(name)] for name in network.state_dict()})
    return network


def distil_mar(
    settings: MARDistillation,
    tokenizer: KLModel,
    run: Path,
    target: MAR,
    config: MARConfig,
) -> MAR:
    """Train a draft for `target`, from where `run` left off, and return the averaged network."""
    latents = encode_scenes(
        World(settings.seed, texture="clouds"), settings.scenes, tokenizer, settings.size
    )
    draft = pruned(target.requires_grad_(False), config)

    def losses(step: int) -> dict[str, Tensor]:
        chosen = torch.randint(len(latents.classes), (settings.batch_size,))
        tokens = latents.draw(chosen, tokenizer)
        batch = MaskedBatch.drawn(tokens, latents.classes[chosen], settings.mask_std)
        return {"loss": kernel_divergence(draft, target, batch, settings)}

    return averaged(draft, losses, settings, run)


def kernel_divergence(
    draft: MAR, target: MAR, batch: MaskedBatch, settings: MARDistillation
) -> Tensor:
    """KL(P‖Q) of the target's reverse kernel P from the draft's Q, at some stages of sampling a
    token, in nats a number: what a path of S stages gives up is S·D times as much.

    Both are guided as in sampling: noise u + s(c − u), the variance of the row with a class, with
    one s for every image between 1 and the largest one. The classes that `batch.drop` leaves out
    are not left out here.
    """
    repeats = settings.repeats
    sampling = settings.sampling
    scale = 1 + (settings.guidance - 1) * torch.rand(len(batch.labels))
    start = batch.hidden.flatten(0, 1).repeat(repeats, 1)
    stage = torch.randint(len(sampling.times), (len(start),))
    signal = NoiseSchedule(TRAINING_STEPS).alphas_cumprod[sampling.times[stage]].unsqueeze(-1)
    x = (signal.sqrt() * start + (1 - signal).sqrt() * torch.randn_like(start)).float()
    by_token = scale.repeat_interleave(batch.hidden.shape[1]).repeat(repeats).unsqueeze(-1)

    def output(network: MAR, dropped: bool) -> Tensor:
        vectors = batch.vectors(network, torch.full_like(batch.drop, dropped)).flatten(0, 1)
        predicted: Tensor = network.head(x, sampling.times[stage], vectors.repeat(repeats, 1))
        return predicted.float()

    def kernel(network: MAR) -> Kernel:
        conditional, place = output(network, dropped=False).chunk(2, dim=-1)
        null, _ = output(network, dropped=True).chunk(2, dim=-1)
        guided = null + by_token * (conditional - null)
        return sampling.kernel(torch.cat([guided, place], dim=-1), x, stage)

    return divergence_of(kernel(target), kernel(draft)).mean()


@torch.no_grad()
def measure_draft(
    draft: MAR, target: MAR, tokenizer: KLModel, settings: MARDistillation
) -> dict[str, float]:
    """The divergence of a token's path, in nats, on unseen scenes."""
    divergences = []
    for batch in unseen_batches(tokenizer, settings):
        divergences.append(kernel_divergence(draft, target, batch, settings))
    numbers = settings.denoising_steps * draft.config.token_channels
    return {"validation_path_divergence": numbers * torch.stack(divergences).mean().item()}
