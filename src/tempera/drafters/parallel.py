"""Parallel drafting: one pass of the draft network gives the distributions of all depths, each from
a *slot* of its own.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size, r rank of the Markov head.
"""

import copy
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.compiled import kept, static
from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, DraftModel, Scores, Verdict, drafts
from tempera.decoding.trees import Frontier, Tree
from tempera.drafters.draft_files import DraftDtype, draft_to_decode, torch_dtype
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.draft_pass import DraftPass
from tempera.drafters.parallel_network import ParallelModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import DraftTooShort
from tempera.targets.transformer import TransformerTarget

Slots = TypeVar("Slots")


class ParallelDraft(DraftModel):
    """The distributions of a `ParallelModel`, for chains and static trees.

    The pass over the last round's tokens continues with masks right behind each row's root, and its
    outputs from the root on are the slots' hidden states. A row that emitted fewer tokens than
    another has more masks; those past the last slot have no effect. `expand` runs no layer: it adds
    the Markov head's correction, if there is one, to the logits of its depth, so siblings that
    follow different tokens differ. Every token is drawn from the q that is returned, given its
    parent, hence the standard acceptance is exact.

    Args:
        model: the draft network.
        target: the target; start each batch on it first.
        depth: L, of the deepest node.
        dtype: see `DraftPass`.

    Raises:
        TemperaError: the draft does not belong to the target, or was trained for shorter chains.
    """

    def __init__(
        self,
        model: ParallelModel,
        target: TransformerTarget,
        depth: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.run = DraftPass(model, target, dtype)
        self.identity = model.identity
        self.depth = possible_depth(model, depth)
        self._mask_embed = model.mask_embed.detach().to(target.device)
        self._mask_hidden = model.mask_hidden.detach().to(target.device)
        self._markov = _markov_tables(model, target)
        self._ahead = torch.arange(model.slots + 1, device=target.device)
        self._slots = torch.empty(0)  # their hidden states, [R, L, H]

    @override
    def for_depth(self, depth: int) -> Self:
        return at_depth(self, depth)

    def begin(self, prompts: list[str], nodes: int, images: Images) -> None:
        """Run the prefix; the target must have started a batch of the same prompts."""
        prompt = self.run.prompt
        self.greedy = self.run.head.sampling.greedy
        hidden = self.run.before_prefix(prompt.keep)
        behind = self._with_masks(prompt.embeds, hidden)
        states = self.run.prefix(*behind, 2 * self.depth, prompt.keep)
        self._slots = kept(self._slots, states[:, prompt.prefix - 1 :])

    def roots(self, images: Images) -> tuple[Tensor, Tensor]:
        """The draft's distribution after each row's root, float32 [B, V], and the logits of all
        slots, after guidance, [B, L, V].
        """
        logits = self.run.logits(self._slots)
        return self.run.distribution(logits[:, :1], 0)[:, 0], logits

    def expand(self, above: Tensor, tokens: Tensor, level: Frontier) -> tuple[Tensor, Tensor]:
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

    def observe(self, images: Images, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Run the emitted tokens with the true hidden states before them, and the masks."""
        tokens = verdict.tokens
        emitted = images.emitted
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


def possible_depth(network: DraftNetwork, depth: int) -> int:
    """The depth, if the network can draft as far.

    Raises:
        DraftTooShort: the draft was trained for shorter chains.
    """
    if depth > network.slots:
        raise DraftTooShort(network.slots, depth)
    return depth


def at_depth(draft: Slots, depth: int) -> Slots:
    """A copy of a draft of several slots, for trees of this depth; the two take turns."""
    other: Any = copy.copy(draft)
    other.depth = possible_depth(other.run.network, depth)
    return cast(Slots, other)


@torch.no_grad()
def _markov_tables(model: ParallelModel, target: TransformerTarget) -> tuple[Tensor, Tensor] | None:
    """W1 [V, r] and the transpose of W2, [r, V]; None if the slots are independent."""
    if model.markov_out is None:
        return None
    tokens = torch.arange(target.vocab_size, device=target.device)
    embeds = target.head.embed(tokens)[: len(tokens)]
    first = model.markov(embeds.to(model.mask_embed.dtype)).to(embeds)
    columns = model.markov_out.weight.T.to(embeds)
    return static(first), static(target.head.directions(columns))


@drafts(trained_by="parallel")
def build_parallel(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The drafter of a trained parallel draft.

    Args:
        path: directory with `config.json` and `model.safetensors`, or `random`.
        target: the target it was trained for.
        tree: static tree drafted every round.
        dtype: see `draft_pass.DraftPass`.

    Raises:
        TemperaError: the directory contains no valid draft, or one for another target or for
            shorter chains.
    """
    network = draft_to_decode(ParallelModel, path, target, length=max(2, tree.max_depth))
    draft = ParallelDraft(network, target, tree.max_depth, torch_dtype(dtype))
    return StaticTreeDrafter(draft, tree)
