"""EAGLE as a draft model: it drafts a tree level by level from its own predicted hidden states.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H
hidden size.
"""

from operator import attrgetter

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.trees import Frontier, Tree, take
from tempera.drafters.draft_network import DraftDtype, torch_dtype
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle_layout import load_eagle
from tempera.drafters.hidden_state_draft import HiddenStateDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.targets.transformer import TransformerTarget


class EagleDraft(HiddenStateDraft):
    """The distributions of a draft network that drafts from its own predictions, for chains and
    trees: one pass of the network per level. Arguments and errors are those of `HiddenStateDraft`.
    """

    @override
    def _first(self, nodes: int) -> Tensor:
        prompt = self.session.prompt
        embeds, real, seen = self.network.prefix(prompt.embeds, prompt.keep)
        return self._run_prefix(embeds, self._before_prefix(real), nodes, seen)[:, -1:]

    @override
    def _next(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        embeds = self.head.embed(tokens, self.network.embed_tokens)
        return self._rerun(embeds, hidden, emitted)

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        return self._distribution(self._predict(), self._ahead[:1])[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, with tokens int64 [B, P]:
        float32 [B, P, V].
        """
        layout, parents = self.session.layout_of(level, self.cache), level.inner_parents
        parents = self.session.prompt.by_row(parents) if level.per_row else parents
        embeds = self.head.embed(tokens, self.network.embed_tokens)
        self._states = self._run_step(embeds, take(self._states, parents), layout)
        return self._distribution(self.head.guided_logits(self._states), layout.ahead)


def build_eagle(
    path: str, target: TransformerTarget, tree: Tree, dtype: DraftDtype | None = None
) -> StaticTreeDrafter:
    """The EAGLE drafter of a trained draft.

    Args:
        path: see `eagle_layout.load_eagle`.
        target: the target it was trained for.
        tree: static tree drafted every round.
        dtype: see `HiddenStateDraft`.

    Raises:
        TemperaError: it is no valid draft, or one for another target.
    """
    network = load_eagle(path, target)
    model = EagleDraft(network, target, dtype=torch_dtype(dtype))
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
        TemperaError: it is no valid draft, or one for another target, or the tree
            is impossible.
    """
    network = load_eagle(path, target)
    model = EagleDraft(network, target, torch_dtype(dtype), attrgetter("ranking"))
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
