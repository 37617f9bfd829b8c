"""Parallel drafting: one pass of the draft network gives the distributions of all depths.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size, r rank of the Markov head.
"""

import copy
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.trees import Frontier, Tree
from tempera.drafters.cache_slots import last_emitted
from tempera.drafters.draft_network import DraftDtype, torch_dtype, trained_or_random
from tempera.drafters.eagle_network import shifted
from tempera.drafters.hidden_state_draft import HiddenStateDraft
from tempera.drafters.parallel_network import ParallelModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import DraftTooShort
from tempera.targets.masks import causal_mask
from tempera.targets.transformer import TransformerTarget


class ParallelDraft(HiddenStateDraft):
    """The distributions of a `ParallelModel`, for chains and static trees.

    The pass that reruns the last round's tokens continues with masks right behind each row's root,
    and its outputs from the root on are the slots' hidden states. A row that emitted fewer tokens
    than another has more masks; those past the last slot have no effect. `expand` runs no layer: it
    adds the Markov head's correction to the logits of its depth, so siblings that follow different
    tokens differ. Every token is drawn from the q that is returned, given its parent, hence the
    standard acceptance is exact.

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
        model: ParallelModel,
        target: TransformerTarget,
        depth: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.slots = model.slots
        self._set_depth(depth)
        super().__init__(model, target, dtype)
        self._mask_embed, self._mask_hidden = (
            vector.detach().to(target.device, target.dtype)
            for vector in (model.mask_embed, model.mask_hidden)
        )
        self._markov = self._markov_tables(model, target)

    def _set_depth(self, depth: int) -> None:
        if depth > self.slots:
            raise DraftTooShort(self.slots, depth)
        self.depth = depth

    @override
    def for_depth(self, depth: int) -> Self:
        """The draft with another number of slots in its pass, and a cache of its own; both share
        their weights.

        Raises:
            DraftTooShort: the draft was trained for shorter chains.
        """
        other = copy.copy(self)
        other._set_depth(depth)
        other._forget()
        return other

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the prefix and the slots of the first round; the target must have started a batch of
        the same prompts.
        """
        session, prompt = self.session, self.session.prompt
        self._sampling = self.head.sampling.drafting if self.greedy else None
        if self._allocate(2 * self.depth):
            self._steps = torch.arange(self.depth + 1, device=session.device)
            self._ahead = torch.arange(self.depth, device=session.device)
        rows, count = prompt.rows, prompt.prefix + self.depth - 1
        self._blank = (
            self._mask_embed.expand(rows, self.depth - 1, -1),
            self._mask_hidden.expand(rows, self.depth - 1, -1),
        )
        positions = torch.arange(count, device=session.device).expand(rows, -1)
        self.cache.place(positions, count)
        mask = causal_mask(prompt.keep, count, self.dtype)
        hidden = shifted(session.prefix_hidden[..., : self._width], prompt.keep)
        inputs = self._continued(prompt.embeds, hidden)
        states = self._forward(*inputs, mask, *self._rotate(positions), self.cache.write_index)
        self._slots = states[:, prompt.prefix - 1 :]

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        self._places.start()
        if self._true is not None:
            self._slots = self._replay(*self._true)
            self._true = None
        self._logits = self.head.guided_logits(self._slots)
        return self._distribution(self._logits[:, :1], 0)[:, 0]

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
        return self._distribution(logits, level.depth)

    def _replay(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        """Rerun the last round's tokens with their true hidden states, and masks behind them;
        returns the slots' hidden states, [R, L, H].
        """
        slots, mask = self._places.decided(tokens.shape[1] + self.depth - 1, emitted)
        real = self.session.prompt.by_row(self._steps < emitted[:, None])[..., None]
        inputs = self._continued(
            torch.where(real, self.head.embed(tokens), self._mask_embed),
            torch.where(real, hidden, self._mask_hidden),
        )
        states = self._step(*inputs, mask, *self._rotate(slots), self.cache.write_index)
        return last_emitted(states, emitted, self.depth)

    def _continued(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of real tokens and of the L − 1 masks behind them."""
        return torch.cat([embeds, self._blank[0]], 1), torch.cat([hidden, self._blank[1]], 1)

    def _distribution(self, logits: Tensor, depth: int) -> Tensor:
        """From logits after guidance, `depth` tokens after the roots: float32 [B, P, V]."""
        ahead = self._ahead[depth : depth + 1]
        lengths = self.session.prompt.lengths
        return self.head.distribution_of(logits, lengths, ahead, self._sampling)

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
    length = max(2, tree.max_depth)
    model = trained_or_random(
        path, target, ParallelModel.from_pretrained, ParallelModel.of, length=length
    )
    draft = ParallelDraft(model, target, tree.max_depth, torch_dtype(dtype))
    return StaticTreeDrafter(draft, tree)
