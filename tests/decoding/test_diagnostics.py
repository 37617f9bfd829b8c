"""Bias that a round adds, by its definition: equation 8 on chains, every test on trees."""

import math
from dataclasses import replace

import pytest
import torch
from near_codes import near, near_rules
from random_drafts import SMALL, random_draft
from table_models import RULE
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.diagnostics import diagnose, has_bounds, mean_terms
from tempera.decoding.interfaces import Draft, Rule, Scores
from tempera.decoding.probabilities import kl_divergence, one_hot, total_variation
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.mixture import Mixture
from tempera.rules.neighbourhood import LanternPP
from tempera.rules.standard import BlockVerification, Exact, Match, Relaxed

TREES = {
    "chain": Tree.chain(3),
    "tree": SMALL,
    "tree per row": Tree.from_parents(SMALL.parents.repeat(40, 1)),
}


def terms(*round):
    """TV(p, q) and the terms of the two bounds."""
    return diagnose(*round).values()


@pytest.mark.parametrize(
    "rule", [RULE, Relaxed((2.0, 0.6, 1.3), "vanilla"), LanternPP(near(6, 3), 1)]
)
@pytest.mark.parametrize("tree", TREES)
def test_the_terms_add_up_over_the_tests_performed(rule, tree):
    draft, p, uniforms = random_draft(40, TREES[tree], forced=0.2)
    verdict = verify(draft, Scores(p, p), rule, None, uniforms)
    found = diagnose(draft, verdict, p, rule)
    parents = draft.tree.parents.expand(40, -1).tolist()
    for row in range(40):
        path = verdict.path[row].tolist()
        for index in range(int(verdict.accepted[row]) + 1):
            node, accepted_child = path[index - 1] if index else -1, (*path, -1)[index]
            expected = by_definition(parents[row], draft, p, rule, row, node, accepted_child)
            terms = [found[name][row, index].item() for name in ("tv", "bound", "kl")]
            assert terms == pytest.approx(expected, abs=2e-6, nan_ok=True)


def by_definition(parents, draft, p, rule, row, node, accepted_child):
    """TV(p, q), and the terms of the docstring of `diagnose`, for one visited node. On a chain the
    second is equation 8.
    """
    here = target = ideal = p[row, 1 + node].double()
    children = [n for n, parent in enumerate(parents) if parent == node]
    if not children:
        return math.nan, 0.0, 0.0
    depth = draft.tree.depths.expand(len(p), -1)[row, children[0]]
    bound, undecided, whole, reach, weight = 0.0, True, torch.zeros_like(target), 1.0, 1.0
    for child in children:
        q, token = draft.q[row, child].double(), draft.tokens[row, child]
        f = torch.where(target >= 1, 1.0, rule.accept(target, q, depth))
        kept = q * f
        rejected, residual = (q * (1 - f)).sum().item(), rule.residual(target, q, token, depth)
        each = [rule.residual(target, q, torch.tensor(one), depth) for one in range(len(q))]
        left = (ideal - kept).clamp(min=0)
        if child == children[-1]:
            law = kept + (q * (1 - f)) @ torch.stack(each)
            bound += undecided * total_variation(law, ideal).item()
            whole += reach * law
        else:
            bound += undecided * (kept - ideal).clamp(min=0).sum().item()
            whole += reach * kept
            reach = reach * rejected
            weight = weight * ((1 - f[token]).item() / rejected if rejected > 0 else 1.0)
        undecided = undecided and child != accepted_child
        target, ideal = residual, left / left.sum() if left.sum() > 0 else ideal
    distance = total_variation(here, draft.q[row, children[0]].double()).item()
    return distance, bound, weight * kl_divergence(whole, here).item()


def test_the_mean_terms_of_a_chain_are_those_of_its_visits():
    """At every node and at a leaf: one test's terms do not depend on what comes of it."""
    draft, p, uniforms = random_draft(50, Tree.chain(3))
    verdict = verify(draft, Scores(p, p), RULE, None, uniforms)
    found = diagnose(draft, verdict, p, RULE)
    visited = found["bound"], found["kl"]
    for mean, terms in zip(mean_terms(draft, p, RULE), visited, strict=True):
        assert mean.shape == (50, 4)
        for row, accepted in enumerate(verdict.accepted.tolist()):
            torch.testing.assert_close(mean[row, : accepted + 1], terms[row, : accepted + 1])


def test_an_impossible_token_costs_infinitely_many_nats():
    p, q = torch.tensor([[[1 - 1e-7, 1e-7, 0.0]] * 2]), torch.tensor([[[0.0, 0.0, 1.0]]])
    draft = Draft(torch.tensor([[2]]), q, Tree.chain(1))

    class KeepAll(Exact):
        def accept(self, p, q, depth):
            return torch.ones_like(p)

    verdict = verify(draft, Scores(p, p), KeepAll(), None, torch.tensor([[0.5, 0.5]]))
    tv, bound, kl = terms(draft, verdict, p, KeepAll())
    assert tv[0, 0] == bound[0, 0] == 1
    assert kl[0, 0] == math.inf


