"""EAGLE as a draft model: it drafts a tree level by level from its own predicted hidden states.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size.
"""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Frontier, Tree, take
from tempera.drafters.cache_slots import last_emitted
from tempera.drafters.draft_network import (
    DraftDtype,
    DraftNetwork,
    torch_dtype,
    trained_or_random,
)
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle_network import EagleModel, shifted
from tempera.drafters.hidden_state_draft import HiddenStateDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.targets.masks import causal_mask
from tempera.targets.transformer import TransformerTarget


class EagleDraft(HiddenStateDraft):
    """The distributions of a draft network that drafts from its own predictions, for chains and
    trees: one pass of the network per level.

    Args:
        model: the draft network.
        target: the target; start each batch on it first.
        sampling_of: maps the target's sampling to the draft's; by default `Sampling.drafting`.
        dtype: see `HiddenStateDraft`.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(
        self,
        model: DraftNetwork,
        target: TransformerTarget,
        sampling_of: Callable[[Sampling], Sampling] = attrgetter("drafting"),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, target, dtype)
        self.sampling_of = sampling_of

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the prefix; the target must have started a batch of the same prompts."""
        session, prompt = self.session, self.session.prompt
        sampling = self.sampling_of(self.head.sampling)
        self._sampling = None if sampling is self.head.sampling else sampling
        if self._allocate(nodes):
            self._steps = torch.arange(self.cache.capacity, device=session.device)
        self._zero, self._ahead = self._steps[:1], self._steps[: max(1, nodes)]
        positions = torch.arange(prompt.prefix, device=session.device).expand(prompt.rows, -1)
        self.cache.place(positions, prompt.prefix)
        mask = causal_mask(prompt.keep, prompt.prefix, self.dtype)
        hidden = shifted(session.prefix_hidden[..., : self._width], prompt.keep)
        rotation = self._rotate(positions)
        self._above = self._forward(prompt.embeds, hidden, mask, *rotation, self.cache.write_index)[
            :, -1:
        ]

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        self._places.start()
        if self._true is None:
            self._rotation = self._rotate(self._places.first[:, None] + self._ahead)
        else:
            self._above = self._replay(*self._true)
            self._true = None
        return self._distribution(self._zero)[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, with tokens int64 [B, P]:
        float32 [B, P, V].
        """
        layout = self._places.layout_of(level)
        above = self._above if layout.parents is None else take(self._above, layout.parents)
        mask = self._places.level(layout)
        cos, sin = (part[:, level.depth - 1 : level.depth] for part in self._rotation)
        self._above = self._step(
            self.head.embed(tokens), above, mask, cos, sin, self.cache.write_index
        )
        return self._distribution(layout.ahead)

    def _replay(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        """Rerun the last round's tokens with their true hidden states; returns the prediction at
        each row's root, [R, 1, H].

        Also computes the rotary embedding for the levels that follow.
        """
        count = tokens.shape[1]
        slots, mask = self._places.decided(count, emitted)
        cos, sin = self._rotate(torch.cat([slots, self._places.first[:, None] + self._ahead], 1))
        self._rotation = cos[:, count:], sin[:, count:]
        predicted = self._step(
            self.head.embed(tokens),
            hidden,
            mask,
            cos[:, :count],
            sin[:, :count],
            self.cache.write_index,
        )
        return last_emitted(predicted, emitted)

    def _distribution(self, ahead: Tensor) -> Tensor:
        """Distributions of the predictions, `ahead` tokens after the roots: [B, M, V]."""
        return self.head.distribution(
            self._above, self.session.prompt.lengths, ahead, self._sampling
        )


def load(path: str, target: TransformerTarget) -> EagleModel:
    """Load the draft of a directory, or an untrained one if `path` is `random`."""
    return trained_or_random(path, target, EagleModel.from_pretrained, EagleModel.of)


def build_eagle(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The EAGLE drafter of a trained draft.

    Args:
        path: directory with `config.json` and `model.safetensors`, or `random`.
        target: the target it was trained for.
        tree: static tree drafted every round.
        dtype: see `HiddenStateDraft`.

    Raises:
        TemperaError: the directory contains no valid draft, or one for another target.
    """
    model = EagleDraft(load(path, target), target, dtype=torch_dtype(dtype))
    return StaticTreeDrafter(model, tree)


def build_eagle2(
    path: str,
    target: TransformerTarget,
    branches: int = 10,
    depth: int = 5,
    nodes: int = 59,
    dtype: DraftDtype | None = None,
) -> DynamicTreeDrafter:
    """The EAGLE-2 drafter of a trained EAGLE draft. See `dynamic_tree.DynamicTreeDrafter` and
    `build_eagle`.

    Raises:
        TemperaError: the directory contains no valid draft or one for another target, or the tree
            is impossible.
    """
    model = EagleDraft(load(path, target), target, attrgetter("ranking"), torch_dtype(dtype))
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
