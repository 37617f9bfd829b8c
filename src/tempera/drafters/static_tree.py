"""Grow a static tree from a draft model: level by level, children drawn without replacement
(EAGLE-1, LANTERN++, Cool-SD).
"""

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, DraftModel, RoundState, Scores, Verdict
from tempera.decoding.probabilities import sample_without_replacement
from tempera.decoding.trees import Tree
from tempera.errors import EmptyDraft


class StaticTreeDrafter:
    """Drafts the same tree every round.

    Args:
        model: the draft model.
        tree: a static tree that is not empty; `Tree.chain(5)` for chains.
    """

    def __init__(self, model: DraftModel, tree: Tree) -> None:
        if tree.nodes == 0:
            raise EmptyDraft("a tree of depth 0")
        self.model = model
        self.tree = tree
        self.nodes = tree.nodes
        self.depth = tree.max_depth
        self.uniforms = tree.nodes

    @property
    def identity(self) -> str | None:
        """Identity of the draft model's weights."""
        return self.model.identity

    @property
    def states(self) -> tuple[RoundState, ...] | None:
        """The draft model; None if it is no `RoundState`."""
        return (self.model,) if isinstance(self.model, RoundState) else None

    def begin(self, prompts: list[str]) -> None:
        """Start a batch."""
        self.model.begin(prompts, self.nodes)

    def propose(self, uniforms: Tensor) -> Draft:
        """Draw a tree from uniforms [B, N]: tokens int64 [B, N] and q float32 [B, N, V]. Earlier
        siblings are removed from the q of later ones.
        """
        tree = self.tree.to(uniforms.device)
        above = self.model.roots().unsqueeze(1)
        tokens, laws = [], []
        for level in tree.levels:
            draws = (
                uniforms[:, level.run].reshape(-1, *level.slots.shape)
                if level.full
                else uniforms[:, level.slots]
            )
            drawn, q = sample_without_replacement(above, draws)
            drawn, q = drawn.flatten(1), q.flatten(1, 2)
            if not level.full:
                drawn, q = drawn[:, level.picks], q[:, level.picks]
            tokens.append(drawn)
            laws.append(q)
            if len(level.inner):
                above = self.model.expand(
                    drawn if len(level.inner) == len(level.nodes) else drawn[:, level.inner], level
                )
        return Draft(torch.cat(tokens, 1), torch.cat(laws, 1), tree)

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Pass the verdict to the draft model."""
        self.model.observe(draft, verdict, scores, emitted)