class Whole(Rule):
    """Keeps the whole chain."""

    def walk(self, draft, scores, images, uniforms):
        return torch.full((len(scores.p),), draft.tree.nodes), scores.p[:, -1]


class Lenient(Exact):
    """A test of its own: every second place is kept."""

    def passed(self, draft, scores, images, uniforms):
        return super().passed(draft, scores, images, uniforms) | (draft.tree.depths % 2 == 0)


@pytest.mark.parametrize("rule", [Whole(), Lenient()])
def test_a_relaxed_rule_that_couples_tests_has_no_bounds_but_a_tv(rule):
    draft, p, uniforms = random_draft(2, Tree.chain(2))
    verdict = verify(draft, Scores(p, p), rule, None, uniforms)
    found = diagnose(draft, verdict, p, rule)
    assert found.keys() == {"tv"} and not has_bounds(rule, greedy=False)
    exact = diagnose(draft, verdict, p, Exact())
    torch.testing.assert_close(found["tv"], exact["tv"], rtol=0, atol=0, equal_nan=True)
    target = TableTarget()
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(2))
    trace = emit(target, drafter, rule, rows=50, diagnostics=True).trace
    assert trace.bound is None and trace.kl is None and trace.tv is not None


@pytest.mark.parametrize("rule", [Whole(), Lenient(), Exact(), BlockVerification()])
def test_in_greedy_decoding_every_rule_has_bounds(rule):
    draft, soft, uniforms = random_draft(20, Tree.chain(2))
    p = one_hot(soft.argmax(-1), 6)
    verdict = verify(draft, Scores(p, p, soft), rule, None, uniforms)
    found = diagnose(draft, verdict, p, rule, soft)
    wrong = p.gather(1, verdict.visited.unsqueeze(-1).expand(-1, -1, 6))
    wrong = 1 - wrong.gather(-1, verdict.tokens.unsqueeze(-1)).squeeze(-1)
    assert found["bound"].equal(wrong) and has_bounds(rule, greedy=True)
    emitted = torch.arange(3) <= verdict.accepted.unsqueeze(1)
    assert bool(wrong[emitted].any()) == (not rule.exact)


@pytest.mark.parametrize(("tree", "rule"), [(Tree.chain(3), BlockVerification()), (SMALL, Match())])
def test_an_exact_rule_that_couples_depths_adds_nothing(tree, rule):
    draft, p, uniforms = random_draft(50, tree)
    verdict = verify(draft, Scores(p, p), rule, None, uniforms)
    tv, bound, kl = terms(draft, verdict, p, rule)
    assert bound.eq(0).all()
    assert kl.eq(0).all()
    torch.testing.assert_close(tv[:, 0], 0.5 * (p[:, 0] - draft.q[:, 0]).abs().sum(-1))


LOCAL = Exact(), Relaxed((2.0, 1.2)), Relaxed((2.0, 0.5), "vanilla"), Mixture(0.3)


@pytest.mark.parametrize("rule", [*near_rules(6).values(), Relaxed((2.0, 0.5)), *LOCAL], ids=repr)
def test_certain_tokens_have_the_terms_of_a_one_hot_q(rule):
    draft, p, uniforms = random_draft(200, SMALL, forced=0.2 if rule in LOCAL else 0.0)
    ranks = SMALL.earlier_siblings.sum(-1).expand_as(draft.tokens)
    certain = replace(draft, tokens=(draft.tokens[:, :1] + ranks) % 6, q=None)
    if rule in LOCAL:  # siblings may be the same token
        certain = replace(draft, q=None)
    dense = replace(certain, q=one_hot(certain.tokens, 6))
    verdict = verify(dense, Scores(p, p), rule, None, uniforms)
    for found, expected in zip(
        terms(certain, verdict, p, rule), terms(dense, verdict, p, rule), strict=True
    ):
        torch.testing.assert_close(found, expected, equal_nan=True)


class FromLists(TorchDispatchMode):
    """Counts tensors that are made of numbers on the host, each a copy to the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **kwargs or {})


def test_a_diagnosed_round_copies_nothing_to_the_device():
    target = TableTarget()
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(2))
    emit(target, drafter, Exact(), rows=5)  # makes what is made once
    counts = []
    for diagnostics in (False, True):
        with FromLists() as made:
            emit(target, drafter, Exact(), rows=5, diagnostics=diagnostics)
        counts.append(made.count)
    assert counts[0] == counts[1]
