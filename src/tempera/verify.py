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
        """p [B, 1 + N, V], uniforms [B, N] -> the nodes that are kept together with all their ancestors, bool [B, N], at most one a
        depth, and the distribution of the token after the deepest of them, [B, V]."""


def verify(draft: Draft, p: Tensor, rule: Rule | JointRule, uniforms: Tensor) -> Verdict:
    """Walk down the tree, keep a path, and draw one token more (Cool-SD, Algorithm 1, lines 4-17).

    Args:
        draft: the proposal; N nodes.
        p: the target's distribution after the root and every node, float32 [B, 1 + N, V].
        rule: the acceptance rule. Whatever it says, a token with p(x) ≥ 1 is kept (forced and greedy positions).
        uniforms: draws in [0, 1), [B, N + 1]: one a node, and one for the token after the path.
    """
    node_draws, last_draw = uniforms[:, :-1], uniforms[:, -1]
    if draft.tree.nodes == 0:
        reached, law = draft.tokens.bool(), p[:, 0]
    elif isinstance(rule, JointRule):
        reached, law = rule.walk(draft, p, node_draws)
    else:
        reached, law = _walk(draft, p, rule, node_draws)
    return _verdict(draft, reached, law, last_draw)


def keep_probs(rule: Rule, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
    """The probability of keeping each token of the vocabulary as `verify` keeps it: f, and 1 where p ≥ 1. [..., V] -> [..., V]."""
    return torch.where(p >= 1, 1.0, rule.accept_probs(p, q, depth))


def _walk(draft: Draft, p: Tensor, rule: Rule, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Test every node; what `JointRule.walk` returns."""
    tree = draft.tree
    chosen, law = _test_siblings(draft, p, rule, uniforms)
    nodes = torch.arange(tree.nodes, device=p.device)
    kept = take(chosen, 1 + tree.parents) == nodes
    kept_ancestors = (kept.float().unsqueeze(-2) @ tree.ancestors.float().mT).squeeze(-2)  # a count, exact in float32
    reached = kept_ancestors == tree.depths
    stop = torch.where(reached, 1 + nodes, 0).amax(-1)  # nodes are sorted by depth: the largest is the deepest
    return reached, _replacement(draft, law, rule, stop)


def _test_siblings(draft: Draft, p: Tensor, rule: Rule, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The kept child of the root and of every node, int64 [B, 1 + N], -1 for none; and the law that each one's last child was tested
    against, [B, 1 + N, V]."""
    tree = draft.tree
    law = p if tree.max_children == 1 else p.clone()
    chosen = torch.full(p.shape[:2], -1, dtype=torch.int64, device=p.device)
    depths = tree.depths.expand_as(draft.tokens)
    for rank, test in enumerate(tree.sibling_tests):
        target = take(law, test.parents)
        if rank > 0:
            residual = rule.residual(target, *(take(x, test.earlier) for x in (draft.q, draft.tokens, depths)))
            target = torch.where((test.ids < 0).unsqueeze(-1), target, residual) if tree.per_row else residual
            law[:, test.parents] = target
        token = take(draft.tokens, test.nodes)
        f = rule.accept_prob(target, take(draft.q, test.nodes), token, take(depths, test.nodes))
        keep = (take(uniforms, test.nodes) < f) | (at(target, token) >= 1)
        so_far = chosen[:, test.parents]
        chosen[:, test.parents] = torch.where(keep & (so_far < 0), test.ids, so_far)
    return chosen, law


def _replacement(draft: Draft, law: Tensor, rule: Rule, stop: Tensor) -> Tensor:
    """The distribution of the drawn token, [B, V]: at a leaf the law itself, else the residual of the last child's test. stop: [B], 0..N."""
    rows = torch.arange(len(stop), device=stop.device)
    last = draft.tree.last_children.expand(len(stop), -1)[rows, stop]
    child = last.clamp(min=0)
    law = law[rows, stop]
    depth = draft.tree.depths.expand_as(draft.tokens)[rows, child]
    residual = rule.residual(law, draft.q[rows, child], draft.tokens[rows, child], depth)
    return torch.where((last < 0).unsqueeze(-1), law, residual)


def _verdict(draft: Draft, reached: Tensor, law: Tensor, uniform: Tensor) -> Verdict:
    """Lay out the reached nodes [B, N] by depth and draw the next token from `law` [B, V]."""
    batch, depth = len(law), draft.tree.max_depth
    nodes = torch.arange(draft.tree.nodes, device=law.device)
    slots = torch.where(reached, draft.tree.depths - 1, depth)  # nodes that were not reached go to a slot past the path
    path = torch.full((batch, depth + 1), -1, device=law.device).scatter_(1, slots, torch.where(reached, nodes, -1))
    accepted = reached.sum(-1)
    next_token = sample(law, uniform)
    tokens = torch.zeros_like(path).scatter_(1, slots, draft.tokens).scatter_(1, accepted.unsqueeze(1), next_token.unsqueeze(1))
    return Verdict(path[:, :depth], accepted, tokens, next_token)
