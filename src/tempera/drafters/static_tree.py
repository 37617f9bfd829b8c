"""Grow a static tree from a draft model: level by level, children drawn without replacement
(EAGLE-1, LANTERN++, Cool-SD). In greedy decoding the children are the most probable tokens.
"""

import torch
from torch import Tensor

from tempera.decoding.images import Images
from tempera.decoding.interfaces import Draft, Drafter, DraftModel, Scores, Verdict
from tempera.decoding.probabilities import most_probable, sample_without_replacement
from tempera.decoding.trees import Tree, TreeLevel, take
from tempera.errors import TemperaError


class StaticTreeDrafter(Drafter):
    """Drafts the same tree every round.

    Args:
        model: the draft model.
        tree: a static tree that is not empty; `Tree.chain(5)` for chains.
    """

    tree: Tree

    def __init__(self, model: DraftModel, tree: Tree) -> None:
        if tree.nodes == 0:
            raise TemperaError(
                "a tree of depth 0 drafts nothing: give depth=1 or more, or method=ar",
                option="depth",
            )
        self.model, self.identity = model, model.identity
        self.tree = tree
        self.nodes = tree.nodes
        self.depth = tree.max_depth
        self.uniforms = tree.nodes

    def begin(self, prompts: list[str], images: Images) -> None:
        """Start a batch."""
        self.model.begin(prompts, self.nodes, images)

    def propose(self, images: Images, uniforms: Tensor) -> Draft:
        """Draw a tree from uniforms [B, N]: tokens int64 [B, N] and q float32 [B, N, V]. Earlier
        siblings are removed from the q of later ones. In greedy decoding nothing is drawn: siblings
        are the most probable tokens in turn, and q is one-hot.
        """
        tree = self.tree.to(images.device)
        probs, above = self.model.roots(images)
        probs = probs.unsqueeze(1)
        tokens, drawn_from = [], []
        for level in tree.levels:
            drawn, q = self._children(probs, level, uniforms)
            drawn = take(drawn.flatten(1, 2), level.picks)
            tokens.append(drawn)
            drawn_from.append(take(q.flatten(1, 2), level.picks))
            if len(level.inner):
                probs, above = self.model.expand(above, take(drawn, level.inner), level)
        return Draft(torch.cat(tokens, 1), torch.cat(drawn_from, 1), tree)

    def _children(self, probs: Tensor, level: TreeLevel, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """The children of a level's parents, int64 [B, P, K], and their q [B, P, K, V].

        Args:
            probs: distributions after the parents, [B, P, V].
            level: of the children.
            uniforms: of the whole tree, [B, N].
        """
        if self.model.greedy:
            return most_probable(probs, level.slots.shape[1])
        return sample_without_replacement(probs, uniforms[:, level.slots])

    def observe(self, images: Images, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Pass the verdict to the draft model."""
        self.model.observe(images, draft, verdict, scores)
