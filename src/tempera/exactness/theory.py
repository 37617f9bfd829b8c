"""Cool-SD's Theorem 2 by enumeration: the exact law of a rule on a chain, given all conditional
distributions as tables; and the perturbations by which the paper argues for annealing (Propositions
2, 4 and 5).

Tables are lists: `p[t]` and `q[t]` hold the target's and the draft's distribution after each of the
V^t prefixes of t tokens, [V^t, V], prefixes in lexicographic order. Laws of sequences of n tokens
are [V^n], likewise. Use float64. L is the draft length. Nothing here shares code with the decoding
loop except the rule, so that each checks the other (`tests/exactness/test_theory.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.probabilities import Tables, kl_divergence, normalise, total_variation
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule


@dataclass(frozen=True)
class Visit:
    """A round's visits to the prefixes of i tokens, where the draft of depth i + 1 is tested; all
    [V^i] or [V^i, V].

    Attributes:
        reach: probability that the round arrives here with all i drafts accepted, Q(x_1:i)·Π f.
        p: the target's distribution.
        accepted: q·f, the part of the draft's distribution that is kept.
        rejected: 1 - Σ q·f.
        residual: G, from which the replacement of a rejected token is drawn; the mean over rejected
            tokens if it depends on the token.
    """

    reach: Tensor
    p: Tensor
    accepted: Tensor
    rejected: Tensor
    residual: Tensor

    @property
    def emitted(self) -> Tensor:
        """The distribution of the token here: q·f + (1 - Σ q·f)·G."""
        return self.accepted + self.rejected.unsqueeze(-1) * self.residual


def visits(p: Tables, q: Tables, rule: TokenRule, length: int) -> Iterator[Visit]:
    """The L visits of a round from the empty prefix, top down."""
    reach = torch.ones(1, dtype=p[0].dtype)
    for depth in range(1, length + 1):
        here_p = p[depth - 1]
        here_q = q[depth - 1]
        depths = torch.full(here_p.shape[:1], depth)
        f = torch.where(here_p >= 1, 1.0, rule.accept(here_p, here_q, depths))
        accepted = here_q * f
        visit = Visit(
            reach,
            here_p,
            accepted,
            1 - accepted.sum(-1),
            _mean_residual(rule, here_p, here_q, here_q - accepted, depths),
        )
        yield visit
        reach = (visit.reach.unsqueeze(-1) * accepted).flatten()


def _mean_residual(
    rule: TokenRule, p: Tensor, q: Tensor, rejected: Tensor, depths: Tensor
) -> Tensor:
    """Σ_x rejected(x)·residual(x), normalised, token by token; the residual of token 0 where
    nothing is rejected. [..., V] -> [..., V].
    """
    residuals = []
    for token in range(p.shape[-1]):
        tokens = torch.full_like(depths, token)
        residuals.append(rule.residual(p, q, tokens, depths))
    mixed = (rejected.unsqueeze(-1) * torch.stack(residuals, dim=-2)).sum(-2)
    return normalise(mixed, otherwise=residuals[0])


def expected_emitted(p: Tables, q: Tables, rule: TokenRule, length: int) -> float:
    """E[τ + 1] of a round (Eq. 7)."""
    return 1 + sum(
        float((visit.reach.unsqueeze(-1) * visit.accepted).sum())
        for visit in visits(p, q, rule, length)
    )


def tv_bound(p: Tables, q: Tables, rule: TokenRule, length: int) -> float:
    """The bound on TV(P̂, P) of a round (Eq. 8)."""
    return sum(
        float((visit.reach * total_variation(visit.emitted, visit.p)).sum())
        for visit in visits(p, q, rule, length)
    )


def kl_bound(p: Tables, q: Tables, rule: TokenRule, length: int) -> float:
    """The expected sum of KL(law of the token at a visit ‖ p) over a round, in nats; by the chain
    rule at least KL(P̂ ‖ P).
    """
    return sum(
        float((visit.reach * kl_divergence(visit.emitted, visit.p)).sum())
        for visit in visits(p, q, rule, length)
    )


def perturbed(
    p: Tables, q: Tables, rule: TokenRule, changes: Sequence[float]
) -> tuple[float, float]:
    """E[τ + 1] (Eq. 7) and the TV bound with G* (Eq. 61-64, halved) of chains of as many drafts as
    there are changes, if c_i is added to every f_i (Propositions 2 and 4).

    As in the paper's algebra f_i + c_i is not kept within [0, 1]: where f_i is near 1 and c_i > 0,
    this is no rule, and the numbers are those of the formulas.
    """
    reach = torch.ones(1, dtype=p[0].dtype)
    tokens = 1.0
    bound = 0.0
    for depth, change in enumerate(changes, start=1):
        here_p = p[depth - 1]
        here_q = q[depth - 1]
        f = rule.accept(here_p, here_q, torch.full(here_p.shape[:1], depth))
        accepted = here_q * (f + change)
        local = ((here_p - accepted).abs().sum(-1) - (here_q - accepted).sum(-1)) / 2
        bound += float((reach * local).sum())
        reach = (reach.unsqueeze(-1) * accepted).flatten()
        tokens += float(reach.sum())
    return tokens, bound


def same_length(p: Tables, q: Tables, rule: TokenRule, change: float) -> float:
    """c_1 that keeps the expected length of chains of two drafts if c_2 = `change` (Eq. 14 and
    59).
    """
    first = q[0] * rule.accept(p[0], q[0], torch.full(p[0].shape[:1], 1))
    second = q[1] * rule.accept(p[1], q[1], torch.full(p[1].shape[:1], 2))
    accepted = float((q[0].flatten() * second.sum(-1)).sum())
    return -float(first.sum()) * change / (1 + accepted + change)


def annealing_margin(p: Tables, q: Tables, rule: TokenRule) -> float:
    """E_Q[f_2] − Δ(f_2) = 1 − E_Q[Σ |P − Q·f_2|] (Proposition 5): positive if a smaller f_2 and a
    larger f_1 lower the bound under Assumption 1. At least 1 − 2·E_Q[TV(P, Q)] if the rule accepts
    no less than exact decoding, so at least 1/5 if every TV(P, Q) ≤ 2/5 (Assumption 2).
    """
    f = rule.accept(p[1], q[1], torch.full(p[1].shape[:1], 2))
    return 1 - float((q[0].flatten() * (p[1] - q[1] * f).abs().sum(-1)).sum())


def one_round_law(p: Tables, q: Tables, rule: TokenRule, length: int) -> Tensor:
    """P̂: L + 1 tokens, the first from one round and the rest from the target (Eq. 40-42, whose
    solution is Eq. 43-48). [V^(L+1)].
    """
    law = torch.ones(1, dtype=p[0].dtype)
    for visit in visits(p, q, rule, length):
        change = visit.reach.unsqueeze(-1) * (visit.emitted - visit.p)
        law = (law.unsqueeze(-1) * visit.p + change).flatten()
    return (law.unsqueeze(-1) * p[length]).flatten()


def decoded_law(p: Tables, q: Tables, rule: TokenRule, tree: Tree, tokens: int) -> Tensor:
    """The law of an image of `tokens` tokens decoded round by round with a static tree whose
    siblings are drawn without replacement: one draw, one test and one residual after the other
    (SJD-PAC, Theorem 2, for any rule). [V^tokens].

    Drafts past the end of the image are dropped. If fewer tokens than siblings have mass, the last
    one is repeated.
    """
    # the probability that a round begins after each prefix of 0 … `tokens` tokens
    begins = [p[0].new_zeros(p[0].shape[-1] ** t) for t in range(tokens + 1)]
    begins[0][0] = 1
    children = [[child for child in family if child >= 0] for family in tree.children.tolist()]

    def walk(node: int, length: int, depth: int, weight: Tensor) -> None:
        """A round is at a node (0 is the root) after each prefix of `length` tokens with
        probability `weight` [V^length].
        """
        if length == tokens:
            begins[length] += weight
            return
        arrive = {child: torch.zeros_like(begins[length + 1]) for child in children[node]}

        def test(siblings: list[int], target: Tensor, draft: Tensor, weight: Tensor) -> None:
            """Test the siblings left against p without those rejected, then draw from it."""
            if not siblings:
                begins[length + 1] += (weight.unsqueeze(-1) * target).flatten()
                return
            depths = torch.full(weight.shape, depth)
            drawn = weight.unsqueeze(-1) * draft
            f = torch.where(target >= 1, 1.0, rule.accept(target, draft, depths))
            arrive[siblings[0]] += (drawn * f).flatten()
            for token, rejected in enumerate((drawn * (1 - f)).unbind(-1)):
                if rejected.any():
                    tokens_here = torch.full_like(depths, token)
                    residual = rule.residual(target, draft, tokens_here, depths)
                    rest = draft.index_fill(-1, torch.tensor([token]), 0.0)
                    test(siblings[1:], residual, normalise(rest, otherwise=draft), rejected)

        test(children[node], p[length], q[length], weight)
        for child, reached in arrive.items():
            walk(1 + child, length + 1, depth + 1, reached)

    for start in range(tokens):
        walk(0, start, 1, begins[start])
    return begins[tokens]


def sequence_law(p: Tables, tokens: int) -> Tensor:
    """The law of `tokens` tokens drawn one by one from the tables, [V^tokens]."""
    law = torch.ones(1, dtype=p[0].dtype)
    for conditional in p[:tokens]:
        law = (law.unsqueeze(-1) * conditional).flatten()
    return law
