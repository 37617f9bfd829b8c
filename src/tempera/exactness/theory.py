"""Cool-SD's Theorem 2 by enumeration: the exact law of a rule on a chain, given all conditional
distributions as tables.

Tables are lists: `p[t]` and `q[t]` hold the target's and the draft's distribution after each of the
V^t prefixes of t tokens, [V^t, V], prefixes in lexicographic order. Laws of sequences of n tokens
are [V^n], likewise. Use float64. L is the draft length. Nothing here shares code with the decoding
loop except the rule, so that each checks the other (`tests/exactness/test_theory.py`).

`Chains` and `optimal_schedule` invert Theorem 2: the relaxation schedule that minimises the
bound (Eq. 8) at a given expected length (Eq. 7), on tables or on chains recorded along real decodes
(`tempera.evaluation.calibration`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.interfaces import Rule
from tempera.decoding.probabilities import Tables, kl_divergence, normalise, total_variation
from tempera.decoding.trees import Tree


@dataclass(frozen=True)
class Visit:
    """A round's visits to the prefixes of i tokens, where the draft of depth i + 1 is tested; all
    [V^i] or [V^i, V].

    Attributes:
        reach: probability that the round arrives here with all i drafts accepted, Q(x_1:i)·Π f.
        p: the target's distribution.
        kept: q·f, the part of the draft's distribution that is kept.
        rejected: 1 - Σ q·f.
        residual: G, the distribution that replaces a rejected token; the mean over rejected tokens
            if it depends on the token.
    """

    reach: Tensor
    p: Tensor
    kept: Tensor
    rejected: Tensor
    residual: Tensor

    @property
    def law(self) -> Tensor:
        """The law of the token here: q·f + (1 - Σ q·f)·G."""
        return self.kept + self.rejected.unsqueeze(-1) * self.residual


def visits(
    p: Tables, q: Tables, rule: Rule, length: int, start: Tensor | None = None, prefix: int = 0
) -> Iterator[Visit]:
    """The L visits of a round, top down. `start` [V^prefix] weighs the prefixes it starts from; the
    empty one by default.
    """
    reach = torch.ones(1, dtype=p[0].dtype) if start is None else start
    for depth in range(1, length + 1):
        here_p, here_q = p[prefix + depth - 1], q[prefix + depth - 1]
        depths = torch.full(here_p.shape[:1], depth)
        f = torch.where(here_p >= 1, 1.0, rule.accept(here_p, here_q, depths))
        kept = here_q * f
        visit = Visit(
            reach,
            here_p,
            kept,
            1 - kept.sum(-1),
            _mean_residual(rule, here_p, here_q, here_q - kept, depths),
        )
        yield visit
        reach = (visit.reach.unsqueeze(-1) * kept).flatten()


def _mean_residual(rule: Rule, p: Tensor, q: Tensor, rejected: Tensor, depths: Tensor) -> Tensor:
    """Σ_x rejected(x)·residual(x), normalised, token by token; the residual of token 0 where
    nothing is rejected. [..., V] -> [..., V].
    """
    each = [
        rule.residual(p, q, torch.full_like(depths, token), depths) for token in range(p.shape[-1])
    ]
    mixed = (rejected.unsqueeze(-1) * torch.stack(each, -2)).sum(-2)
    return normalise(mixed, otherwise=each[0])


def expected_emitted(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """E[τ + 1] of a round (Eq. 7)."""
    return 1 + sum(
        float((visit.reach.unsqueeze(-1) * visit.kept).sum())
        for visit in visits(p, q, rule, length)
    )


def tv_bound(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """The bound on TV(P̂, P) of a round (Eq. 8)."""
    return sum(
        float((visit.reach * total_variation(visit.law, visit.p)).sum())
        for visit in visits(p, q, rule, length)
    )


def kl_bound(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """The expected sum of KL(law of the token at a visit ‖ p) over a round, in nats; by the chain
    rule at least KL(P̂ ‖ P).
    """
    return sum(
        float((visit.reach * kl_divergence(visit.law, visit.p)).sum())
        for visit in visits(p, q, rule, length)
    )


def one_round_law(p: Tables, q: Tables, rule: Rule, length: int) -> Tensor:
    """P̂: L + 1 tokens, the first from one round and the rest from the target (Eq. 40-42, whose
    solution is Eq. 43-48). [V^(L+1)].
    """
    law = torch.ones(1, dtype=p[0].dtype)
    for visit in visits(p, q, rule, length):
        law = (
            law.unsqueeze(-1) * visit.p + visit.reach.unsqueeze(-1) * (visit.law - visit.p)
        ).flatten()
    return (law.unsqueeze(-1) * p[length]).flatten()


def decoded_law(p: Tables, q: Tables, rule: Rule, length: int, tokens: int) -> Tensor:
    """The law of an image of `tokens` tokens decoded round by round with chains of L drafts, from
    the loop's own definition. [V^tokens].

    Drafts past the end of the image are dropped.
    """
    vocab_size = p[0].shape[-1]
    # probability that a round begins at each prefix
    begins = [torch.zeros(vocab_size**t, dtype=p[0].dtype) for t in range(tokens + 1)]
    begins[0][0] = 1
    for t in range(tokens):
        inside = min(length, tokens - t)
        accepted = begins[t]
        for offset, visit in enumerate(
            visits(p, q, rule, inside, start=begins[t], prefix=t), start=t + 1
        ):
            begins[offset] += (
                (visit.reach * visit.rejected).unsqueeze(-1) * visit.residual
            ).flatten()
            accepted = (visit.reach.unsqueeze(-1) * visit.kept).flatten()
        if t + inside == tokens:
            begins[tokens] += accepted
        else:
            begins[t + inside + 1] += (accepted.unsqueeze(-1) * p[t + inside]).flatten()
    return begins[tokens]


def tree_law(p: Tables, q: Tables, rule: Rule, tree: Tree, tokens: int) -> Tensor:
    """The law of an image of `tokens` tokens decoded round by round with a static tree whose
    siblings are drawn without replacement: one draw, one test and one residual after the other
    (SJD-PAC, Theorem 2, for any rule). [V^tokens].

    Drafts past the end of the image are dropped. If fewer tokens than siblings have mass, the last
    one is repeated.
    """
    # probability that a round begins at each prefix
    begins = [torch.zeros(p[0].shape[-1] ** t, dtype=p[0].dtype) for t in range(tokens + 1)]
    begins[0][0] = 1
    children = [[child for child in family if child >= 0] for family in tree.children.tolist()]
    for t in range(tokens):
        for prefix, weight in enumerate(begins[t].tolist()):
            if weight > 0:
                _walk(p, q, rule, children, begins, (t, prefix), 0, 1, weight)
    return begins[tokens]


def _walk(
    p: Tables,
    q: Tables,
    rule: Rule,
    children: list[list[int]],
    begins: Tables,
    at: tuple[int, int],
    node: int,
    depth: int,
    weight: float,
) -> None:
    """Add to `begins` the positions at which a round ends, given that it is at a node (0 is the
    root) after the prefix `at` with probability `weight`.
    """
    length, prefix = at
    vocab_size = p[0].shape[-1]
    if length == len(begins) - 1:
        begins[length][prefix] += weight
        return

    def end(law: Tensor, weight: float) -> None:
        begins[length + 1][prefix * vocab_size : (prefix + 1) * vocab_size] += weight * law

    def test(siblings: list[int], target: Tensor, draft: Tensor, weight: float) -> None:
        """Test the siblings left against p without those rejected, then draw from it."""
        if not siblings:
            end(target, weight)
            return
        for token in draft.nonzero().flatten():
            kept = (
                1.0
                if target[token] >= 1
                else float(rule.accept_at(target, draft, token, torch.tensor(depth)))
            )
            drawn = weight * float(draft[token])
            if kept > 0:
                onward = length + 1, prefix * vocab_size + int(token)
                _walk(
                    p, q, rule, children, begins, onward, 1 + siblings[0], depth + 1, drawn * kept
                )
            if kept < 1:
                rest = normalise(draft.scatter(0, token, 0.0), otherwise=draft)
                test(
                    siblings[1:],
                    rule.residual(target, draft, token, torch.tensor(depth)),
                    rest,
                    drawn * (1 - kept),
                )

    test(children[node], p[length][prefix], q[length][prefix], weight)


def sequence_law(p: Tables, tokens: int) -> Tensor:
    """The law of `tokens` tokens drawn one by one from the tables, [V^tokens]."""
    law = torch.ones(1, dtype=p[0].dtype)
    for conditional in p[:tokens]:
        law = (law.unsqueeze(-1) * conditional).flatten()
    return law
