import math

import pytest
import torch
from random_drafts import SMALL, Spy, random_draft

from tempera.decoding.diagnostics import diagnose
from tempera.decoding.interfaces import Scores
from tempera.decoding.probabilities import at, kl_divergence, total_variation
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.standard import Exact, Match, Relaxed

RULE = Relaxed((2.0, 0.6, 1.3))


def run(tree, rule=RULE, rows=60, **options):
    target = TableTarget(4, 7)
    spy = Spy(StaticTreeDrafter(TableDraft(target, noise=2.0), tree))
    return emit(target, spy, rule, rows=rows, **options), spy.heard


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL], ids=["chain", "tree"])
def test_every_token_knows_how_it_came_about(tree):
    output, heard = run(tree)
    trace, parents = output.trace, tree.parents.tolist()
    for row in range(60):
        place, origin, logprob, rounds = [], [], [], []
        for number, (_, verdict, scores, emitted) in enumerate(heard):
            accepted = int(verdict.accepted[row])
            for index in range(int(emitted[row])):
                node = int(verdict.path[row, index - 1]) if index else -1
                drawn = RESAMPLED if node in parents else BONUS
                place.append(index + 1)
                rounds.append(number)
                origin.append(ACCEPTED if index < accepted else drawn)
                logprob.append(scores.p[row, 1 + node, verdict.tokens[row, index]].log().item())
        assert trace.place[row].tolist() == place
        assert trace.origin[row].tolist() == origin
        assert trace.logprob[row].tolist() == logprob
        assert trace.round[row].tolist() == rounds
    assert {BONUS, RESAMPLED, ACCEPTED} == set(trace.origin.flatten().tolist())


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL], ids=["chain", "tree"])
def test_counts_by_depth(tree):
    output, heard = run(tree)
    trace = output.trace
    tested, accepted = torch.zeros(60, 3, dtype=torch.int64), torch.zeros(60, 3, dtype=torch.int64)
    for row in range(60):
        for _, verdict, _, emitted in heard:
            for index in range(min(int(emitted[row]), 3)):
                node = int(verdict.path[row, index - 1]) if index else -1
                tested[row, index] += node in tree.parents.tolist()
                accepted[row, index] += index < int(verdict.accepted[row])
    assert trace.tested.equal(tested)
    assert trace.accepted.equal(accepted)
    torch.testing.assert_close(trace.acceptance_rate, accepted.sum(0) / tested.sum(0))
    torch.testing.assert_close(trace.accepted_length, 7 / trace.rounds)
    torch.testing.assert_close(trace.tau, accepted.sum(1) / trace.rounds)
    assert trace.depth.eq(2).sum(1).equal(accepted[:, 1])


def test_plain_autoregression():
    output = emit(TableTarget(4, 5), NoDraft(), Exact(), rows=3, diagnostics=True)
    trace = output.trace
    assert trace.accepted_length.tolist() == [1] * 3
    assert trace.tau.tolist() == [0] * 3
    assert trace.tested.shape == trace.accepted.shape == (3, 0)
    assert trace.origin.eq(BONUS).all()
    assert trace.tv.isnan().all()
    assert trace.bound.eq(0).all()
    assert trace.kl.eq(0).all()


def test_summaries_are_one_number_a_row():
    output, _ = run(SMALL, diagnostics=True)
    summary = output.trace.cpu().summary()
    assert {values.shape for values in summary.values()} == {(60,)}
    torch.testing.assert_close(summary["perplexity"], (-summary["logprob"] / 7).exp())
    torch.testing.assert_close(summary["tv_bound"], output.trace.running_bound[:, -1])
    assert summary["tv"].isfinite().all()
    assert set(run(SMALL)[0].trace.summary()) == {
        "rounds",
        "accepted_length",
        "tau",
        "logprob",
        "perplexity",
    }


def test_diagnostics_are_only_made_when_asked_for(monkeypatch):
    monkeypatch.setattr("tempera.decoding.diagnostics.diagnose", None)
    output, _ = run(Tree.chain(3))
    assert (output.trace.tv, output.trace.bound, output.trace.kl, output.trace.running_bound) == (
        None,
    ) * 4


def test_an_exact_rule_has_no_bias():
    for tree in (Tree.chain(3), SMALL):
        trace = run(tree, Exact(), diagnostics=True)[0].trace
        assert trace.bound.max() < 1e-5
        assert trace.kl.abs().max() < 1e-5
        assert trace.tv.nanmean() > 0.1


@pytest.mark.parametrize("rule", [RULE, Relaxed((2.0, 0.6, 1.3), "vanilla")])
def test_on_a_chain_the_terms_are_those_of_equation_8(rule):
    draft, p, uniforms = random_draft(50, Tree.chain(3))
    verdict = verify(draft, p, rule, uniforms)
    tv, bound, kl = diagnose(draft, verdict, p, rule)
    for row in range(50):
        for index in range(int(verdict.accepted[row]) + 1):
            if index == 3:
                assert tv[row, index].isnan()
                assert bound[row, index] == kl[row, index] == 0
                continue
            here_p, here_q, depth = (
                p[row, index].double(),
                draft.q[row, index].double(),
                torch.tensor(index + 1),
            )
            kept = here_q * rule.accept_probs(here_p, here_q, depth)
            law = kept + (1 - kept.sum()) * rule.residual(
                here_p, here_q, draft.tokens[row, index], depth
            )
            assert tv[row, index].item() == pytest.approx(
                total_variation(here_p, here_q).item(), abs=1e-6
            )
            assert bound[row, index].item() == pytest.approx(
                total_variation(law, here_p).item(), abs=1e-6
            )
            assert kl[row, index].item() == pytest.approx(
                kl_divergence(law, here_p).item(), abs=1e-6
            )


