"""Block verification: the algorithm by hand, and how many tokens it keeps. Its law is in
exactness/test_laws.py.
"""

import math

import pytest
import torch
from random_drafts import SMALL, random_draft

from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.probabilities import one_hot, sample
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.jacobi import jacobi, scd
from tempera.errors import TemperaError
from tempera.exactness.tables import TableTarget, emit
from tempera.rules.standard import BlockVerification


def by_hand(p, q, tokens):
    """Algorithm 2: the probability that each prefix passes, and what the next token is drawn from
    behind it. p [L + 1, V], q [L, V].
    """
    length, weight = len(tokens), 1.0
    laws, passing = [], []
    for i in range(length):
        if i:
            weight = min(1.0, weight * (p[i - 1, tokens[i - 1]] / q[i - 1, tokens[i - 1]]).item())
        lacking = (weight * p[i] - q[i]).clamp(min=0)
        wanting = lacking.sum().item()
        passing.append(wanting / (wanting + 1 - weight) if wanting + 1 - weight > 0 else 1.0)
        laws.append(lacking / lacking.sum() if wanting > 0 else p[i])
    weight = min(1.0, weight * (p[length - 1, tokens[-1]] / q[length - 1, tokens[-1]]).item())
    return [*laws, p[length]], [*passing, weight]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_each_row_follows_the_paper(length):
    draft, p, uniforms = random_draft(60, Tree.chain(length), forced=0.1)
    verdict = verify(draft, Scores(p, p), BlockVerification(), None, uniforms)
    for row in range(60):
        laws, passing = by_hand(p[row].double(), draft.q[row].double(), draft.tokens[row].tolist())
        passed = [i for i in range(1, length + 1) if uniforms[row, i - 1] < passing[i]]
        kept = max(passed, default=0)
        assert verdict.accepted[row] == kept
        assert verdict.path[row].tolist() == [*range(kept), *[-1] * (length - kept)]
        assert verdict.next_token[row] == sample(laws[kept].float(), uniforms[row, -1])
    assert verdict.accepted.unique().numel() >= min(4, length + 1)


def test_as_many_tokens_are_kept_as_the_prefixes_that_pass_say():
    draft, p, _ = random_draft(40, Tree.chain(3))
    for row, found in enumerate(BlockVerification().prefix_acceptance_probs(draft, p)):
        _, passing = by_hand(p[row].double(), draft.q[row].double(), draft.tokens[row].tolist())
        none = [1 - math.prod(1 - one for one in passing[i:]) for i in (1, 2, 3)]
        assert found.tolist() == pytest.approx(none, abs=1e-6)


def test_a_token_that_neither_can_draw_is_not_kept():
    p = torch.tensor([[[0.3, 0.7], [0.0, 1.0], [0.3, 0.7]]])
    q = torch.tensor([[[0.6, 0.4], [0.0, 1.0]]])
    draft = Draft(torch.zeros(1, 2, dtype=torch.int64), q, Tree.chain(2))
    assert BlockVerification().prefix_acceptance_probs(draft, p)[0].tolist() == [0, 0]


def test_a_product_of_ratios_needs_another_residual():
    """SJD-PV and SJD-SV keep a run of guesses if one draw is below the product of its ratios, drop
    the last guess until that holds, and then draw from Norm[p - q]+. Of two guesses, enumerated,
    this emits token 1 first with probability 0.13, where the target's is 0.1, and block
    verification, which has its own residual, with 0.1.
    """
    q, p = torch.tensor([[0.5, 0.5]] * 2), torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5]])
    product, block = 0.0, 0.0
    for second in (0, 1):  # after a first guess of 1; a rejected first guess is replaced by 0
        first, both = (p[0, 1] / q[0, 1]).item(), (p[1, second] / q[1, second]).item()
        chance = (q[0, 1] * q[1, second]).item()
        product += chance * min(1, max(first, first * both))
        draft = Draft(torch.tensor([[1, second]]), q[None], Tree.chain(2))
        block += chance * BlockVerification().prefix_acceptance_probs(draft, p[None])[0, 0].item()
    assert product == pytest.approx(0.13)
    assert block == pytest.approx(0.1)


# What is refused


@pytest.mark.parametrize("make", [jacobi, scd])
def test_surviving_guesses_are_refused(make):
    target = TableTarget(3, 4)
    with pytest.raises(TemperaError, match="draw new ones"):
        emit(target, make(target, 3), BlockVerification(), rows=2)


def test_a_tree_with_branches_is_refused():
    for tree in (SMALL, Tree.from_parents(torch.tensor([[-1, -1], [-1, 0]]))):
        draft, p, uniforms = random_draft(2, tree)
        with pytest.raises(TemperaError, match="draft a chain"):
            verify(draft, Scores(p, p), BlockVerification(), None, uniforms)
    chains = Tree.from_parents(torch.tensor([[-1, 0, 1]]).repeat(2, 1))
    draft, p, uniforms = random_draft(2, chains)
    verify(draft, Scores(p, p), BlockVerification(), None, uniforms)


def test_a_perfect_draft_is_kept_whole():
    draft, p, uniforms = random_draft(200, Tree.chain(4))
    certain = torch.cat([one_hot(draft.tokens, 6), p[:, -1:]], 1)
    for law in (p, certain):
        same = Draft(sample(law[:, :-1], torch.rand(200, 4)), law[:, :-1], draft.tree)
        assert (
            verify(same, Scores(law, law), BlockVerification(), None, uniforms).accepted.eq(4).all()
        )
