import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from near_codes import near_rules
from random_drafts import SMALL
from token_laws import distribution, fast, kinds, omegas, pair, weights

from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.exactness.tables import check
from tempera.rules.cactus import Cactus
from tempera.rules.mentored import Mentored
from tempera.rules.mixture import Mixture
from tempera.rules.optimal import Priced
from tempera.rules.standard import Exact, Match, Relaxed


@given(weights, weights, omegas, kinds)
@fast
def test_f_is_a_probability_and_the_residual_a_distribution(p, q, omega, kind):
    p, q = distribution(p), distribution(q)
    others = Mixture(0.4), Cactus(omega), Mentored(omega), Mentored(omega, "emitted")
    for rule in (Exact(), Relaxed((omega,), kind), Priced(omega), *others):
        _, f, residual = pair(rule, p, q)
        assert ((f >= 0) & (f <= 1)).all()
        assert (residual >= 0).all()
        assert residual.sum().item() == pytest.approx(1)
        assert (residual[p == 0] == 0).all()


@given(weights, weights, st.sampled_from(sorted(near_rules(5))))
@fast
def test_f_and_residual_of_neighbourhood_rules(p, q, name):
    p, q = distribution(p), distribution(q)
    rule = near_rules(5)[name]
    f = rule.accept(p, q, torch.tensor(1))
    assert ((f >= 0) & (f <= 1)).all()
    if not name.startswith("grouped"):  # the code itself counts: no less is kept than exactly
        assert (f >= Exact().accept(p, q, torch.tensor(1)) - 1e-12).all()
    for token in q.nonzero().flatten():
        at_token = rule.accept_at(p, q, token, torch.tensor(1))
        assert at_token.item() == pytest.approx(f[token].item(), abs=1e-12)
        residual = rule.residual(p, q, token, torch.tensor(1))
        assert (residual >= 0).all()
        assert residual.sum().item() == pytest.approx(1)
        if f[token] < 1 - 1e-9 and not name.startswith("grouped"):
            assert residual[token] == pytest.approx(0, abs=1e-9) or "published" not in name


@given(weights, weights)
@fast
def test_exact_f_and_residual_are_exact_together(p, q):
    p, q = distribution(p), distribution(q)
    torch.testing.assert_close(pair(Exact(), p, q)[0], p)


@given(weights, weights, omegas.filter(lambda omega: omega <= 1))
@fast
def test_the_optimal_residual_is_exact_where_the_rule_is_no_laxer(p, q, omega):
    p, q = distribution(p), distribution(q)
    torch.testing.assert_close(pair(Relaxed((omega,), "optimal"), p, q)[0], p)


@given(weights, weights, omegas.filter(lambda omega: omega >= 1))
@fast
def test_the_residuals_agree_from_one_up(p, q, omega):  # Proposition 1
    p, q = distribution(p), distribution(q)
    _, _, optimal = pair(Relaxed((omega,), "optimal"), p, q)
    _, f, vanilla = pair(Relaxed((omega,), "vanilla"), p, q)
    if 1 - (q * f).sum() > 1e-9:  # else nothing is ever drawn from it
        torch.testing.assert_close(optimal, vanilla)


@given(weights, weights, omegas)
@fast
def test_no_residual_has_a_smaller_bias_than_the_optimal_one(p, q, omega):  # Proposition 3
    p, q = distribution(p), distribution(q)
    law, f, _ = pair(Relaxed((omega,), "optimal"), p, q)
    least = ((p - q * f).abs().sum() - (1 - (q * f).sum())) / 2
    assert ((law - p).abs().sum() / 2).item() == pytest.approx(least.item(), abs=1e-12)


def test_zero_over_zero_counts_as_one():
    p, q = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert Exact().accept(p, q, torch.tensor(1)).tolist() == [1, 1, 0]


def test_a_residual_without_mass_is_the_target():
    p = torch.tensor([0.2, 0.8])
    for rule in (Exact(), Relaxed((2.0,)), Relaxed((2.0,), "vanilla"), Relaxed((2.0,), "kl")):
        assert rule.residual(p, p, torch.tensor(0), torch.tensor(1)).equal(p)


def test_omega_follows_the_depth_and_stays_at_the_last():
    rule = Relaxed((3.0, 2.0, 0.5))
    assert rule.omega(torch.tensor([[1, 2], [3, 9]])).tolist() == [[3.0, 2.0], [0.5, 0.5]]
    p, q = torch.tensor([0.2, 0.8]).expand(3, 2), torch.tensor([0.8, 0.2]).expand(3, 2)
    f = rule.accept_at(p, q, torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 3]))
    assert f.tolist() == pytest.approx([0.75, 0.5, 0.125])


@pytest.mark.parametrize("schedule", [(), (1.0, -1.0), (1.0, 0.0), (float("nan"),), (1e39,)])
def test_impossible_schedules_are_refused(schedule):
    with pytest.raises(TemperaError, match="schedule"):
        Relaxed(schedule)


def test_the_root_draws_with_the_last_number_of_its_row_and_each_node_with_its_own():
    tree = Tree.chain(2)
    p = torch.tensor([0.25, 0.75]).expand(3, 3, 2)
    tokens, q = torch.tensor([[0, 1]] * 3), torch.full((3, 2, 2), 0.5)
    numbers = torch.tensor([[0.9, 0.1, 0.1], [0.9, 0.1, 0.9], [0.1, 0.9, 0.1]])
    stop, drawn = Match().walk(Draft(tokens, q, tree), Scores(p, p), None, numbers)
    # drawn by root, first and second node: 0 1 0; 1 1 0; 0 0 1
    assert stop.tolist() == [2, 0, 1]
    assert drawn.argmax(-1).tolist() == [0, 1, 0]


def test_tokens_that_the_target_draws_anew_are_its_own():
    """SpecInfer's naive verification: a draft that says nothing of its draws."""
    report = check(Match(), SMALL, vocab_size=3, length=3, rows=4000)
    assert report.agrees, report
    assert report.accepted_length > 1.4
