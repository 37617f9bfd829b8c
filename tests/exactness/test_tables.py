"""The instrument: tables, and the comparison of frequencies with a law. The laws themselves are in
test_laws.py.
"""

import math

import pytest
import torch
from scipy.stats import chisquare

from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import uniforms
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.exactness.tables import LawComparison, TableTarget, check, compare, emitted_law
from tempera.rules.standard import Exact


def test_true_laws_pass_at_the_nominal_rate():
    law = torch.rand(30, generator=torch.Generator().manual_seed(0)).double() ** 3
    law /= law.sum()
    draws = uniforms(torch.arange(400).unsqueeze(1), torch.arange(1, 2001))
    outcomes = torch.searchsorted(law.cumsum(0).float(), draws).clamp(max=29)
    results = [compare(torch.bincount(row, minlength=30), law) for row in outcomes]
    p_values = torch.tensor([result.p_value for result in results])
    assert 0.4 < p_values.mean() < 0.6
    assert 0.02 < (p_values < 0.05).float().mean() < 0.09
    distances = torch.tensor([result.tv / result.noise for result in results])
    assert distances.mean() == pytest.approx(1, abs=0.05)


def test_a_small_shift_and_an_impossible_outcome_fail():
    law = torch.full((20,), 0.05).double()
    shifted = law + 0.01 * torch.tensor([1.0, -1.0] * 10).double()
    assert compare(10_000 * law, law).p_value == 1
    assert not compare(10_000 * shifted, law).agrees
    half = torch.tensor([0.5, 0.5, 0.0])
    assert compare(torch.tensor([50, 50, 0]), half).agrees
    assert compare(torch.tensor([50, 49, 1]), half).p_value == 0
    assert compare(torch.tensor([100, 0]), torch.tensor([1.0, 0.0])).p_value == 1


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([9, 4, 7], [10.0, 5.0, 5.0]),  # expected 5 times: a cell of its own
        ([9, 8, 1, 2], [10.0, 5.0, 2.5, 2.5]),  # a pool of 5: one more cell
        ([14, 6, 3, 3], [13.0, 7.0, 4.0, 2.0]),
    ],
)
def test_the_p_value_is_pearsons(counts, expected):
    found = compare(torch.tensor(counts), torch.tensor(expected) / sum(expected))
    cells = [pair for pair in zip(counts, expected, strict=True) if pair[1] >= 5]
    if rare := [pair for pair in zip(counts, expected, strict=True) if pair[1] < 5]:
        cells.append(tuple(map(sum, zip(*rare, strict=True))))
    assert found.p_value == pytest.approx(chisquare(*zip(*cells, strict=True)).pvalue)


def test_a_small_pool_is_tested_by_the_law_of_its_count():
    """Expected fewer than 5 times: many are rare, none are not."""
    common, pool = 1_000_000, 4.5
    law = torch.tensor([common, common, pool], dtype=torch.float64) / (2 * common + pool)
    none, many = (compare(torch.tensor([common, common, seen]), law).p_value for seen in (0, 14))
    poisson = [math.exp(-pool) * pool**count / math.factorial(count) for count in range(14)]
    assert none == pytest.approx(1, abs=0.01)
    assert many == pytest.approx(2 * (1 - sum(poisson)), rel=0.05)
    lone = compare(torch.tensor([19, 1]), torch.tensor([0.95, 0.05], dtype=torch.float64))
    assert lone.p_value == 1  # one cell tests nothing, and one of one expected is no surprise


def test_a_report_says_at_which_level_it_rejects():
    agrees, differs = (LawComparison(p, 0.1, 0.1, 10) for p in (1.1e-4, 1e-4))
    assert agrees.agrees and not differs.agrees
    for report, word in ((agrees, "agrees: p = 0.00011"), (differs, "DIFFERS: p = 0.0001")):
        assert str(report).startswith(f"{word} (rejects below 0.0001)")
    assert str(check(Exact(), Tree.chain(1), rows=20)).startswith("agrees")


def test_sequences_are_counted_in_lexicographic_order():
    tokens = torch.tensor([[0, 1], [1, 0], [1, 0], [2, 2]])
    assert emitted_law(tokens, 3).tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 1]


def test_tables_follow_the_sampling_and_force_tokens_after_every_prefix():
    sampling = Sampling(guidance=3.0, temperature=0.8, top_k=2)
    target = TableTarget(3, 3, sampling, forced={2: 1})
    assert target.forced.tolist() == [[-1] * 4 + [1] * 9]
    torch.testing.assert_close(target.table, sampling.distribution(target.logits, target.forced)[0])
    p = target.conditionals()
    assert [one.shape for one in p] == [(1, 3), (3, 3), (9, 3)]
    assert target.law().sum().item() == pytest.approx(1)
    law = (p[0][0, 2] * p[1][2, 0] * p[2][2 * 3 + 0, 1]).item()
    assert target.law()[2 * 9 + 0 * 3 + 1].item() == pytest.approx(law)


def test_too_many_outcomes_are_refused():
    with pytest.raises(TemperaError, match="5\\^9 outcomes"):
        check(Exact(), Tree.chain(1), vocab_size=5, length=9)
    assert check(Exact(), Tree.chain(1), vocab_size=10, length=5, rows=20).rows == 20


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_greedy_tables_also_give_the_distribution_at_temperature_one(temperature):
    nothing = Draft(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, 3), Tree.empty())
    target = TableTarget(3, 2, Sampling(1.0, temperature))
    target.begin(["a", "b"], 0)
    soft = target.score(nothing, 0).untempered
    assert (soft is None) == (temperature > 0)
    if soft is not None:
        torch.testing.assert_close(soft, TableTarget(3, 2).table[:1].expand(2, 1, 3))
