"""Verification: which drafted tokens are kept, and what is drawn where the walk stops. The only place that walks a tree.

Siblings (METHODS, SJD-PAC Theorem 2): the children of a node are tested in order. After a rejection the residual of that test takes the
place of p for the next sibling, which is tested against its own q. What happens at a node does not depend on how it was reached, so all
nodes of the tree are tested at once, one sibling rank after the other: one step for a chain, `max_children` steps for a tree.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tempera.acceptance import at
from tempera.probs import sample
from tempera.trees import take
from tempera.types import Draft, Rule, Verdict


@runtime_checkable
class JointRule(Protocol):
    """A rule that decides on a draft as a whole, because its tests at different depths are coupled (block verification)."""

    def walk(self, draft: Draft, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """p [B, 1 + N, V], uniforms [B, N + 1] (the last one is not its own) -> the nodes that are kept together with all their ancestors, bool [B, N], at most one a
        depth, and the distribution of the token after the deepest of them, [B, V]."""


def verify(draft: Draft, p: Tensor, rule: Rule | JointRule, uniforms: Tensor) -> Verdict:
    """Walk down the tree, keep a path, and draw one token more (Cool-SD, Algorithm 1, lines 4-17).

    Args:
        draft: the proposal; N nodes.
        p: the target's distribution after the root and every node, float32 [B, 1 + N, V].
        rule: the acceptance rule. Whatever it says, a token with p(x) ≥ 1 is kept (forced and greedy positions).
        uniforms: draws in [0, 1), [B, N + 1] or more: one a node, and the last one for the token after the path.
    """
    if draft.tree.nodes == 0:
        reached, law = draft.tokens.bool(), p[:, 0]
    elif isinstance(rule, JointRule):
        reached, law = rule.walk(draft, p, uniforms)
    else:
        reached, law = _walk(draft, p, rule, uniforms)
    return _verdict(draft, reached, law, uniforms[:, -1])


def keep_probs(rule: Rule, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
    """The probability of keeping each token of the vocabulary as `verify` keeps it: f, and 1 where p ≥ 1. [..., V] -> [..., V]."""
    return torch.where(p >= 1, 1.0, rule.accept_probs(p, q, depth))


def _walk(draft: Draft, p: Tensor, rule: Rule, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Test every node; what `JointRule.walk` returns."""
    tree = draft.tree
    passed, law = _test_siblings(draft, p, rule, uniforms)
    votes = (passed.float().unsqueeze(-2) @ tree.votes.mT).squeeze(-2)  # of whole numbers: exact in float32
    reached = votes == tree.depths
    return reached, _replacement(draft, law, rule, reached)


def _test_siblings(draft: Draft, p: Tensor, rule: Rule, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes pass their test, provided that the walk comes to it, bool [B, N]; and the law that the last child of the root and of
    every node was tested against, [B, 1 + N, V]."""
    tree = draft.tree
    depths = tree.depths.expand_as(draft.tokens)
    law = p if tree.max_children == 1 else p.clone()
    passed = torch.zeros(len(p), 1 + tree.nodes, dtype=torch.bool, device=p.device)  # the last column takes absent children
    for rank, test in enumerate(tree.sibling_tests):
        target = take(law, test.parents)
        if rank > 0:
            residual = rule.residual(target, *(take(x, test.earlier) for x in (draft.q, draft.tokens, depths)))
            target = torch.where((test.ids < 0).unsqueeze(-1), target, residual) if tree.per_row else residual
            law[:, test.parents] = target
        token = take(draft.tokens, test.nodes)
        f = rule.accept_prob(target, take(draft.q, test.nodes), token, take(depths, test.nodes))
        keep = (take(uniforms, test.nodes) < f) | (at(target, token) >= 1)
        if tree.max_children == 1:
            return keep, law
        passed.scatter_(1, test.ids.remainder(1 + tree.nodes).expand_as(keep), keep)
    return passed[:, :-1], law


def _replacement(draft: Draft, law: Tensor, rule: Rule, reached: Tensor) -> Tensor:
    """The distribution of the drawn token, [B, V]: at a leaf the law itself, else the residual of the last child's test."""
    tree = draft.tree
    stop = (1 + tree.ids).expand_as(reached).masked_fill(~reached, 0).amax(-1, keepdim=True)  # sorted by depth: the largest is the deepest
    last = tree.last_children.gather(1, stop) if tree.per_row else tree.last_children[stop]
    law, q, token = take(law, stop), take(draft.q, last), take(draft.tokens, last)
    depth = reached.sum(-1, keepdim=True) + 1
    return torch.where(last.unsqueeze(-1) < 0, law, rule.residual(law, q, token, depth)).squeeze(1)


def _verdict(draft: Draft, reached: Tensor, law: Tensor, uniform: Tensor) -> Verdict:
    """Lay out the reached nodes [B, N] by depth and draw the next token from `law` [B, V]."""
    tree, unreached = draft.tree, ~reached
    slots = tree.depths.expand_as(reached).masked_fill(unreached, 0)  # slot 0 takes what was not reached
    path = slots.new_full((len(law), 1 + tree.max_depth), -1)
    path.scatter_(1, slots, tree.ids.expand_as(reached).masked_fill(unreached, -1))
    accepted = reached.sum(-1)
    next_token = sample(law, uniform)
    tokens = slots.new_zeros((len(law), 2 + tree.max_depth)).scatter_(1, slots, draft.tokens)
    tokens.scatter_(1, accepted.unsqueeze(1) + 1, next_token.unsqueeze(1))
    return Verdict(path[:, 1:], accepted, tokens[:, 1:], next_token)
