"""Teacher forcing: what the frozen target thinks at every token of an image, and what a draft is given to imitate it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.eagle_model import shifted
from tempera.streams import key
from tempera.targets.adapter import TransformerTarget, conditioned
from tempera.targets.llamagen import causal_mask


@dataclass(frozen=True)
class Lesson:
    """Whole images under teacher forcing; S = T + length − 1 positions, prefix first.

    Attributes:
        embeds: embeddings of the condition tokens and of all image tokens but the last, [R, S, H].
        hidden: the target's hidden states there, [R, S, H]. The one at T − 1 + i predicts image token i.
        previous: hidden states one position earlier, 0 before the first and on padding, [R, S, H]: what the draft reads beside `embeds`.
        mask: additive attention mask, [R, 1, S, S].
        start: T − 1, the first position that predicts an image token.
    """

    embeds: Tensor
    hidden: Tensor
    previous: Tensor
    mask: Tensor
    start: int

    @property
    def positions(self) -> Tensor:
        """Position of every input, int64 [R, S]."""
        rows, length = self.embeds.shape[:2]
        return torch.arange(length, device=self.embeds.device).expand(rows, length)


@torch.no_grad()
def teach(target: TransformerTarget, captions: list[str], codes: Tensor, drop: Tensor) -> Lesson:
    """One forward pass of the target over whole images.

    Args:
        target: the frozen target.
        captions: one per image.
        codes: image tokens, int64 [R, length].
        drop: rows whose caption is replaced by the null condition, bool [R].
    """
    codes, drop = codes.to(target.device), drop.to(target.device)
    condition, keep = (part.to(target.device) for part in target.conditioner(captions))
    prefix, keep = conditioned(target.network, condition, keep, drop)
    embeds = torch.cat([prefix, target.embed(codes[:, :-1])[: len(codes)]], 1)
    mask = causal_mask(keep, embeds.shape[1], target.dtype)
    positions = torch.arange(embeds.shape[1], device=target.device).expand(len(codes), -1)
    hidden = target.network.model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    return Lesson(embeds, hidden, shifted(hidden[:, :-1], keep), mask, prefix.shape[1] - 1)


def nudge(hidden: Tensor, seed: int, positions: list[int], amplitude: float) -> Tensor:
    """Add uniform noise in ± amplitude to each image's states [R, S, H]; the noise of an image depends on (seed, its number) alone."""
    if not amplitude:
        return hidden
    generator = torch.Generator(hidden.device)
    noise = torch.empty_like(hidden, dtype=torch.float32)
    for row, position in zip(noise, positions, strict=True):
        row.uniform_(-amplitude, amplitude, generator=generator.manual_seed(key(seed, f"noise/{position}")))
    return hidden + noise.to(hidden.dtype)


def dropped(seed: int, positions: list[int], probability: float) -> Tensor:
    """Which images become null-conditioned, bool [R]; depends on (seed, an image's number) alone."""
    chances = [(key(seed, f"drop/{position}") % 2**32) / 2**32 for position in positions]
    return torch.tensor([chance < probability for chance in chances])
