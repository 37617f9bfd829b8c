"""Teacher forcing: the frozen target's hidden states at every token of an image, and the inputs
from which a draft learns to predict them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tempera.decoding.random_streams import key
from tempera.drafters.draft_network import shifted
from tempera.targets.attention import SharedMask
from tempera.targets.masks import causal_mask
from tempera.targets.transformer import TransformerTarget


@dataclass(frozen=True)
class TeacherForcedBatch:
    """Whole images under teacher forcing; S = T + length − 1 positions, prefix first.

    Attributes:
        embeds: embeddings of the condition tokens and of all image tokens but the last, [R, S, H].
        hidden: the target's hidden states at these positions, [R, S, H]. The state at T − 1 + i
            predicts image token i.
        previous: hidden states one position earlier and, behind each, the inputs of the K layers
            that the draft reads, [R, S, (1 + K)·H]; 0 before the first and on padding. The draft
            reads them together with `embeds`.
        mask: additive attention mask, [R, 1, S, S].
        rotation: rotary embedding of all positions, see `rotary.rotate`, float32 [2, 1, S,
            D].
        real: False on padded prefix tokens, bool [R, T].
        start: T − 1, the first position that predicts an image token.
    """

    embeds: Tensor
    hidden: Tensor
    previous: Tensor
    mask: Tensor
    rotation: Tensor
    real: Tensor
    start: int

    def before(self, hidden: Tensor) -> Tensor:
        """Shift hidden states that the draft predicted, [R, S, H], by one position, as in
        `previous`, with zeros for the features of layers: [R, S, (1 + K)·H].
        """
        features = self.previous.shape[-1] - hidden.shape[-1]
        return F.pad(shifted(hidden[:, :-1], self.real), (0, features))

    def unrolled(
        self, states: Sequence[Tensor], visible: Tensor | None
    ) -> tuple[Tensor | None, Tensor, SharedMask | None, Tensor | None]:
        """Concatenate K copies of the sequence: copy k is what a draft reads k steps after its
        root, k = 0 … K − 1. This is the context alignment of HASS (Zhang et al. 2024, arXiv
        2408.15766) and EAGLE-3's training-time test, without HASS's loss on the most probable
        tokens; and, for a draft of K slots (`DraftNetwork.slots`), the attention of P-EAGLE (arXiv
        2602.01469), where copy k is slot k and has no states.

        In copy k a token reads states[k] and attends as in drafting: to all tokens before its root
        in copy 0, and to the token j steps after its root in copy j where `visible[k, j]`.

        Args:
            states: tensors like `previous`: the true hidden states, the draft's predictions from
                them, the predictions from those, and so on.
            visible: who sees whom among a root and what follows it, bool [K, K]; None if no layer
                attends, so that states alone are read (`DraftNetwork.visible`).

        Returns:
            arguments of `DraftNetwork.forward`, numbers in float32: embeddings of the K copies,
            [R, K·S, H]; their states, one after another; the mask of K·S tokens; and their rotary
            embedding, [2, 1, K·S, D].
        """
        hidden = torch.cat(list(states), 1).float()
        if visible is None:
            return None, hidden, None, None
        copies = len(visible)
        length = self.embeds.shape[1]
        indices = torch.arange(length, device=self.embeds.device)
        steps = torch.arange(copies, device=self.embeds.device)
        root = indices - steps[:, None]  # of a token of a copy, [K, S]
        read = (root[:, :, None, None] == root) & visible.to(root.device)[:, None, :, None]
        read[:, :, 0] |= root[:, :, None] > indices
        padding = F.pad(~self.real, (0, length - self.real.shape[1]))
        return (
            self.embeds.float().repeat(1, copies, 1),
            hidden,
            SharedMask(read.flatten(2).flatten(0, 1), padding.repeat(1, copies)),
            self.rotation.repeat(1, 1, copies, 1),
        )


@torch.no_grad()
def teach(
    target: TransformerTarget,
    captions: list[str],
    codes: Tensor,
    drop: Tensor,
    features: tuple[int, ...] = (),
) -> TeacherForcedBatch:
    """One forward pass of the target over whole images.

    Args:
        target: the frozen target.
        captions: one per image.
        codes: image tokens, int64 [R, length].
        drop: rows whose caption is replaced by the null condition, bool [R].
        features: layers whose inputs the draft reads; see `DraftNetwork`.
    """
    codes = codes.to(target.device)
    drop = drop.to(target.device)
    condition, real = target.conditioner(captions)
    prefix, real = target.network.embed_prefix(
        condition.to(target.device), real.to(target.device), drop
    )
    embeds = torch.cat([prefix, target.head.embed(codes[:, :-1])[: len(codes)]], 1)
    mask = causal_mask(real, embeds.shape[1], target.dtype)
    decoder = target.network.model
    start = prefix.shape[1] - 1
    rotation = decoder.rotary.table(embeds.shape[1], prefix.shape[1], target.device)[:, None]
    read = decoder(embeds, mask, rotation.to(embeds), features=features)
    hidden = read[..., : embeds.shape[-1]]
    previous = shifted(read[:, :-1], real)
    return TeacherForcedBatch(embeds, hidden, previous, mask, rotation, real, start)


def add_noise(hidden: Tensor, seed: int, positions: list[int], amplitude: float) -> Tensor:
    """Add uniform noise in [−amplitude, amplitude] to hidden states [R, S, …]. Row r belongs to
    image r mod n of the n images; an image's noise depends only on the seed and its number.
    """
    if not amplitude:
        return hidden
    generator = torch.Generator(hidden.device)
    noise = torch.empty_like(hidden, dtype=torch.float32)
    for image, position in enumerate(positions):
        generator.manual_seed(key(seed, f"noise/{position}"))
        for row in noise[image :: len(positions)]:
            row.uniform_(-amplitude, amplitude, generator=generator)
    return hidden + noise.to(hidden.dtype)


def null_conditioned(seed: int, positions: list[int], probability: float) -> Tensor:
    """Which images lose their condition, bool [R]; depends only on the seed and their numbers."""
    chances = [(key(seed, f"drop/{position}") % 2**32) / 2**32 for position in positions]
    return torch.tensor([chance < probability for chance in chances])
