"""The rule and the residual of least KL divergence, against what else a rule could do on tiny
tables.
"""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from near_codes import near_rules
from token_laws import distribution, fast, omegas, pair, weights

from tempera.decoding.probabilities import kl_divergence, total_variation
from tempera.errors import TemperaError
from tempera.rules.optimal import HALVINGS, Priced, kl_residual
from tempera.rules.schedules import Prices, floored, uniform
from tempera.rules.standard import Exact, Relaxed

prices = st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 6.0])
DEPTH = torch.tensor(1)


def random_tables(seed, vocab_size=3):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    return p, q


def steps(parts, count):
    """All vectors of `count` numbers 0, 1/parts, … that sum to 1."""
    cuts = itertools.combinations(range(parts + count - 1), count - 1)
    edges = torch.tensor([(-1, *cut, parts + count - 1) for cut in cuts])
    return (edges.diff(dim=-1) - 1).double() / parts


@pytest.mark.parametrize("price", [0.2, 0.8, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_rule_has_less_kl_where_it_keeps_as_much(seed, price):
    """Every f and every residual of a fine grid that keep the mass that the rule keeps, or a little
    more.
    """
    p, q = random_tables(seed)
    law, f, _ = pair(Priced(price), p, q)
    mass, least = (q * f).sum(), kl_divergence(law, p)
    grid = torch.linspace(0, 1, 41, dtype=torch.float64)
    kept = q * torch.cartesian_prod(grid, grid, grid)
    more = kept.sum(-1) - mass
    kept = kept[(more >= -1e-9) & (more <= 0.02)]
    laws = kept.unsqueeze(1) + (1 - kept.sum(-1))[:, None, None] * steps(24, 3)
    found = kl_divergence(laws, p).min()
    assert found >= least - 1e-9
    assert found <= 1.1 * least + 0.01  # the grid is fine enough to come near


@given(weights, weights, prices)
@fast
def test_the_law_is_the_median(p, q, price):
    """Of c·p, q and ω·p, with ω/c the exponential of the price."""
    p, q = distribution(p), distribution(q)
    law, f, residual = pair(Priced(price), p, q)
    assert law.sum().item() == pytest.approx(1)
    if (q * f).sum() > 0.98:  # c, read off the replaced tokens, is then imprecise
        return
    c = (law / p)[residual > 0]
    assert c.max().item() == pytest.approx(c.min().item(), rel=1e-3)
    omega = c.mean() * torch.tensor(price).exp()
    torch.testing.assert_close(law, q.clamp(c.mean() * p, omega * p), atol=1e-3, rtol=1e-3)


@given(weights, weights, prices.filter(lambda price: price > 0))
@fast
def test_the_price_is_the_slope_of_kl_in_the_mass_kept(p, q, price):
    p, q = distribution(p), distribution(q)
    (above, f_above, _), (below, f_below, _) = (
        pair(Priced(price * (1 + sign * 0.02)), p, q) for sign in (1, -1)
    )
    mass = (q * (f_above - f_below)).sum()
    assert mass >= -price / 2 ** (HALVINGS - 2)  # as precise as c is
    if mass > 1e-3:
        slope = (kl_divergence(above, p) - kl_divergence(below, p)) / mass
        assert slope.item() == pytest.approx(price, rel=0.03)


@given(weights, weights, prices, omegas)
@fast
def test_total_variation_pays_one_for_one_whatever_the_residual(p, q, price, omega):
    """TV(law, p) = TV(p, q) - (1 - mass kept), for G*, for the residual and for the rule of least
    KL, from exact acceptance up.
    """
    p, q = distribution(p), distribution(q)
    for rule in (Priced(price), Relaxed((max(1.0, omega),)), Relaxed((max(1.0, omega),), "kl")):
        law, f, _ = pair(rule, p, q)
        expected = total_variation(p, q) - (1 - (q * f).sum())
        assert total_variation(law, p).item() == pytest.approx(expected.item(), abs=1e-5)


@given(weights, weights, omegas)
@example([0.0, 0.0, 0.0, 0.1, 1e-30], [0.0, 0.0, 1e-6, 0.1, 0.0], 1.0)  # hardly ever rejected
@fast
def test_the_residual_of_least_kl_has_less_kl_than_the_others(p, q, omega):
    p, q = distribution(p), distribution(q)
    divergence = {
        kind: kl_divergence(pair(Relaxed((omega,), kind), p, q)[0], p).item()
        for kind in ("kl", "optimal", "vanilla")
    }
    assert divergence["kl"] <= divergence["optimal"] + 1e-6
    assert divergence["kl"] <= divergence["vanilla"] + 1e-6
    if omega <= 1:
        assert divergence["kl"] == pytest.approx(0, abs=1e-6)


@given(weights, weights, st.sampled_from(sorted(near_rules(5))))
@fast
def test_no_residual_has_less_kl_whatever_was_kept(p, q, name):
    """For what LANTERN and GSD keep: moving mass between any two tokens of the residual adds KL."""
    p, q = distribution(p), distribution(q)
    kept = q * near_rules(5)[name].accept(p, q, DEPTH)
    rejected, residual = 1 - kept.sum(), kl_residual(p, kept)
    if rejected < 1e-3:
        return
    least = kl_divergence(kept + rejected * residual, p)
    for source, sink in itertools.permutations(range(5), 2):
        for share in (0.02, 0.3):
            other = residual.clone()
            other[sink] += share * residual[source]
            other[source] *= 1 - share
            assert kl_divergence(kept + rejected * other, p) >= least - 1e-6


@given(weights, weights)
@fast
def test_a_draft_for_nothing_is_exact_decoding(p, q):
    p, q = distribution(p), distribution(q)
    for free, exact in zip(pair(Priced(0.0), p, q), pair(Exact(), p, q), strict=True):
        torch.testing.assert_close(free, exact)


def test_a_price_of_each_depth_and_the_last_one_below():
    p, q = distribution([2, 8]).expand(3, 2), distribution([8, 2]).expand(3, 2)
    rule = Priced(Prices((2.0, 0.5)))
    f = rule.accept(p, q, torch.tensor([1, 2, 7]))
    single = [Priced(price).accept(p[0], q[0], DEPTH) for price in (2.0, 0.5, 0.5)]
    torch.testing.assert_close(f, torch.stack(single))


@pytest.mark.parametrize("price", [-0.1, 20.1, float("nan"), float("inf")])
def test_impossible_prices(price):
    with pytest.raises(
        TemperaError, match="an accepted draft cannot cost .* nats; give prices from 0"
    ):
        Priced(price)


def test_schedules_of_the_other_kind():
    with pytest.raises(TemperaError, match="Priced takes a schedule of prices"):
        Priced(uniform(2.0, 3))
    with pytest.raises(TemperaError, match="Relaxed takes a schedule of relaxations"):
        floored(Prices((0.5, 0.5)), 0.0)


def test_a_rule_is_written_as_it_is_made():
    """Its repr names a run's verification."""
    for rule in (Priced(0.8), Priced(Prices((0.5, 0.25)))):
        assert eval(repr(rule), {"Priced": Priced, "Prices": Prices}) == rule