@pytest.mark.parametrize(
    "rule", [RULE, Relaxed((2.0, 0.6, 1.3), "vanilla"), Relaxed((0.5,), "vanilla")]
)
@pytest.mark.parametrize("per_row", [False, True])
def test_on_a_tree_the_terms_add_up_over_the_tests_performed(rule, per_row):
    tree = Tree.from_parents(SMALL.parents.repeat(80, 1)) if per_row else SMALL
    draft, p, uniforms = random_draft(80, tree)
    verdict = verify(draft, p, rule, uniforms)
    _, bound, kl = diagnose(draft, verdict, p, rule)
    for row in range(80):
        path = verdict.path[row].tolist()
        for index in range(int(verdict.accepted[row]) + 1):
            expected = _terms(
                SMALL.parents.tolist(),
                draft,
                p,
                rule,
                row,
                path[index - 1] if index else -1,
                (*path, -1)[index],
            )
            assert (bound[row, index].item(), kl[row, index].item()) == pytest.approx(
                expected, abs=2e-6
            )


def _terms(parents, draft, p, rule, row, node, kept_child):
    """The definition in the docstring of `diagnose`, for one visited node."""
    target = ideal = p[row, 1 + node].double()
    children = [n for n, parent in enumerate(parents) if parent == node]
    bound, undecided, whole, reach, weight = 0.0, True, torch.zeros_like(target), 1.0, 1.0
    for child in children:
        q, token = draft.q[row, child].double(), draft.tokens[row, child]
        depth, line = torch.tensor(1), child
        while parents[line] >= 0:
            depth, line = depth + 1, parents[line]
        f = rule.accept_probs(target, q, depth)
        kept = q * f
        rejected, residual = (q * (1 - f)).sum().item(), rule.residual(target, q, token, depth)
        left = (ideal - kept).clamp(min=0)
        if child == children[-1]:
            law = kept + rejected * residual
            bound += undecided * total_variation(law, ideal).item()
            whole += reach * law
        else:
            bound += undecided * (kept - ideal).clamp(min=0).sum().item()
            whole += reach * kept
            reach, weight = (
                reach * rejected,
                weight * ((1 - f[token]).item() / rejected if rejected > 0 else 1.0),
            )
        undecided = undecided and child != kept_child
        target, ideal = residual, left / left.sum() if left.sum() > 0 else ideal
    return bound, weight * kl_divergence(
        whole, p[row, 1 + node].double()
    ).item() if children else 0.0


def test_an_impossible_token_costs_infinitely_many_nats():
    p, q = torch.tensor([[[1 - 1e-7, 1e-7, 0.0]] * 2]), torch.tensor([[[0.0, 0.0, 1.0]]])
    draft, _, _ = random_draft(1, Tree.chain(1), 3)
    draft = type(draft)(torch.tensor([[2]]), q, draft.tree)

    class KeepAll(Exact):
        def accept_prob(self, p, q, token, depth):
            return torch.ones_like(at(p, token))

        def accept_probs(self, p, q, depth):
            return torch.ones_like(p)

    verdict = verify(draft, p, KeepAll(), torch.tensor([[0.5, 0.5]]))
    tv, bound, kl = diagnose(draft, verdict, p, KeepAll())
    assert tv[0, 0] == bound[0, 0] == 1
    assert kl[0, 0] == math.inf


def test_a_rule_that_couples_depths_has_no_local_terms():
    class Joint:
        lossless = False

        def walk(self, draft, p, uniforms):
            raise AssertionError

    draft, p, uniforms = random_draft(2, Tree.chain(2))
    with pytest.raises(TemperaError, match="Joint"):
        diagnose(draft, verify(draft, p, Exact(), uniforms), Scores(p, p).p, Joint())


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL])
def test_a_lossless_rule_that_couples_depths_adds_nothing(tree):
    draft, p, uniforms = random_draft(50, tree)
    verdict = verify(draft, p, Match(), uniforms)
    tv, bound, kl = diagnose(draft, verdict, p, Match())
    assert bound.eq(0).all()
    assert kl.eq(0).all()
    torch.testing.assert_close(tv[:, 0], 0.5 * (p[:, 0] - draft.q[:, 0]).abs().sum(-1))


def test_distances_by_depth_are_those_of_the_tests():
    output, _ = run(SMALL, diagnostics=True)
    trace = output.trace
    torch.testing.assert_close(trace.tv_sums.sum(-1), trace.tv.nansum(-1))
    assert trace.tv_sums.shape == trace.tested.shape
    assert ((trace.tv_sums > 0) <= (trace.tested > 0)).all()
    assert run(SMALL)[0].trace.tv_sums is None


def test_tenths_of_an_image_in_the_order_of_decoding():
    trace = run(Tree.chain(3))[0].trace
    assert trace.place.shape[1] == 7
    which = trace.origin == ACCEPTED
    tenths = trace.by_tenth(which)  # the seven tokens begin in tenths 0, 1, 2, 4, 5, 7 and 8
    assert torch.equal(tenths[:, [0, 1, 2, 4, 5, 7, 8]], which.long())
    assert not tenths[:, [3, 6, 9]].any()
