"""Parallel drafting: one pass of the draft network gives the distributions of all depths, each from
a *slot* of its own.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size, r rank of the Markov head.
"""

import copy
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.trees import Frontier, Tree
from tempera.drafters.draft_network import DraftDtype, DraftNetwork, torch_dtype
from tempera.drafters.hidden_state_draft import HiddenStateDraft
from tempera.drafters.parallel_network import ParallelModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import DraftTooShort
from tempera.targets.transformer import TransformerTarget


class SlotDraft(HiddenStateDraft):
    """Base of draft models whose network has a slot for every depth, for chains and static trees.

    One pass a round gives the slots' hidden states. `expand` runs no layer. A slot's distribution
    does not depend on the drafted tokens but through the Markov head, if there is one. Every token
    is drawn from the q that is returned, given its parent, hence the standard acceptance is exact.

    Args:
        model: the draft network.
        target: the target; start each batch on it first.
        depth: L, of the deepest node.
        dtype: see `HiddenStateDraft`.

    Raises:
        TemperaError: the draft does not belong to the target, or was trained for shorter chains.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        depth: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, target, dtype)
        self.depth = self._possible(depth)
        self._markov: tuple[Tensor, Tensor] | None = None  # W1 [V, r] and W2 transposed, [r, V]
        self._logits = torch.empty(0)  # of the slots, after guidance, [B, L, V]

    def _possible(self, depth: int) -> int:
        """The depth, if the network can draft as far."""
        if depth > self.network.slots:
            raise DraftTooShort(self.network.slots, depth)
        return depth

    @override
    def for_depth(self, depth: int) -> Self:
        """The draft with another number of slots in its pass; both share weights and cache, so they
        take turns.

        Raises:
            DraftTooShort: the draft was trained for shorter chains.
        """
        other = copy.copy(self)
        other.depth = self._possible(depth)
        return other

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        self._logits = self._predict()
        return self._distribution(self._logits[:, :1], self._ahead[:1])[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, with tokens int64 [B, P]:
        float32 [B, P, V].
        """
        logits = self._logits[:, level.depth : level.depth + 1]
        if self._markov is None:
            logits = logits.expand(-1, tokens.shape[1], -1)
        else:
            first, second = self._markov
            logits = logits + first[tokens] @ second
        return self._distribution(logits, self._ahead[level.depth : level.depth + 1])


class ParallelDraft(SlotDraft):
    """The distributions of a `ParallelModel`.

    The pass that reruns the last round's tokens continues with masks right behind each row's root,
    and its outputs from the root on are the slots' hidden states. A row that emitted fewer tokens
    than another has more masks; those past the last slot have no effect. `expand` adds the Markov
    head's correction to the logits of its depth, so siblings that follow different tokens differ.
    Arguments and errors are those of `SlotDraft`.
    """

    def __init__(
        self,
        model: ParallelModel,
        target: TransformerTarget,
        depth: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, target, depth, dtype)
        self._mask = [x.detach().to(target.device) for x in (model.mask_embed, model.mask_hidden)]
        self._markov = self._markov_tables(model, target)

    @override
    def _first(self, nodes: int) -> Tensor:
        prompt = self.session.prompt
        embeds, hidden = self._with_masks(prompt.embeds, self._before_prefix(prompt.keep))
        states = self._run_prefix(embeds, hidden, 2 * self.depth, prompt.keep)
        return states[:, prompt.prefix - 1 :]

    @override
    def _next(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        prompt = self.session.prompt
        real = prompt.by_row(self._ahead[: tokens.shape[1]] < emitted[:, None])[..., None]
        embeds, hidden = (
            torch.where(real, x, mask.to(x))
            for x, mask in zip((self.head.embed(tokens), hidden), self._mask, strict=True)
        )
        embeds, hidden = self._with_masks(embeds, hidden)
        return self._rerun(embeds, hidden, emitted, self.depth)

    def _with_masks(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings and hidden states of real tokens, and of L − 1 masks behind them."""
        embed, state = (
            mask.to(embeds).expand(len(embeds), self.depth - 1, -1) for mask in self._mask
        )
        return torch.cat([embeds, embed], 1), torch.cat([hidden, state], 1)

    @torch.inference_mode()
    def _markov_tables(
        self, model: ParallelModel, target: TransformerTarget
    ) -> tuple[Tensor, Tensor] | None:
        """W1 [V, r] and the transpose of W2, [r, V]; None if the slots are independent."""
        if model.markov_out is None:
            return None
        device, dtype = target.device, target.dtype
        tokens = torch.arange(target.vocab_size, device=device)
        embeds = target.head.embed(tokens)[: len(tokens)]
        first = model.markov(embeds.to(model.mask_embed)).to(device, dtype)
        columns = model.markov_out.weight.T.to(device, dtype)
        return first, target.head.directions(columns)


def build_parallel(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The drafter of a trained parallel draft.

    Args:
        path: directory with `config.json` and `model.safetensors`, or `random`.
        target: the target it was trained for.
        tree: static tree drafted every round.
        dtype: see `HiddenStateDraft`.

    Raises:
        TemperaError: the directory contains no valid draft, or one for another target or for
            shorter chains.
    """
    network = ParallelModel.for_target(path, target, length=max(2, tree.max_depth))
    draft = ParallelDraft(network, target, tree.max_depth, torch_dtype(dtype))
    return StaticTreeDrafter(draft, tree)
