"""Traversal verification: block verification on draft trees."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import Draft, Rule, Scores
from tempera.decoding.probabilities import at, normalise, ratio
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import put, take, take_one
from tempera.errors import TemperaError
from tempera.rules.standard import passes


@dataclass(frozen=True)
class Traversal(Rule):
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree is walked from its leaves
    up, and the first path whose joint weight passes is accepted. Exact.

    The root has the weight w = 1. The children of a node v are visited in order, with P = p after v
    at first; x is a child's token and q its label, without the earlier siblings:

        w_child = min(1, w·P(x)/q(x))
        a = Σ [w·P - q]+,   P ← Norm[w·P - q]+,   w ← a / (a + 1 - w)

    So a rejected subtree hands what the target lacks there to the next sibling. Nodes are tested in
    post-order, children before their parent, and pass with probability w, as it is after the last
    child. The path to the first node that passes is accepted, and the next token is drawn from this
    node's P. The root always passes. What a child does to w and P does not depend on its subtree,
    so all of them follow depth by depth, before any test. On a chain this is
    `rules.standard.BlockVerification`.

    Later tokens influence the acceptance of earlier ones. So guesses must not survive a round, and
    the children of different parents must be drawn independently.
    """

    @property
    @override
    def exact(self) -> bool:
        return True

    @override
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Rule.walk`.

        Raises:
            TemperaError: the tree is dynamic, parents share candidates, or the draft contains
                guesses from earlier rounds.
        """
        _check(draft)
        nodes = draft.tree.nodes
        weights, rest = self._visit(draft, scores.p)
        passed = uniforms[:, :nodes] < weights[:, 1:]
        turns = torch.where(passed, draft.tree.post_order, 1 + nodes)
        stop = torch.nn.functional.pad(turns, (1, 0), value=nodes).argmin(-1)
        return stop, take_one(rest, stop)

    def _visit(self, draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
        """w and P of the root and every node after its last child, float64 [B, 1 + N] and float32
        [B, 1 + N, V].
        """
        tree = draft.tree
        rest = p.clone()
        weights = torch.ones_like(p[..., 0], dtype=torch.float64)
        for level in tree.levels:
            parents = 1 + tree.parents[level.slots[:, 0]]
            weight = take(weights, parents)
            target = take(rest, parents).double()
            for children in level.slots.unbind(1):  # -1 where a parent has no further child
                present = children >= 0
                q, token, _ = draft.at(children, p.shape[-1])
                drawn = at(q, token).double()
                child = ratio(weight * at(target, token), drawn)
                child = child.masked_fill(drawn <= 0, 0.0)  # not drawn from q: never kept
                child = torch.where(present, child, 1.0)
                put(weights, 1 + children, child)  # absent ones: the root, whose weight is 1
                lack = (weight.unsqueeze(-1) * target - q).clamp(min=0)
                mass = lack.sum(-1)
                weight = torch.where(present, passes(weight, mass), weight)
                lacking = normalise(lack, otherwise=target)
                target = torch.where(present.unsqueeze(-1), lacking, target)
            put(weights, parents, weight)
            put(rest, parents, target.to(rest.dtype))
        return weights, rest


def _check(draft: Draft) -> None:
    """Raise TemperaError for a draft whose law the rule would change, or that gains nothing."""
    if draft.tree.per_row:
        raise TemperaError(
            "rule=traversal gains nothing on dynamic trees, whose tokens are not drawn: choose "
            "rule=exact, or a static tree",
            option="rule",
        )
    if draft.shared:
        raise TemperaError(
            "rule=traversal is not lossless if the candidates of a position are the same under "
            "all parents, as in a window of several levels: give levels=1, or choose rule=exact",
            option="rule",
        )
    if not draft.fresh:
        raise TemperaError(
            "rule=traversal is not lossless with guesses that are kept from round to round: draw "
            "new ones in every round (drafter=sjd), or choose rule=exact",
            option="rule",
        )
