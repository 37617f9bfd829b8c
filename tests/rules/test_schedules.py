import math

import pytest
import torch

from tempera.errors import TemperaError
from tempera.exactness import theory
from tempera.exactness.tables import random_tables
from tempera.rules.schedules import LARGEST, exponential, floored, linear, skip, uniform
from tempera.rules.standard import Relaxed


def test_exponential_gives_the_documented_numbers():
    found = exponential(1.1, 5, nu=0.7)
    assert found == pytest.approx((2.855, 1.418, 0.704, 0.350, 0.174), abs=6e-4)


@pytest.mark.parametrize(
    "schedule",
    [uniform(1.7, 5), exponential(1.7, 5, nu=0.2), linear(1.7, 5), linear(1.7, 5, ell=20)],
)
def test_every_schedule_spends_its_budget(schedule):
    assert math.fsum(schedule) / 5 == pytest.approx(1.7)
    assert all(omega > 0 for omega in schedule)


def test_linear_is_equation_17():
    weights = [(8 - i) / (8 * 9) for i in range(1, 6)]
    assert linear(2.0, 5) == pytest.approx([2.0 * 5 * w / sum(weights) for w in weights])


def test_a_floor_raises_only_what_is_below():
    assert floored((2.8, 1.4, 0.7, 0.3), 1.0) == (2.8, 1.4, 1.0, 1.0)
    assert floored((2.8, 0.3), 0) == (2.8, 0.3)


def test_skipped_depths_are_kept_and_priced_by_equation_7():
    """On tables of full support: E[τ + 1] = 1 + γ + Σ_{j > γ} Π_{γ < i ≤ j} f_i."""
    assert skip(1.5, 4, 2) == (LARGEST, LARGEST, 1.5, 1.5)
    p, q = random_tables(0)
    expected, reach = 2.0, q[0].flatten()
    rule = Relaxed(skip(1.0, 3))
    for depth in (1, 2):
        kept = torch.minimum(p[depth], q[depth])
        reach = (reach.unsqueeze(-1) * kept).flatten()
        expected += float(reach.sum())
    assert theory.expected_emitted(p, q, rule, 3) == pytest.approx(expected)
    first = next(theory.visits(p, q, rule, 3))
    torch.testing.assert_close(first.emitted, q[0])


@pytest.mark.parametrize("free", [-1, 5])
def test_no_more_drafts_than_there_are_can_be_skipped(free):
    with pytest.raises(TemperaError, match=f"free={free} drafts"):
        skip(1.0, 4, free)


@pytest.mark.parametrize("delta", [-1, 0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [uniform, exponential, linear])
def test_an_impossible_budget_names_delta(make, delta):
    with pytest.raises(TemperaError, match=f"delta={delta} "):
        make(delta, 5)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: exponential(1.1, 5, nu=0), "nu=0"),
        (lambda: linear(1.1, 8, ell=8), "ell=8"),
        (lambda: floored((1.0,), -1), "floor=-1"),
        (lambda: uniform(1.1, 0), "at least 1 token"),
        (lambda: exponential(1.1, 5, nu=1e4), "nu=10000"),
        (lambda: exponential(2.0, 8, nu=100), "nu=100 .* at most 87.5"),
    ],
)
def test_impossible_parameters_are_named(make, name):
    with pytest.raises(TemperaError, match=name):
        make()
