"""Verification: walk down the draft tree, accept a path, and draw the token after it. No other
module walks a tree.

Siblings (docs/methods.md; SJD-PAC, Theorem 2): the children of a node are tested in order. After a
rejection the residual of that test replaces p for the next sibling, which is tested against its own
q. The test at a node does not depend on the path to it, so all nodes of the tree are tested in
parallel, one sibling rank after the other: one step for a chain, `max_children` steps for a tree.
"""

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import (
    ACCEPTED,
    BONUS,
    RESAMPLED,
    Draft,
    Rule,
    Scores,
    Verdict,
)
from tempera.decoding.probabilities import at, sample, sample_with_mass
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import Tree, take, take_one
from tempera.errors import TemperaError


class TokenRule(Rule):
    """A rule that tests tokens one by one: f, the probability of accepting a token, and the
    residual, from which the replacement of a rejected one is drawn. Arguments broadcast over
    leading dimensions `...`; `depth` is 1-based, int64 [...].

    A rule is exact only as a pair. Write `accept` and `residual`; the other methods have defaults.
    """

    @property
    def local(self) -> bool:
        """Whether f looks at p(x) and q(x) alone, and the residual of a token that was not drawn
        (its q is one-hot) is p without it, renormalised. Verification then computes no other
        distribution. A rule that does not say so is verified as correctly, only more slowly.
        """
        return False

    @abstractmethod
    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """f at every token that q can draw, anything in [0, 1] at others: p and q [..., V] ->
        [..., V].
        """

    @abstractmethod
    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """The distribution from which the replacement of a rejected `token`, int64 [...], is drawn:
        [..., V], sums to 1.
        """

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """f at one token, [...]; override it where that is cheaper than f at all."""
        if self.local:
            mass = at(p, token).unsqueeze(-1)
            return self.accept(mass, at(q, token).unsqueeze(-1), depth).squeeze(-1)
        return at(self.accept(p, q, depth), token)

    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """For diagnostics: f of every token that q can draw, and the mean of the residual over
        rejected x ~ q, Σ_x q(x)·(1 - f(x))·residual(x), normalised (any distribution if nothing is
        ever rejected): [..., V] each. Override it if `residual` depends on the token.
        """
        return self.accept(p, q, depth), self.residual(p, q, torch.zeros_like(depth), depth)

    def accepts_greedily(self, p: Tensor, token: Tensor) -> Tensor:
        """Whether greedy decoding accepts a token, given p at temperature 1: [..., V] and [...] ->
        bool [...]. All siblings are tested against the same p. Override it if the rule also accepts
        other tokens than the most probable one.
        """
        return token == p.argmax(-1)

    def passed(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> Tensor:
        """Which nodes pass their tests, provided that the walk comes to them, bool [B, N]. Override
        it if a test looks at more than p and q: at the place in the image, or at other nodes. For
        the arguments see `Rule.walk`.
        """
        if scores.untempered is not None:
            return _greedily_accepted(draft, scores.p, scores.untempered, self)
        return uniforms[:, : draft.tree.nodes] < drafted_acceptance_probs(draft, scores.p, self)

    @override
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Rule.walk`: down to the last drafted token that passes, then the residual there."""
        passed = self.passed(draft, scores, sequences, uniforms)
        if passed.dtype != torch.bool or passed.shape != draft.tokens.shape:
            raise TemperaError(
                f"{type(self).__name__}.passed returned {passed.dtype} {list(passed.shape)}, not "
                f"torch.bool {list(draft.tokens.shape)}"
            )
        stop = draft.tree.walk(passed)
        if scores.untempered is not None:
            return stop, take_one(scores.p, stop)
        return stop, _residual_at(draft, scores.p, self, stop)


def verify(
    draft: Draft, scores: Scores, rule: Rule, sequences: Sequences, uniforms: Tensor
) -> Verdict:
    """Walk down the tree, accept a path, and draw one more token (Cool-SD, Algorithm 1, lines
    4-17).

    Args:
        draft: the proposal; N nodes.
        scores: the target's scores of the root and every node.
        rule: the acceptance rule.
        sequences: all tokens before this round.
        uniforms: draws in [0, 1), [B, N + 1] or more: one per node, and the last one for the token
            after the path.

    Raises:
        TemperaError: the draft branches, and the rule takes chains only.
    """
    p = scores.p
    tree = draft.tree
    if rule.chains_only and tree.max_children > 1:
        raise TemperaError(
            f"{type(rule).__name__} takes chains, but this draft has branches: draft a chain, or "
            "choose another rule",
            option="tree",
        )
    broken = [scores.has_nan, draft.has_nan]
    if tree.nodes:
        stop, probs = _walked(rule, rule.walk(draft, scores, sequences, uniforms), p)
        # one negative number makes the mass NaN, which costs no kernel of its own
        probs = probs.masked_fill(probs < 0, torch.nan)
        next_token, mass = sample_with_mass(probs, uniforms[:, -1])
        fits = (mass > 0) & (mass < torch.inf)
        if type(rule).walk is not TokenRule.walk:
            inside = (stop >= 0) & (stop <= tree.nodes)
            stop, fits = torch.where(inside, stop, 0), fits & inside
        broken.append(~fits)
    else:  # plain autoregression: nothing to test
        stop = torch.zeros_like(scores.has_nan, dtype=torch.int64)
        next_token = sample(p[:, 0], uniforms[:, -1])
    route = tree.route_to(stop)
    visited = route[:, :-1]
    tokens = torch.cat([next_token.unsqueeze(1), draft.tokens], 1).gather(1, route[:, 1:])
    accepted = tree.depth_at(stop)
    return Verdict(
        stop,
        visited,
        accepted,
        tokens,
        next_token,
        origin=_origins(tree, stop, accepted, tokens.shape[1]),
        logprob=p.flatten(1).gather(1, visited * p.shape[-1] + tokens).log(),
        broken=torch.stack(broken),
    )


def _walked(rule: Rule, returned: object, p: Tensor) -> tuple[Tensor, Tensor]:
    """What `Rule.walk` returned.

    Raises:
        TemperaError: it is something else than it has to be.
    """
    who = f"{type(rule).__name__}.walk"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TemperaError(f"{who} must return a node and the distribution of the next token")
    stop, probs = returned
    if stop.dtype != torch.int64 or stop.shape != p.shape[:1] or probs.shape != p[:, 0].shape:
        raise TemperaError(
            f"{who} returned {stop.dtype} {list(stop.shape)} and a distribution of "
            f"{list(probs.shape)}, not int64 {list(p.shape[:1])} and {list(p[:, 0].shape)}"
        )
    return stop, probs


def _greedily_accepted(draft: Draft, p: Tensor, untempered: Tensor, rule: TokenRule) -> Tensor:
    """Which drafted tokens greedy decoding keeps, bool [B, N]: the target's choice, and others that
    the rule takes for as good. A token that is as probable as the choice, which it can be after
    rounding and after top-p, is not the choice.
    """
    parents = 1 + draft.tree.parents
    chosen = p.flatten(1).gather(1, parents * p.shape[-1] + draft.tokens) >= 1
    soft = take(untempered, parents)
    as_probable = draft.tokens == soft.argmax(-1)
    return chosen | (rule.accepts_greedily(soft, draft.tokens) & ~as_probable)


def _origins(tree: Tree, stop: Tensor, accepted: Tensor, length: int) -> Tensor:
    """Origins of a round's tokens, int8 [B, places]; those after the drawn token are undefined."""
    ahead = torch.arange(length, device=stop.device)
    at_leaf = tree.at_stop(tree.last_children, stop) < 0
    drawn = torch.where(at_leaf, BONUS, RESAMPLED).unsqueeze(1)
    return torch.where(ahead < accepted.unsqueeze(1), ACCEPTED, drawn).to(torch.int8)


def drafted_acceptance_probs(draft: Draft, p: Tensor, rule: TokenRule) -> Tensor:
    """The probability that each drafted token passes its test, provided that the walk comes to it:
    what `TokenRule.passed` decides by, [B, N]. A token with p(x) ≥ 1 (a forced one) always does.
    """
    if draft.q is None and rule.local:
        return _certain_acceptance_probs(draft, p, rule)
    tree = draft.tree
    if tree.is_chain:
        q = draft.drawn_from(p.shape[-1])
        depths = tree.depths.expand_as(draft.tokens)
        return _acceptance_probs(rule, p[:, :-1], q, draft.tokens, depths)
    passing = torch.zeros_like(p[..., 0])  # the last column takes absent children
    target = p
    for rank, test in enumerate(tree.sibling_tests):
        if rank == 0:
            target = take(p, test.parents)
        else:  # the parents that have so many children are the first of those before
            earlier = draft.at(test.earlier, p.shape[-1])
            target = rule.residual(target[:, : test.parents.shape[-1]], *earlier)
        f = _acceptance_probs(rule, target, *draft.at(test.nodes, p.shape[-1]))
        passing.scatter_(1, test.nodes.remainder(1 + tree.nodes).expand_as(f), f)
    return passing[:, :-1]


def _acceptance_probs(
    rule: TokenRule, target: Tensor, q: Tensor, token: Tensor, depth: Tensor
) -> Tensor:
    """The probability that tokens pass their tests against `target`, [B, M, V] -> [B, M]; 0 for a
    token that its q cannot draw.
    """
    f = rule.accept_at(target, q, token, depth).masked_fill(at(q, token) <= 0, 0.0)
    return torch.where(at(target, token) >= 1, 1.0, f)


def _certain_acceptance_probs(draft: Draft, p: Tensor, rule: TokenRule) -> Tensor:
    """`drafted_acceptance_probs` of tokens that were not drawn, for a local rule: the k-th sibling
    is tested against p without the first k - 1 of them.
    """
    tree = draft.tree
    parents = (1 + tree.parents).expand_as(draft.tokens)
    own = p.flatten(1).gather(1, parents * p.shape[-1] + draft.tokens).double()
    if not tree.is_chain:
        same = draft.tokens.unsqueeze(-1) == draft.tokens.unsqueeze(-2)
        own = own.masked_fill((tree.earlier_siblings & same).any(-1), 0.0)  # rejected already
    gone = (tree.earlier_siblings.double() @ own.unsqueeze(-1)).squeeze(-1)
    left = (1 - gone).clamp(min=torch.finfo(gone.dtype).tiny)  # sums to 1 up to rounding
    mass = (own / left).float().unsqueeze(-1)
    depths = tree.depths.expand_as(draft.tokens)
    f = rule.accept(mass, torch.ones_like(mass), depths)
    return torch.where(mass >= 1, 1.0, f).squeeze(-1)


def _residual_at(draft: Draft, p: Tensor, rule: TokenRule, stop: Tensor) -> Tensor:
    """The distribution of the drawn token, [B, V], where the walk stops, counted 0..N with the root
    first, int64 [B]: at a leaf p, else the residual of the last child's test.
    """
    probs = take_one(p, stop)
    children = draft.tree.at_stop(draft.tree.children, stop)  # [B, K], -1 where there is none
    if draft.q is None and rule.local:
        tokens = take(draft.tokens, children)
        left = probs.gather(1, tokens).masked_fill(children >= 0, 0.0)
        without = probs.scatter_reduce(1, tokens, left, "amin")
        return torch.where((without > 0).any(-1, keepdim=True), without, probs)
    for child in children.unbind(1):
        q, token, depth = draft.at(child.unsqueeze(1), p.shape[-1])
        residual = rule.residual(probs, q.squeeze(1), token.squeeze(1), depth.squeeze(1))
        probs = torch.where((child < 0).unsqueeze(-1), probs, residual)
    return probs
