"""Verification: walk down the draft tree, accept a path, and draw the token after it. No other
module walks a tree.

Siblings (docs/methods.md; SJD-PAC, Theorem 2): the children of a node are tested in order. After a
rejection the residual of that test replaces p for the next sibling, which is tested against its own
q. The test at a node does not depend on the path to it, so all nodes of the tree are tested in
parallel, one sibling rank after the other: one step for a chain, `max_children` steps for a tree.
"""

import torch
from torch import Tensor

from tempera.decoding.interfaces import (
    Draft,
    GreedyRule,
    JointRule,
    OneHotDraft,
    OneHotRule,
    Rule,
    Verdict,
)
from tempera.decoding.probabilities import at, normalise, sample
from tempera.decoding.trees import put, take, take_one


def verify(
    draft: Draft, p: Tensor, rule: Rule | JointRule, uniforms: Tensor, soft: Tensor | None = None
) -> Verdict:
    """Walk down the tree, keep a path, and draw one more token (Cool-SD, Algorithm 1, lines 4-17).

    Args:
        draft: the proposal; N nodes.
        p: the target's distribution after the root and every node, float32 [B, 1 + N, V].
        rule: the acceptance rule. A token with p(x) ≥ 1 (forced and greedy positions) is always
            accepted.
        uniforms: draws in [0, 1), [B, N + 1] or more: one per node, and the last one for the token
            after the path.
        soft: the untempered distributions in greedy decoding, float32 [B, 1 + N, V], for a
            `GreedyRule`; see `interfaces.Scores`.
    """
    tree, draws = draft.tree, uniforms[:, : draft.tree.nodes]
    if tree.nodes == 0:
        stop, law = torch.zeros(len(p), dtype=torch.int64, device=p.device), p[:, 0]
    elif isinstance(rule, JointRule):
        stop, law = rule.walk(draft, p, uniforms)
    elif soft is not None and isinstance(rule, GreedyRule):
        parents = 1 + tree.parents
        passed = rule.keeps(take(soft, parents), draft.tokens) | (
            at(take(p, parents), draft.tokens) >= 1
        )
        stop = tree.walk(passed)
        law = take_one(p, stop)
    elif isinstance(draft, OneHotDraft) and isinstance(rule, OneHotRule):
        stop = tree.walk(draws < _test_one_hot(draft, p, rule))
        law = _replacement_of_one_hot(draft, p, rule, stop)
    else:
        f, laws = _test_siblings(draft, p, rule)
        stop = tree.walk(draws < f)
        law = _replacement(draft, laws, rule, stop)
    next_token = sample(law, uniforms[:, -1])
    route = tree.route_to(stop)
    tokens = torch.cat([next_token.unsqueeze(1), draft.tokens], 1).gather(1, route[:, 1:])
    return Verdict(stop, route[:, :-1], tree.depth_at(stop), tokens, next_token)


def keep_probs(rule: Rule, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
    """The probability of keeping each token of the vocabulary as `verify` keeps it: f, and 1 where
    p ≥ 1. [..., V] -> [..., V].
    """
    return torch.where(p >= 1, 1.0, rule.accept_probs(p, q, depth))


def drafted_keep_probs(draft: Draft, p: Tensor, rule: Rule) -> Tensor:
    """The probability that each drafted token passes its test, provided that the walk comes to it:
    what `verify` decides by, [B, N].
    """
    if isinstance(draft, OneHotDraft) and isinstance(rule, OneHotRule):
        return _test_one_hot(draft, p, rule)
    return _test_siblings(draft, p, rule)[0]


def _test_siblings(draft: Draft, p: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The probability that each node passes its test, provided that the walk comes to it, [B, N];
    and the law that the last child of the root and of every node was tested against, [B, 1 + N, V].
    """
    tree = draft.tree
    depths = tree.depths.expand_as(draft.tokens)
    laws = p if tree.is_chain else p.clone()
    passing = torch.zeros_like(p[..., 0])  # the last column takes absent children
    for rank, test in enumerate(tree.sibling_tests):
        target = take(laws, test.parents)
        if rank > 0:
            residual = rule.residual(
                target, *(take(x, test.earlier) for x in (draft.q, draft.tokens, depths))
            )
            target = (
                torch.where((test.ids < 0).unsqueeze(-1), target, residual)
                if tree.per_row
                else residual
            )
            put(laws, test.parents, target)
        token = take(draft.tokens, test.nodes)
        f = rule.accept_prob(target, take(draft.q, test.nodes), token, take(depths, test.nodes))
        f = torch.where(at(target, token) >= 1, 1.0, f)
        if tree.is_chain:
            return f, laws
        passing.scatter_(1, test.ids.remainder(1 + tree.nodes).expand_as(f), f)
    return passing[:, :-1], laws


def _test_one_hot(draft: OneHotDraft, p: Tensor, rule: OneHotRule) -> Tensor:
    """The first result of `_test_siblings` for one-hot proposals, without their distributions.

    After the siblings before it are rejected, token x has probability p(x) / M, where M is p
    without what the residuals left out of these siblings (p itself where nothing is left).
    """
    tree, depths = draft.tree, draft.tree.depths.expand_as(draft.tokens)
    here = _drafted_probs(draft, p)
    gone = here * (1 - rule.residual_share(depths))
    left = 1 - (tree.elders.float() @ gone.unsqueeze(-1)).squeeze(-1)
    given = torch.where(left > 0, here / left, here)
    return rule.accept_one_hot(given, depths).masked_fill(given >= 1, 1.0)


def _replacement_of_one_hot(
    draft: OneHotDraft, p: Tensor, rule: OneHotRule, stop: Tensor
) -> Tensor:
    """`_replacement` for one-hot proposals: p where the walk stops, less what the residuals leave
    out of the children there.
    """
    tree, law = draft.tree, take_one(p, stop)
    kept = law.gather(1, draft.tokens) * rule.residual_share(tree.depths.expand_as(draft.tokens))
    rejected = (1 + tree.parents == stop.unsqueeze(-1)).expand_as(kept)
    rest = law.scatter_reduce(1, draft.tokens, kept.masked_fill(~rejected, torch.inf), "amin")
    return normalise(rest, otherwise=law)


def _drafted_probs(draft: Draft, p: Tensor) -> Tensor:
    """The target's probability of every drafted token after its parent, [B, N]."""
    rows = torch.arange(len(p), device=p.device).unsqueeze(-1)
    return p[rows, 1 + draft.tree.parents, draft.tokens]


def _replacement(draft: Draft, laws: Tensor, rule: Rule, stop: Tensor) -> Tensor:
    """The distribution of the drawn token, [B, V], where the walk stops, counted 0..N with the root
    first, int64 [B]: at a leaf the law itself, else the residual of the last child's test.
    """
    tree, law = draft.tree, take_one(laws, stop)
    child = tree.at_stop(tree.last_children.clamp(min=0), stop)
    q, token = take_one(draft.q, child), take_one(draft.tokens, child)
    residual = rule.residual(law, q, token, tree.depth_at(stop) + 1)
    is_leaf = tree.at_stop(tree.last_children < 0, stop)
    return torch.where(is_leaf.unsqueeze(-1), law, residual)
