"""Cool-SD's Theorem 2 by enumeration: what a rule does on a chain, exactly, where every conditional distribution is in a table.

Tables are lists: `p[t]` and `q[t]` hold the target's and the draft's distribution after each of the V^t prefixes of t tokens, [V^t, V],
prefixes in lexicographic order. Laws of sequences of n tokens are [V^n], likewise. Use float64. L is the draft length. Nothing here shares
code with the decoding loop except the rule itself, so that each checks the other (`tests/test_theory.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.types import Rule

Tables = list[Tensor]


@dataclass(frozen=True)
class Visit:
    """A round's visits to the prefixes of i tokens, where the draft of depth i + 1 is tested; all [V^i] or [V^i, V].

    Attributes:
        reach: probability that the round gets here with all i drafts accepted, Q(x_1:i)·Π f.
        p: the target's distribution.
        kept: q·f, the part of the draft's distribution that is kept.
        rejected: 1 - Σ q·f.
        residual: G, what replaces a rejected token.
    """

    reach: Tensor
    p: Tensor
    kept: Tensor
    rejected: Tensor
    residual: Tensor

    @property
    def law(self) -> Tensor:
        """What the token here is drawn from: q·f + (1 - Σ q·f)·G."""
        return self.kept + self.rejected.unsqueeze(-1) * self.residual


def visits(p: Tables, q: Tables, rule: Rule, length: int, start: Tensor | None = None, prefix: int = 0) -> Iterator[Visit]:
    """The L visits of a round, top down. `start` [V^prefix] weighs the prefixes it starts from; the empty one by default."""
    reach = torch.ones(1, dtype=p[0].dtype) if start is None else start
    for depth in range(1, length + 1):
        here_p, here_q = p[prefix + depth - 1], q[prefix + depth - 1]
        depths = torch.full(here_p.shape[:1], depth)
        f = torch.where(here_p >= 1, 1.0, rule.accept_probs(here_p, here_q, depths))
        kept = here_q * f
        residual = rule.residual(here_p, here_q, torch.zeros_like(depths), depths)
        visit = Visit(reach, here_p, kept, 1 - kept.sum(-1), residual)
        yield visit
        reach = (visit.reach.unsqueeze(-1) * kept).flatten()


def expected_emitted(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """E[τ + 1] of a round (Eq. 7)."""
    return 1 + sum(float((visit.reach.unsqueeze(-1) * visit.kept).sum()) for visit in visits(p, q, rule, length))


def tv_bound(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """The bound on TV(P̂, P) of a round (Eq. 8)."""
    return sum(float((visit.reach * total_variation(visit.law, visit.p)).sum()) for visit in visits(p, q, rule, length))


def kl_bound(p: Tables, q: Tables, rule: Rule, length: int) -> float:
    """The expected sum of KL(law of the token at a visit ‖ p) over a round, in nats; by the chain rule at least KL(P̂ ‖ P)."""
    return sum(float((visit.reach * kl_divergence(visit.law, visit.p)).sum()) for visit in visits(p, q, rule, length))


def one_round_law(p: Tables, q: Tables, rule: Rule, length: int) -> Tensor:
    """P̂: L + 1 tokens, the first from one round and the rest from the target (Eq. 40-42, whose solution is Eq. 43-48). [V^(L+1)]."""
    law = torch.ones(1, dtype=p[0].dtype)
    for visit in visits(p, q, rule, length):
        law = (law.unsqueeze(-1) * visit.p + visit.reach.unsqueeze(-1) * (visit.law - visit.p)).flatten()
    return (law.unsqueeze(-1) * p[length]).flatten()


def decoded_law(p: Tables, q: Tables, rule: Rule, length: int, tokens: int) -> Tensor:
    """The law of an image of `tokens` tokens decoded round by round with chains of L drafts, from the loop's own definition. [V^tokens].

    Drafts past the end of the image are dropped.
    """
    vocab_size = p[0].shape[-1]
    begins = [torch.zeros(vocab_size**t, dtype=p[0].dtype) for t in range(tokens + 1)]  # probability that a round begins at each prefix
    begins[0][0] = 1
    for t in range(tokens):
        inside = min(length, tokens - t)
        accepted = begins[t]
        for offset, visit in enumerate(visits(p, q, rule, inside, start=begins[t], prefix=t), start=t + 1):
            begins[offset] += ((visit.reach * visit.rejected).unsqueeze(-1) * visit.residual).flatten()
            accepted = (visit.reach.unsqueeze(-1) * visit.kept).flatten()
        if t + inside == tokens:
            begins[tokens] += accepted
        else:
            begins[t + inside + 1] += (accepted.unsqueeze(-1) * p[t + inside]).flatten()
    return begins[tokens]


def sequence_law(p: Tables, tokens: int) -> Tensor:
    """The law of `tokens` tokens drawn one by one from the tables, [V^tokens]."""
    law = torch.ones(1, dtype=p[0].dtype)
    for conditional in p[:tokens]:
        law = (law.unsqueeze(-1) * conditional).flatten()
    return law


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """½ Σ |a - b| along the last dimension."""
    return 0.5 * (a - b).abs().sum(-1)


def kl_divergence(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·log(a/b) along the last dimension, in nats; 0·log 0 = 0."""
    return torch.where(a > 0, a * (a / b).log(), 0.0).sum(-1)
