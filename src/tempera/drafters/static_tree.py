"""Grow a static tree from a draft model: level by level, children drawn without replacement
(EAGLE-1, LANTERN++, Cool-SD). In greedy decoding the children are the most probable tokens.
"""

import torch
from torch import Tensor

from tempera.decoding.checks import predicted
from tempera.decoding.interfaces import Draft, Drafter, DraftModel, Scores, Verdict
from tempera.decoding.probabilities import most_probable, sample_without_replacement
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import Tree, take
from tempera.errors import DraftTooShort, TemperaError


class StaticTreeDrafter(Drafter):
    """Drafts the same tree every round.

    Args:
        model: the draft model.
        tree: a static tree that is not empty; `Tree.chain(5)` for chains.

    Raises:
        TemperaError: the tree is empty, or deeper than the model drafts.
    """

    tree: Tree

    def __init__(self, model: DraftModel, tree: Tree) -> None:
        if tree.nodes == 0:
            raise TemperaError(
                "a tree of depth 0 drafts nothing: give depth=1 or more, or method=ar",
                option="depth",
            )
        if model.longest is not None and tree.max_depth > model.longest:
            raise DraftTooShort(model.longest, tree.max_depth)
        self.model = model
        self.identity = model.identity
        self.tree = tree
        self.nodes = tree.nodes
        self.depth = tree.max_depth
        self.uniforms = tree.nodes

    def begin(
        self, prompts: list[str], sequences: Sequences, uniforms: Tensor, rows: Tensor | None
    ) -> None:
        """See `Drafter.begin`."""
        self.model.begin(prompts, self.nodes, sequences, rows)

    def propose(self, sequences: Sequences, uniforms: Tensor) -> Draft:
        """Draw a tree from uniforms [B, N]: tokens int64 [B, N] and q float32 [B, N, V]. Earlier
        siblings are removed from the q of later ones. In greedy decoding nothing is drawn: siblings
        are the most probable tokens in turn, and there is no q.
        """
        tree = self.tree
        roots = self.model.roots(sequences)
        probs, above = predicted(self.model, "roots", roots, len(uniforms))
        probs = probs.unsqueeze(1)
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        has_nan = []
        for level in tree.levels:
            if self.model.greedy:
                drawn = most_probable(probs, level.slots.shape[1]).flatten(1, 2)
                has_nan.append(probs[..., 0].isnan().any(-1))
            else:
                draws = uniforms[:, level.slots]
                siblings, their_q = sample_without_replacement(probs, draws)
                drawn = siblings.flatten(1, 2)
                q = their_q.flatten(1, 2)
                drawn_from.append(q if level.in_order else take(q, level.picks))
            drawn = drawn if level.in_order else take(drawn, level.picks)
            tokens.append(drawn)
            if len(level.inner):
                inner = take(drawn, level.inner)
                below = self.model.expand(above, inner, level)
                probs, above = predicted(self.model, "expand", below, *inner.shape)
        if self.model.greedy:
            broken = torch.stack(has_nan).any(0)
            return Draft(torch.cat(tokens, 1), None, tree, broken=broken)
        return Draft(torch.cat(tokens, 1), torch.cat(drawn_from, 1), tree)

    def observe(self, sequences: Sequences, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Pass the verdict to the draft model."""
        self.model.observe(sequences, draft, verdict, scores)
