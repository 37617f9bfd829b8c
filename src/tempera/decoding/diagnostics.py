"""Bounds on the distance between the law of the emitted tokens and the target's, in TV and KL, and
TV(p, q), computed from p and q at visited positions. All of it stands outside the rounds.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from tempera.decoding.compiled import compiled
from tempera.decoding.interfaces import Draft, Round, Rule, Scores, Verdict
from tempera.decoding.probabilities import (
    at,
    excess,
    kl_divergence,
    mass_of_largest,
    one_hot,
    total_variation,
)
from tempera.decoding.sequences import Sequences
from tempera.decoding.verification import TokenRule


class Diagnosed:
    """A watcher that records TV(p, q), the terms of the bounds on TV and KL, how certain the target
    is, and the rule's own figures, of every token; see `diagnose`, `certainty` and `Rule.figures`.

    Args:
        rule: the rule that decides.
        compiles: whether rounds are compiled: then one more graph looks at all places of a round,
            instead of at those alone that emitted tokens.

    Attributes:
        names: of what it records.
    """

    def __init__(self, rule: Rule, compiles: bool = False) -> None:
        self.rule = rule
        self.names: list[str] = []
        self.compiles = compiles
        self._record = compiled(record, "verify") if compiles else record

    def __call__(self, round: Round) -> None:
        """Diagnose the places of a round that emitted tokens."""
        where = None if self.compiles else _emitted(round.sequences)
        looked_at = round.draft, round.verdict, round.scores, self.rule, where
        names = self._record(round.sequences, *looked_at)
        figures = self.rule.figures(round)
        round.sequences.record(figures)
        self.names = [*names, *figures]


def record(sequences: Sequences, *looked_at: Any) -> list[str]:
    """Record what `look` says of a round; returns the names."""
    columns = look(*looked_at)
    sequences.record(columns)
    return list(columns)


def look(
    draft: Draft,
    verdict: Verdict,
    scores: Scores,
    rule: Rule,
    where: tuple[Tensor, Tensor] | None,
) -> dict[str, Tensor]:
    """What `diagnose` and `certainty` say of a round, float32 [B, L + 1] each; for the arguments
    see `diagnose`.
    """
    columns = diagnose(draft, verdict, scores.p, rule, scores.untempered, where)
    rows, places = _everywhere(verdict.visited) if where is None else where
    truth = scores.p[rows, verdict.visited[rows, places]]
    for name, values in certainty(truth).items():
        columns[name] = _scattered(values, where, verdict.visited)
    return columns


def _everywhere(like: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every entry of a matrix."""
    rows, columns = (torch.arange(size, device=like.device) for size in like.shape)
    return rows.repeat_interleave(len(columns)), columns.repeat(len(rows))


