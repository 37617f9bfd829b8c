"""Prices by depth: what measured rounds say of a round of any prices, against enumeration; and that
no other prices have less KL divergence at the same length.
"""

import itertools
import math

import pytest
import torch
from random_drafts import SMALL
from table_models import tables

from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation.calibration import TestedDrafts
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.exactness.theory import expected_emitted, kl_bound
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import GRID, PricedRounds, prices_for, reachable_by_price
from tempera.rules.schedules import Prices, exponential, floored, uniform
from tempera.rules.standard import Exact, Relaxed

LENGTH = 3


def enumerated(p, q, length=LENGTH):
    return PricedRounds.enumerated(p, q[:length])


def alike(p, q, length=LENGTH):
    """The first distributions of the tables after every prefix: what follows a draft does not
    depend on it.
    """
    return tuple([table[0].expand(3**t, 3) for t in range(length + 1)] for table in (p, q))


@pytest.mark.parametrize("prices", [(0.0, 0.0, 0.0), (2.0, 0.5, 0.1), (6.0, 0.9, 4.2)])
def test_measured_rounds_are_what_theory_expects(prices):
    _, _, p, q = tables()
    emitted, nats = enumerated(p, q).expected(Prices(prices))
    rule = Priced(Prices(prices))
    assert emitted == pytest.approx(expected_emitted(p, q, rule, LENGTH), abs=1e-5)
    assert nats == pytest.approx(kl_bound(p, q, rule, LENGTH), abs=1e-5)


def test_worth_is_tokens_less_divergence_of_what_follows():
    """ρ_i = β·T_{i+1} - K_{i+1}, with T_i = 1 + A_i·T_{i+1} and K_i = KL_i + A_i·K_{i+1}."""
    p, q = alike(*tables()[2:])
    prices, beta = Prices((1.1, 0.6, 0.3)), 0.4
    tokens, nats, worths = 1.0, 0.0, []
    for price in reversed(prices.prices):
        worths.insert(0, beta * tokens - nats)
        rule = Priced(price)
        kept = expected_emitted(p, q, rule, 1) - 1
        nats = kl_bound(p, q, rule, 1) + kept * nats
        tokens = 1 + kept * tokens
    assert enumerated(p, q).worth(prices, beta).prices == pytest.approx(worths, abs=1e-4)


def test_a_depth_whose_drafts_the_target_never_draws_has_no_worth():
    rounds = enumerated(*tables()[2:])
    accept_probs = rounds.accept_probs.clone()
    accept_probs[:, 2] = 0
    rounds = PricedRounds(rounds.tree, accept_probs, rounds.divergence, rounds.weights)
    assert rounds.worth(Prices((0.5,)), 0.4).prices[2] == 0
    wanted = sum(reachable_by_price(rounds)) / 2
    assert rounds.expected(prices_for(rounds, wanted))[0] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("same", [True, False], ids=["alike", "tables"])
@pytest.mark.parametrize("seed", range(2))
def test_no_prices_of_a_grid_have_less_kl_at_the_same_length(seed, same):
    """To 1 in 1000, and where what follows depends on the token that was kept, to 1 in 100."""
    _, _, p, q = tables(seed=seed)
    p, q = alike(p, q) if same else (p, q)
    rounds = enumerated(p, q)
    low, high = reachable_by_price(rounds)
    wanted = low + 0.4 * (high - low)
    emitted, nats = rounds.expected(prices_for(rounds, wanted))
    assert emitted == pytest.approx(wanted, abs=1e-4)
    least = math.inf
    for prices in itertools.product(GRID[:-1:3], repeat=LENGTH):
        other = rounds.expected(Prices(prices))
        least = min(least, other[1]) if other[0] >= emitted else least
    assert nats <= least * (1.001 if same else 1.01)
    assert least <= 1.5 * nats  # the grid comes near


def test_less_kl_than_every_schedule_of_relaxations():
    target = TableTarget(5, LENGTH + 1)
    p, q = target.conditionals(), TableDraft(target, seed=100).conditionals()
    rounds = enumerated(p, q)
    for schedule in (uniform(1.5, 3), uniform(3.0, 3), floored(exponential(1.5, 3), 1.0)):
        length = expected_emitted(p, q, Relaxed(schedule), LENGTH)
        best = Priced(prices_for(rounds, length))
        assert expected_emitted(p, q, best, LENGTH) == pytest.approx(length, abs=0.01)
        for residual in ("optimal", "kl"):
            other = kl_bound(p, q, Relaxed(schedule, residual), LENGTH)
            assert kl_bound(p, q, best, LENGTH) < other


def test_shorter_chains_of_the_same_rounds():
    _, _, p, q = tables()
    prices = Prices((0.9, 0.4))
    whole, first = enumerated(p, q).first_depths(2), enumerated(p, q, length=2)
    assert whole.expected(prices) == pytest.approx(first.expected(prices), abs=1e-6)


@pytest.mark.parametrize("wanted", [0.5, 1.0, 3.19, 4.01, math.nan])
def test_a_length_out_of_reach(wanted):
    _, _, p, q = tables()
    with pytest.raises(TemperaError, match=r"length of .* is out of reach with 3 drafted"):
        prices_for(enumerated(p, q), wanted)


@pytest.mark.parametrize("tree", [Tree.chain(3), SMALL], ids=["chain", "tree"])
def test_the_loop_emits_what_the_prices_promise(tree):
    """The first rounds of many images: drafts measured under exact decoding, then decoded with the
    prices found on them. No prices of a grid are better.
    """
    target = TableTarget(3, tree.max_depth + 1)
    tested = TestedDrafts()
    drafter = StaticTreeDrafter(TableDraft(target, noise=2.5), tree)
    emit(target, drafter, Exact(), rows=1_000, watch=[tested])
    rounds = tested.statistics(tree.max_depth).rounds
    low, high = reachable_by_price(rounds)
    wanted = (low + high) / 2
    prices = prices_for(rounds, wanted)
    emitted, nats = rounds.expected(prices)
    drafter = StaticTreeDrafter(TableDraft(target, noise=2.5), tree)
    trace = emit(target, drafter, Priced(prices), rows=2_000, seed=1, diagnostics=True).trace
    first = trace.round == 0
    assert float(first.sum(-1).float().mean()) == pytest.approx(wanted, abs=0.08)
    found = torch.where(first, trace.kl, 0.0).sum(-1).mean()
    assert float(found) == pytest.approx(nats, rel=0.1)
    for other in itertools.product(GRID[::5], repeat=len(prices.prices)):
        tokens, divergence = rounds.expected(Prices(other))
        assert tokens < emitted or divergence > 0.99 * nats


def test_a_rejected_sibling_leaves_the_next_one():
    """Two leaves, kept with probability 0.5 and then 0.4: the first is worth β less the 0.4 β that
    its rejection leaves, the second β.
    """
    accept_probs = torch.tensor([0.5, 0.4]).view(1, 2, 1).expand(1, 2, len(GRID))
    tree, divergence = Tree.from_paths([[0], [1]]), torch.full((1, 3, len(GRID)), 0.1)
    rounds = PricedRounds.equal(tree, accept_probs, divergence)
    worth = (0.5 * 0.6 + 0.5 * 0.4 * 1.0) / (0.5 + 0.5 * 0.4) * (0.8 - 0.1)
    assert rounds.worth(Prices((1.0,)), beta=0.8).prices == pytest.approx([worth])
    assert rounds.worth(Prices((1.0,)), beta=0.05).prices == (0.0,)  # less than what it costs
    assert rounds.worth(Prices((1.0,)), beta=50).prices == (GRID[-1],)
