"""Parallel drafting: one pass of the draft network gives the distributions of all depths, each from
a *slot* of its own.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size, r rank of the Markov head.
"""

from typing import Any

import torch
from torch import Tensor

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import InnerNodes
from tempera.drafters.draft_pass import DraftPass
from tempera.targets.transformer import TransformerTarget


class SlotDraft(DraftModel):
    """The distributions of a network of several slots, for chains and static trees. Subclasses run
    its pass, in `begin` and `observe`.

    `expand` runs no layer: it adds the Markov head's correction, if there is one, to the logits of
    its depth, so siblings that follow different tokens differ. Every token is drawn from the q that
    is returned, given its parent, hence the standard acceptance is exact.

    Args:
        model: the draft network, a `parallel_network.SlotNetwork`.
        target: the target; start each batch on it first.
        dtype: see `DraftPass`.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(
        self, model: Any, target: TransformerTarget, dtype: torch.dtype | None = None
    ) -> None:
        self.run = DraftPass(model, target, dtype)
        self.identity = model.identity
        self.longest: int = model.slots
        self._markov = _markov_tables(model, target)
        self._slots = torch.empty(0)  # their hidden states, [R, L, H]

    def roots(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The draft's distribution after each row's root, float32 [B, V], and the logits of all
        slots, after guidance, [B, L, V].
        """
        logits = self.run.logits(self._slots)
        return self.run.distribution(logits[:, :1], 0)[:, 0], logits

    def expand(self, above: Tensor, tokens: Tensor, level: InnerNodes) -> tuple[Tensor, Tensor]:
        """The draft's distributions after the inner nodes of a level, float32 [B, P, V], and the
        logits of all slots.
        """
        logits = above[:, level.depth : level.depth + 1]
        if self._markov is None:
            logits = logits.expand(-1, tokens.shape[1], -1)
        else:
            first, second = self._markov
            logits = logits + first[tokens] @ second
        return self.run.distribution(logits, level.depth), above


class ParallelDraft(SlotDraft):
    """The distributions of a `ParallelModel`; arguments and errors are those of `SlotDraft`.

    The pass over the last round's tokens continues with masks right behind each row's root, and its
    outputs from the root on are the slots' hidden states. A row that emitted fewer tokens than
    another has more masks; those past the last slot have no effect.
    """

    def __init__(
        self, model: Any, target: TransformerTarget, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, target, dtype)
        self._mask_embed = model.mask_embed.detach().to(target.device)
        self._mask_hidden = model.mask_hidden.detach().to(target.device)
        self._ahead = torch.arange(model.slots + 1, device=target.device)

    def begin(
        self, prompts: list[str], nodes: int, sequences: Sequences, rows: Tensor | None = None
    ) -> None:
        """Run the prefix; the target must have started the same prompts."""
        prefix = self.run.started
        self.depth = sequences.depth
        self.greedy = self.run.head.sampling.greedy
        hidden = self.run.before_prefix(prefix.mask)
        behind = self._with_masks(prefix.embeds, hidden)
        states = self.run.prefix(*behind, 2 * self.depth, prefix.mask)
        self._slots = persistent(self._slots, states[:, -self.depth :], prefix.rows)

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Run the emitted tokens with the true hidden states before them, and the masks."""
        tokens = verdict.tokens
        emitted = sequences.emitted
        real = self._ahead[: tokens.shape[1]] < emitted[:, None]
        real = self.run.prompt.by_row(real)[..., None]
        embeds = self.run.head.embed(tokens)
        hidden = self.run.before_emitted(draft, verdict, scores)
        embeds = torch.where(real, embeds, self._mask_embed.to(embeds))
        hidden = torch.where(real, hidden, self._mask_hidden.to(hidden))
        behind = self._with_masks(embeds, hidden)
        self._slots.copy_(self.run.rerun(*behind, emitted, self.depth))

    def _with_masks(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings and hidden states of real tokens, and of L − 1 masks behind them."""
        masks = len(embeds), self.depth - 1, -1
        mask_embeds = self._mask_embed.to(embeds).expand(*masks)
        mask_hidden = self._mask_hidden.to(hidden).expand(*masks)
        return torch.cat([embeds, mask_embeds], 1), torch.cat([hidden, mask_hidden], 1)


@torch.no_grad()
def _markov_tables(model: Any, target: TransformerTarget) -> tuple[Tensor, Tensor] | None:
    """W1 [V, r] and the transpose of W2, [r, V]; None if the slots are independent."""
    if model.markov_out is None:
        return None
    tokens = torch.arange(target.vocab_size, device=target.device)
    embeds = target.head.embed(tokens)[: len(tokens)]
    first = model.markov(embeds.to(model.mask_embed.dtype)).to(embeds)
    columns = model.markov_out.weight.T.to(embeds)
    return first, target.head.directions(columns)