def _emitted(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Row and place of every token that the round emitted, int64 [M] each. The host has read how
    many there are.
    """
    count = sum(sequences.grown)
    emitted = sequences.emitted
    rows = torch.arange(len(emitted), device=sequences.device)
    rows = rows.repeat_interleave(emitted, output_size=count)
    first = emitted.cumsum(0) - emitted  # of each row
    return rows, torch.arange(count, device=sequences.device) - first[rows]


def diagnose(
    draft: Draft,
    verdict: Verdict,
    p: Tensor,
    rule: Rule,
    soft: Tensor | None = None,
    where: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Terms of bounds on the TV and KL between the law of the emitted tokens and the target's, from
    p and q at the visited positions.

    Let t¹ = p be the target's distribution at a visited node and, for its children k = 1..K in test
    order, f_k the probability of keeping a token and tᵏ⁺¹ = Norm[tᵏ - q_k·f_k]+ what an unbiased
    continuation would have to draw from. Given tᵏ, a test that another sibling's test would follow
    is compared as a choice between the tokens and "rejected": its distance in total variation from
    the best unbiased choice is Σ[q f - tᵏ]+. The last child's test together with its residual draws
    from π = q f + r·residual, r = Σ q(1 - f): TV(π, tᵏ); a residual that depends on the rejected
    token counts with its mean. A position's term of the TV bound is the sum over the tests
    performed there, whatever came out of them; a token drawn at a leaf adds 0.

    The same sum for KL would be infinite if a later sibling may be a token that tᵏ has ruled out.
    The term of the KL bound is therefore that of the token's distribution as a whole, given that
    all drafted siblings but the last were rejected: Λ = Σ_k (Π_{j<k} r_j)·q_k f_k + (Π_k
    r_k)·residual, and KL(Λ ‖ p) times Π_{k<K} (1 - f_k(x_k))/r_k, the weight of siblings drawn from
    q_k as draws of rejected ones.

    On a chain (K = 1) these are exactly the local terms of Cool-SD's Eq. 8 and the KL divergence of
    the emitted token's distribution given the state of the round; on a tree, upper bounds of those
    in expectation. Summed over positions, the expected terms bound the TV and the KL divergence
    between the whole image's law and the target's.

    An exact rule whose tests are coupled adds 0. A relaxed one has no bounds (`has_bounds`), but in
    greedy decoding, where a kept token that is not the target's choice costs 1 in total variation
    and infinitely many nats.

    Args:
        draft: the round's proposal.
        verdict: what `verify` decided.
        p: the target's distributions, float32 [B, 1 + N, V].
        rule: the rule that decided.
        soft: in greedy decoding the untempered distributions, else None.
        where: rows and places to look at, int64 [M] each; by default all.

    Returns:
        `tv`, TV(p, q) with the first child's q (NaN at a leaf), and `bound` and `kl`, the terms of
        the bounds, where they are known: float32 [B, L + 1] each; undefined past the verdict's last
        token.
    """
    places = _everywhere(verdict.visited) if where is None else where
    rows = places[0]
    visited = verdict.visited[places]
    truth = p[rows, visited]
    columns = {"tv": _first_test(draft, rows, visited, truth)}
    if has_bounds(rule, soft is not None):
        bounds = _bounds(draft, verdict, places, truth, rule, soft is not None)
        columns |= zip(("bound", "kl"), bounds, strict=True)
    return {name: _scattered(values, where, verdict.visited) for name, values in columns.items()}


def tests_alone(rule: Rule) -> TypeGuard[TokenRule]:
    """Whether each test looks at p and q at its own node and at nothing else, so that its law can
    be summed over the vocabulary.
    """
    if not isinstance(rule, TokenRule):
        return False
    kind = type(rule)
    return kind.passed is TokenRule.passed and kind.walk is TokenRule.walk


def has_bounds(rule: Rule, greedy: bool) -> bool:
    """Whether `diagnose` knows the terms of the bounds on TV and KL."""
    return greedy or tests_alone(rule) or rule.exact


def _bounds(
    draft: Draft,
    verdict: Verdict,
    where: tuple[Tensor, Tensor],
    truth: Tensor,
    rule: Rule,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """The terms of both bounds at M places, [M] each, with the target's distributions there,
    `truth` [M, V].
    """
    if greedy:
        wrong = 1 - at(truth, verdict.tokens[where])
        return wrong, torch.where(wrong > 0, torch.inf, 0.0)
    if tests_alone(rule):
        accepted_child = torch.nn.functional.pad(verdict.path, (0, 1), value=-1)[where]
        return _terms(draft, where[0], verdict.visited[where], accepted_child, truth, rule)
    nothing = torch.zeros_like(truth[:, 0])  # of an exact rule
    return nothing, nothing


def _scattered(values: Tensor, where: tuple[Tensor, ...] | None, like: Tensor) -> Tensor:
    """Values [M] at M places, or at all, of a matrix of the shape of `like`."""
    if where is None:
        return values.view(like.shape)
    return values.new_zeros(like.shape).index_put(where, values)


def mean_terms(draft: Draft, p: Tensor, rule: TokenRule) -> tuple[Tensor, Tensor]:
    """The terms of the TV bound and of the KL bound (see `diagnose`) at the root and at every node,
    in the mean over what the tests of its children decide, provided that the walk comes there:
    [B, 1 + N] each; 0 at leaves.
    """
    rows, nodes = _everywhere(p[..., 0])
    bound, kl = _terms(draft, rows, nodes, None, p.flatten(0, 1), rule)
    return bound.view(p.shape[:2]), kl.view(p.shape[:2])


TOP = 10
"""Tokens whose mass `certainty` adds up."""


def certainty(p: Tensor) -> dict[str, Tensor]:
    """How sure distributions are of the next token (LANTERN, Figure 2c): `top1`, the probability of
    the most probable token, `top10`, that of the ten most probable, `entropy` in nats, and
    `collision`, the probability that two draws agree, Σ p² = exp(−H₂) (SJD-PAC, §4.2). [..., V] ->
    [...] each.
    """
    return {
        "top1": p.amax(-1),
        "top10": mass_of_largest(p, min(TOP, p.shape[-1])),
        "entropy": torch.special.entr(p).sum(-1),
        "collision": p.square().sum(-1),
    }


def _first_test(draft: Draft, rows: Tensor, visited: Tensor, truth: Tensor) -> Tensor:
    """TV(p, q) with the first child's q, float32 [M]; NaN at a leaf. For the arguments see
    `_terms`.
    """
    if not draft.tree.nodes:
        return truth.new_full(visited.shape, torch.nan)
    first = _children(draft, rows, visited)[..., 0]
    where = rows, first.clamp(min=0)
    if draft.q is None:
        distance = 1 - at(truth, draft.tokens[where])
    else:
        distance = total_variation(truth, draft.q[where])
    return torch.where(first >= 0, distance, torch.nan)


def _children(draft: Draft, rows: Tensor, visited: Tensor) -> Tensor:
    """The children of visited nodes in test order, int64 [M, K], -1 where there is none."""
    return draft.tree.children.expand(len(draft.tokens), -1, -1)[rows, visited]


def _merged(truth: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a vocabulary of K tokens and one that stands for all others, which a local rule
    does not tell apart if nothing was drawn: distributions [M, V] and tokens [M, K] -> [M, K + 1]
    and [M, K].
    """
    ranks = torch.arange(tokens.shape[-1], device=tokens.device)
    alike = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)
    first = torch.where(alike, ranks, len(ranks)).amin(-1)
    own = truth.gather(-1, tokens).masked_fill(first != ranks, 0.0)
    others = (1 - own.sum(-1, keepdim=True)).clamp(min=0)
    return torch.cat([own, others], -1), first


def _terms(
    draft: Draft,
    rows: Tensor,
    visited: Tensor,
    accepted_child: Tensor | None,
    truth: Tensor,
    rule: TokenRule,
) -> tuple[Tensor, Tensor]:
    """The terms of both bounds at M visited nodes [M] of rows of the batch [M], with the child kept
    at each (-1: none; None: the mean over all outcomes) and the target's distributions there,
    `truth` [M, V].
    """
    children = _children(draft, rows, visited)
    tokens = draft.tokens[rows.unsqueeze(-1), children.clamp(min=0)]
    if draft.tree.nodes and draft.q is None and rule.local:
        truth, tokens = _merged(truth, tokens)
    bound = torch.zeros_like(visited, dtype=torch.float32)
    reach = torch.ones_like(bound)
    weight = torch.ones_like(bound)
    target = ideal = truth
    emitted = torch.zeros_like(truth)
    tested = torch.ones_like(bound)  # whether a child is tested, or how probably
    for rank in range(draft.tree.max_children):
        node = children[..., rank]
        last = (
            children[..., rank + 1] < 0
            if rank + 1 < draft.tree.max_children
            else torch.ones_like(visited, dtype=torch.bool)
        )
        where = rows, node.clamp(min=0)
        token, depth = tokens[..., rank], draft.tree.depths.expand_as(draft.tokens)[where]
        q = one_hot(token, truth.shape[-1]) if draft.q is None else draft.q[where]
        if draft.q is None:  # no other token can be kept or rejected
            f = rule.accept_at(target, q, token, depth).unsqueeze(-1).expand_as(q)
            mean = rule.residual(target, q, token, depth)
        else:
            f, mean = rule.expected(target, q, depth)
        # the rejected mass is summed: 1 - Σ q·f is not quite 0 where nothing is rejected
        accepted = q * f
        rejected = q * (1 - f)
        there = node >= 0
        drawn = rejected.sum(-1, keepdim=True) * mean
        ending = total_variation(accepted + drawn, ideal)
        cost = torch.where(last, ending, (accepted - ideal).clamp(min=0).sum(-1))
        bound += torch.where(there, tested * cost, 0.0)
        emitted += (reach * there).unsqueeze(-1) * torch.where(
            last.unsqueeze(-1), accepted + drawn, accepted
        )
        chance = 1 - at(f, token)
        total = rejected.sum(-1)
        weight = torch.where(there & ~last & (total > 0), weight * chance / total, weight)
        reach = torch.where(there, reach * total, reach)
        tested = tested * (chance if accepted_child is None else (node != accepted_child))
        if rank + 1 < draft.tree.max_children:
            target = rule.residual(target, q, token, depth)
            ideal = excess(ideal, accepted)
    divergence = kl_divergence(emitted, truth).clamp(min=0)
    return bound, torch.where(weight > 0, weight * divergence, 0.0)
