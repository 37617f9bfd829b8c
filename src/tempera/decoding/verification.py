"""Verification: walk down the draft tree, accept a path, and draw the token after it. No other
module walks a tree.

Siblings (docs/methods.md; SJD-PAC, Theorem 2): the children of a node are tested in order. After a
rejection the residual of that test replaces p for the next sibling, which is tested against its own
q. The test at a node does not depend on the path to it, so all nodes of the tree are tested in
parallel, one sibling rank after the other: one step for a chain, `max_children` steps for a tree.
"""

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, JointRule, Rule, Scores, Verdict
from tempera.decoding.probabilities import at, sample
from tempera.decoding.trees import put, take, take_one


def verify(draft: Draft, scores: Scores, rule: Rule | JointRule, uniforms: Tensor) -> Verdict:
    """Walk down the tree, accept a path, and draw one more token (Cool-SD, Algorithm 1, lines
    4-17).

    Args:
        draft: the proposal; N nodes.
        scores: the target's scores of the root and every node.
        rule: the acceptance rule. A token with p(x) ≥ 1 (forced and greedy positions) is always
            accepted.
        uniforms: draws in [0, 1), [B, N + 1] or more: one per node, and the last one for the token
            after the path.
    """
    p, tree = scores.p, draft.tree
    if not tree.nodes:  # plain autoregression: nothing to test
        stop, probs = torch.zeros_like(scores.has_nan, dtype=torch.int64), p[:, 0]
    elif isinstance(rule, JointRule):
        stop, probs = rule.walk(draft, p, uniforms)
    elif scores.soft is not None:
        soft = take(scores.soft, 1 + tree.parents)
        stop = tree.walk(rule.keeps(soft, draft.tokens))
        probs = take_one(p, stop)
    else:
        f, tested = _test_siblings(draft, p, rule)  # all nodes in parallel
        stop = tree.walk(uniforms[:, : tree.nodes] < f)  # the first child that passes, down
        probs = _residual_at(draft, tested, rule, stop)  # p itself at a leaf
    next_token = sample(probs, uniforms[:, -1])
    route = tree.route_to(stop)
    tokens = torch.cat([next_token.unsqueeze(1), draft.tokens], 1).gather(1, route[:, 1:])
    return Verdict(stop, route[:, :-1], tree.depth_at(stop), tokens, next_token)


def drafted_keep_probs(draft: Draft, p: Tensor, rule: Rule) -> Tensor:
    """The probability that each drafted token passes its test, provided that the walk comes to it:
    what `verify` decides by, [B, N].
    """
    return _test_siblings(draft, p, rule)[0]


def _test_siblings(draft: Draft, p: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The probability that each node passes its test, provided that the walk comes to it, [B, N];
    and the distribution that the last child of the root and of every node was tested against,
    [B, 1 + N, V].
    """
    tree = draft.tree
    tested = p if tree.max_children <= 1 else p.clone()
    passing = torch.zeros_like(p[..., 0])  # the last column takes absent children
    for rank, test in enumerate(tree.sibling_tests):
        target = take(tested, test.parents)
        if rank > 0:
            q, token, depth = draft.at(test.earlier)
            residual = rule.residual(target, q, token, depth)
            target = torch.where((test.nodes < 0).unsqueeze(-1), target, residual)
            put(tested, test.parents, target)
        q, token, depth = draft.at(test.nodes)
        f = torch.where(at(target, token) >= 1, 1.0, rule.accept_at(target, q, token, depth))
        passing.scatter_(1, test.nodes.remainder(1 + tree.nodes).expand_as(f), f)
    return passing[:, :-1], tested


def _residual_at(draft: Draft, tested: Tensor, rule: Rule, stop: Tensor) -> Tensor:
    """The distribution of the drawn token, [B, V], where the walk stops, counted 0..N with the root
    first, int64 [B]: at a leaf what was tested there, else the residual of the last child's test.
    """
    tree, probs = draft.tree, take_one(tested, stop)
    child = tree.at_stop(tree.last_children, stop)
    q, token = take_one(draft.q, child), take_one(draft.tokens, child)
    residual = rule.residual(probs, q, token, tree.depth_at(stop) + 1)
    return torch.where((child < 0).unsqueeze(-1), probs, residual)
