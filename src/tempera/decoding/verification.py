"""Verification: walk down the draft tree, accept a path, and draw the token after it. No other
module walks a tree.

Siblings (docs/methods.md; SJD-PAC, Theorem 2): the children of a node are tested in order. After a
rejection the residual of that test replaces p for the next sibling, which is tested against its own
q. The test at a node does not depend on the path to it, so all nodes of the tree are tested in
parallel, one sibling rank after the other: one step for a chain, `max_children` steps for a tree.
"""

from dataclasses import dataclass

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
from tempera.decoding.trees import Tree, put, take


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
    tree = draft.tree
    if tree.nodes == 0:
        path, law = _lay_out(tree, draft.tokens.bool()), p[:, 0]
    elif isinstance(rule, JointRule):
        reached, law = rule.walk(draft, p, uniforms)
        path = _lay_out(tree, reached)
    elif soft is not None and isinstance(rule, GreedyRule):
        parents = 1 + tree.parents
        passed = rule.keeps(take(soft, parents), draft.tokens) | (
            at(take(p, parents), draft.tokens) >= 1
        )
        path = _lay_out(tree, tree.reached(passed))
        law = p[torch.arange(len(p), device=p.device), path.stop]
    elif isinstance(draft, OneHotDraft) and isinstance(rule, OneHotRule):
        f = _test_one_hot(draft, p, rule)
        path = _lay_out(tree, tree.reached(uniforms[:, : tree.nodes] < f))
        law = _replacement_of_one_hot(draft, p, rule, path)
    else:
        f, laws = _test_siblings(draft, p, rule)
        path = _lay_out(tree, tree.reached(uniforms[:, : tree.nodes] < f))
        law = _replacement(draft, laws, rule, path)
    next_token = sample(law, uniforms[:, -1])
    tokens = path.slots.new_zeros((len(p), 2 + tree.max_depth)).scatter_(
        1, path.slots, draft.tokens
    )
    tokens.scatter_(1, path.accepted.unsqueeze(1) + 1, next_token.unsqueeze(1))
    return Verdict(path.nodes[:, 1:], 1 + path.nodes, path.accepted, tokens[:, 1:], next_token)


@dataclass(frozen=True)
class _AcceptedPath:
    """The reached nodes by depth.

    Attributes:
        slots: each node's depth, 0 if it is not reached, int64 [B, N].
        nodes: the node reached at each depth 0..L, int64 [B, 1 + L]; -1 at the root and past the
            end.
        accepted: how many are reached, int64 [B].
    """

    slots: Tensor
    nodes: Tensor
    accepted: Tensor

    @property
    def stop(self) -> Tensor:
        """Where the walk stops, counted 0..N with the root first, int64 [B]."""
        return 1 + self.nodes.amax(-1)  # nodes are sorted by depth: the last one is the deepest


def _lay_out(tree: Tree, reached: Tensor) -> _AcceptedPath:
    unreached = ~reached
    slots = tree.depths.masked_fill(unreached, 0)
    nodes = torch.full((len(reached), 1 + tree.max_depth), -1, device=reached.device)
    return _AcceptedPath(
        slots, nodes.scatter_(1, slots, tree.ids.masked_fill(unreached, -1)), reached.sum(-1)
    )


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
        f = f.masked_fill(at(target, token) >= 1, 1.0)
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
    draft: OneHotDraft, p: Tensor, rule: OneHotRule, path: _AcceptedPath
) -> Tensor:
    """`_replacement` for one-hot proposals: p where the walk stops, less what the residuals leave
    out of the children there.
    """
    tree, rows = draft.tree, torch.arange(len(p), device=p.device)
    stop = path.stop
    law = p[rows, stop]
    kept = law.gather(1, draft.tokens) * rule.residual_share(tree.depths.expand_as(draft.tokens))
    rejected = (1 + tree.parents == stop.unsqueeze(-1)).expand_as(kept)
    rest = law.scatter_reduce(1, draft.tokens, kept.masked_fill(~rejected, torch.inf), "amin")
    return normalise(rest, otherwise=law)


def _drafted_probs(draft: Draft, p: Tensor) -> Tensor:
    """The target's probability of every drafted token after its parent, [B, N]."""
    rows = torch.arange(len(p), device=p.device).unsqueeze(-1)
    return p[rows, 1 + draft.tree.parents, draft.tokens]


def _replacement(draft: Draft, laws: Tensor, rule: Rule, path: _AcceptedPath) -> Tensor:
    """The distribution of the drawn token, [B, V]: at a leaf the law itself, else the residual of
    the last child's test.
    """
    tree = draft.tree
    rows = torch.arange(len(laws), device=laws.device)
    stop = path.stop
    last = tree.last_children[rows, stop] if tree.per_row else tree.last_children[stop]
    law, child = laws[rows, stop], last.clamp(min=0)
    residual = rule.residual(
        law, draft.q[rows, child], draft.tokens[rows, child], path.accepted + 1
    )
    return torch.where(last.unsqueeze(-1) < 0, law, residual)
