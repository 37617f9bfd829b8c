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
from tempera.drafters.draft_network import DraftDtype, DraftNetwork, torch_dtype
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle_layout import load_eagle
from tempera.drafters.hidden_state_draft import HiddenStateDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.targets.cache import Layout
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
        self._sampling_of, self._sampling = sampling_of, target.sampling
        self._above = torch.empty(0)  # predictions at the nodes of the last level, [R, P, H]

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the prefix; the target must have started a batch of the same prompts."""
        self._sampling = self._sampling_of(self.head.sampling)
        prompt = self.session.prompt
        embeds, real, seen = self.network.prefix(prompt.embeds, prompt.keep)
        self._above = self._run_prefix(embeds, self._before_prefix(real), nodes, seen)[:, -1:]

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        prompt = self.session.prompt
        if self._last is not None:
            (tokens, hidden, emitted), self._last = self._last, None
            layout = self.session.layout_of(tokens.shape[1], self.cache)
            start = prompt.start_of(emitted)
            embeds = self.head.embed(tokens, self.network.embed_tokens)
            states = self._run_step(embeds, hidden, layout, start)
            self._above = prompt.from_root(states, emitted)
        return self._distribution(self.session.layout_of(1, self.cache))[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Frontier) -> Tensor:
        """The draft's distributions after the inner nodes of a level, with tokens int64 [B, P]:
        float32 [B, P, V].
        """
        layout, parents = self.session.layout_of(level, self.cache), level.inner_parents
        above = take(self._above, self.session.prompt.by_row(parents) if level.per_row else parents)
        embeds = self.head.embed(tokens, self.network.embed_tokens)
        self._above = self._run_step(embeds, above, layout)
        return self._distribution(layout)

    def _distribution(self, layout: Layout) -> Tensor:
        """Distributions of the predictions at the tokens of a layout, [B, P, V]."""
        lengths = self.session.prompt.lengths
        return self.head.distribution(self._above, lengths, layout.ahead, self._sampling)


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
    model = EagleDraft(network, target, attrgetter("ranking"), torch_dtype(dtype))
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
