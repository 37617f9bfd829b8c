"""The schedule that minimises the bound at a given expected length, against enumeration."""

import itertools
import math

import pytest
import torch
from scipy.optimize import brentq
from table_models import tables

from tempera.errors import TemperaError
from tempera.exactness.theory import expected_emitted, tv_bound
from tempera.rules.optimal_schedule import Chains, reachable, schedule_for
from tempera.rules.standard import Relaxed

LENGTH = 3


@pytest.mark.parametrize("schedule", [(2.0, 1.2, 1.0), (0.5, 3.0, 0.2)])
def test_all_chains_of_tables_give_both_sides_of_theorem_2(schedule):
    _, _, p, q = tables()
    chains, rule = Chains.enumerated(p, q[:LENGTH]), Relaxed(schedule)
    emitted, bound = expected_emitted(p, q, rule, LENGTH), tv_bound(p, q, rule, LENGTH)
    assert chains.expected_emitted(schedule) == pytest.approx(emitted)
    assert chains.tv_bound(schedule) == pytest.approx(bound, abs=1e-7)


def test_the_bound_of_one_token():
    """Kept with Σ min(q, ω p), of which what exceeds p is bias: at ω = 2, q = (0.8, 0.2) whole."""
    p, q = [torch.tensor([[0.5, 0.5]])], [torch.tensor([[0.8, 0.2]])]
    chains = Chains.enumerated(p, q)
    assert chains.tv_bound((2.0,)) == pytest.approx(0.3)
    assert chains.tv_bound((1.2,)) == pytest.approx(0.1)
    assert chains.tv_bound((1.0,)) == pytest.approx(0)
    assert chains.expected_emitted((1.2,)) == pytest.approx(1 + 0.6 + 0.2)


def test_exact_decoding_is_the_optimum_at_its_own_length():
    _, _, p, q = tables()
    chains = Chains.enumerated(p, q[:3])
    assert schedule_for(chains, reachable(chains)[0]) == (1.0, 1.0, 1.0)


def completed(chains, omegas, wanted):
    """A schedule of the expected length, which the last ω follows from, or comes nearest to."""

    def miss(omega):
        return chains.expected_emitted((*omegas, omega)) - wanted

    if miss(1.0) >= 0 or miss(100.0) <= 0:
        return *omegas, 1.0 if miss(1.0) >= 0 else 100.0
    return *omegas, brentq(miss, 1.0, 100.0)


@pytest.mark.parametrize(("length", "seed"), [(1, 2), (2, 0), (3, 2)])
def test_no_schedule_of_a_fine_grid_has_a_smaller_bound(length, seed):
    """ω of all depths but the last on the grid; the last follows from the expected length."""
    chains = Chains.enumerated(*(table[:length] for table in tables(seed=seed)[2:]))
    low, high = reachable(chains)
    wanted = low + 0.5 * (high - low)
    found = schedule_for(chains, wanted)
    assert chains.expected_emitted(found) == pytest.approx(wanted)
    grid = torch.logspace(0, 1, 40 if length == 2 else 7, dtype=torch.float64).tolist()
    bounds = []
    for omegas in itertools.product(grid, repeat=length - 1):
        other = completed(chains, omegas, wanted)
        if chains.expected_emitted(other) >= wanted - 1e-6:
            bounds.append(chains.tv_bound(other))
    for step in (-0.1, -0.03, 0.03, 0.1) if length > 1 else ():  # nor has one nearby
        moved = (max(1.0, found[0] * math.exp(step)), *found[1:-1])
        other = completed(chains, moved, wanted)
        if chains.expected_emitted(other) >= wanted - 1e-6:
            bounds.append(chains.tv_bound(other))
    assert chains.tv_bound(found) <= min(bounds) + 1e-6


def test_no_omega_is_larger_than_the_one_that_keeps_every_token():
    ratios = torch.tensor([[0.5, 2.0, 1.5], [0.25, 0.8, 2.0], [0.0, 1.0, 3.0]]).double()
    chains = Chains(ratios, torch.full((3,), 1 / 3, dtype=torch.float64))
    low, high = reachable(chains)
    assert schedule_for(chains, high) == pytest.approx((4.0, 1.25, 1.0))
    assert reachable(chains, 1.0) == (low, low)
    rare = Chains(torch.tensor([[1e-3]]).double(), torch.ones(1, dtype=torch.float64))
    assert reachable(rare) == pytest.approx((1.001, 1.1))  # ω = 100


@pytest.mark.parametrize("wanted", [3.19, 4.01, math.nan])
def test_an_expected_length_out_of_reach(wanted):
    _, _, p, q = tables()
    with pytest.raises(TemperaError, match=r"is out of reach .*: give 3\.196 .* to 4$"):
        schedule_for(Chains.enumerated(p, q[:3]), wanted)


def test_a_ceiling_below_one():
    _, _, p, q = tables()
    with pytest.raises(TemperaError, match="ceiling=0.5 is not valid"):
        schedule_for(Chains.enumerated(p, q[:3]), 3.5, ceiling=0.5)
