"""Exactness by tables, through the real loop: exact methods emit the target's law, and a method
that is not exact is caught.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases import slow_but
from random_drafts import SMALL, RowTrees

from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Sampling, normalise
from tempera.decoding.random_streams import RandomStreams, uniforms
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness import tables, theory
from tempera.exactness.tables import (
    FirstRoundOnly,
    LawComparison,
    TableDraft,
    TableTarget,
    by_length,
    check,
    compare,
    emit,
    emitted_law,
    lookup,
)
from tempera.rules.schedules import exponential, linear, uniform
from tempera.rules.standard import Exact, Relaxed

TREES = {
    "chain 1": Tree.chain(1),
    "chain 3": Tree.chain(3),
    "chain past the image": Tree.chain(6),
    "two siblings": Tree.from_paths([[0], [1]]),
    "five siblings of three tokens": Tree.from_paths([[0], [1], [2], [3], [4]]),
    "small": SMALL,
    "mc_sim_7b_63": Tree.named("mc_sim_7b_63"),
    "naive_extend_57": Tree.named("naive_extend_57"),
}
SAMPLINGS = {
    "guided": Sampling(guidance=3.0, temperature=1.7),
    "cold": Sampling(guidance=1.0, temperature=0.6),
    "top-k": Sampling(guidance=1.0, top_k=2),
    "top-k 1": Sampling(guidance=1.0, top_k=1),
    "top-p": Sampling(guidance=1.0, top_p=0.8),
    "greedy": Sampling(guidance=1.0, temperature=0),
    "all": Sampling(guidance=2.0, temperature=1.3, top_k=3, top_p=0.9),
    "guided greedy": Sampling(guidance=3.0, temperature=0),
}
RELAXED = {
    f"{name} {delta} {kind}": Relaxed(schedule(delta, 3), kind)
    for name, schedule in (("exponential", exponential), ("linear", linear), ("uniform", uniform))
    for delta in (1.1, 2.0)
    for kind in ("optimal", "vanilla")
}


def named(options):
    return [pytest.param(value, id=name) for name, value in options.items()]


@pytest.mark.slow
def test_plain_autoregression_emits_the_law():
    assert check(Exact(), lambda draft: NoDraft()).agrees


@pytest.mark.slow
@pytest.mark.parametrize("tree", named(TREES))
def test_exact_decoding_emits_the_target_law(tree):
    report = check(Exact(), tree, rows=100_000 if tree.nodes < 10 else 40_000)
    assert report.agrees, report
    assert report.accepted_length > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", named(SAMPLINGS))
@pytest.mark.parametrize("tree", named({name: TREES[name] for name in ("chain 3", "small")}))
def test_exact_decoding_emits_the_sampled_law(tree, sampling):
    report = check(Exact(), tree, sampling=sampling, vocab_size=4, length=3, rows=50_000)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    named({name: SAMPLINGS[name] for name in ("top-k", "top-k 1")}),
)
def test_siblings_beyond_the_support_of_q_change_nothing(sampling):
    """More children than tokens with mass, on tables where target and draft often disagree on which
    tokens those are.
    """
    reports = [
        check(Exact(), SMALL, sampling=sampling, vocab_size=4, length=3, rows=10_000, seed=seed)
        for seed in range(12)
    ]
    assert all(report.agrees for report in reports), [str(report) for report in reports]
    assert (
        sum(report.accepted_length < 2.9 for report in reports) >= 3
    )  # of at most 3: drafts were refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_exact_decoding_over_many_rounds(seed):
    report = check(Exact(), Tree.chain(1), vocab_size=2, length=8, seed=seed)
    assert report.agrees, report
    report = check(Exact(), SMALL, vocab_size=5, length=5, seed=seed)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Exact(), Relaxed((5.0, 0.2))], ids=["exact", "relaxed"])
@pytest.mark.parametrize("tree", named({name: TREES[name] for name in ("chain 3", "small")}))
def test_forced_positions_are_kept_by_every_rule(tree, rule):
    target = TableTarget(3, 4, forced={0: 2, 2: 1})
    tokens = emit(target, StaticTreeDrafter(TableDraft(target), tree), rule, rows=2000).tokens
    assert tokens[:, 0].eq(2).all()
    assert tokens[:, 2].eq(1).all()
    report = check(Exact(), tree, forced={0: 2, 2: 1}, rows=50_000)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [(1.0, 1.0, 1.0), (0.7, 0.35, 0.1)])
@pytest.mark.parametrize("tree", named({name: TREES[name] for name in ("chain 3", "small")}))
def test_relaxation_below_one_with_the_optimal_residual_is_exact(tree, schedule):
    report = check(Relaxed(schedule), tree, rows=50_000)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize("rule", named(RELAXED))
def test_relaxed_decoding_emits_the_law_of_its_definition_and_not_the_target_law(rule):
    report = check(rule, Tree.chain(3), length=5, rows=60_000, law=decoded_law(rule))
    assert report.agrees, report
    assert not check(rule, Tree.chain(3), length=5, rows=60_000).agrees


@pytest.mark.slow
@pytest.mark.parametrize("rule", named(RELAXED))
@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_one_relaxed_round_emits_the_law_of_equation_48(rule, floor):
    rule = Relaxed([max(omega, floor) for omega in rule.schedule], rule.residual_kind)

    def one_round(draft):
        return FirstRoundOnly(StaticTreeDrafter(draft, Tree.chain(3)))

    def law(target, draft):
        return theory.one_round_law(target.conditionals(), draft.conditionals(), rule, 3)

    report = check(rule, one_round, rows=60_000, law=law)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", named({name: SAMPLINGS[name] for name in ("guided", "all", "greedy", "top-k 1")})
)
def test_relaxed_decoding_of_a_changed_law(sampling):
    rule = Relaxed(exponential(2.0, 2))
    report = check(rule, Tree.chain(2), sampling=sampling, law=decoded_law(rule), rows=50_000)
    assert report.agrees, report


def decoded_law(rule):
    def law(target, draft):
        return theory.decoded_law(
            target.conditionals(), draft.conditionals(), rule, len(rule.schedule), target.length
        )

    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(3.0, 1.3, 2), Sampling(1.0, 0)],
    ids=["plain", "guided top-k", "greedy"],
)
def test_a_tree_per_row_emits_the_law(sampling):
    report = check(Exact(), RowTrees, sampling=sampling, rows=60_000)
    assert report.agrees, report
    assert report.accepted_length > 1.2


# What is wrong must be seen


@dataclass(frozen=True)
class WrongResidual(Exact):
    """Exact acceptance, but a rejected token is replaced from p."""

    def residual(self, p, q, token, depth):
        return p


@dataclass(frozen=True)
class SlightlyWrongResidual(Exact):
    """Norm[p - 0.9 q]+."""

    def residual(self, p, q, token, depth):
        return normalise((p - 0.9 * q).clamp(min=0), otherwise=p)


@dataclass(frozen=True)
class SlightlyLax(Exact):
    """Keeps a draft 3% too often."""

    def accept_at(self, p, q, token, depth):
        return (1.03 * super().accept_at(p, q, token, depth)).clamp(max=1)


class WrongSiblings(StaticTreeDrafter):
    """Labels all siblings with the same q."""

    def propose(self, uniforms):
        draft = super().propose(uniforms)
        return replace(draft, q=draft.q[:, :1].expand_as(draft.q))


@pytest.mark.parametrize(
    "rule", slow_but([WrongResidual(), SlightlyWrongResidual(), SlightlyLax()], WrongResidual())
)
@pytest.mark.parametrize(
    "tree", slow_but(named({name: TREES[name] for name in ("chain 3", "small")}), "chain 3")
)
def test_a_planted_fault_in_a_rule_is_caught(tree, rule):
    report = check(rule, tree)
    assert not report.agrees
    assert report.tv > 1.5 * report.noise


@pytest.mark.slow
def test_a_planted_fault_in_a_drafter_is_caught():
    assert not check(
        Exact(), lambda draft: WrongSiblings(draft, Tree.from_paths([[0], [1]])), rows=50_000
    ).agrees


@pytest.mark.slow
def test_the_vanilla_residual_below_one_is_caught():
    assert not check(Relaxed((0.7, 0.35, 0.1), "vanilla"), Tree.chain(3), rows=50_000).agrees


@pytest.mark.slow
def test_a_claimed_law_that_is_wrong_is_caught():
    strong, weak = Relaxed(uniform(2.0, 2)), Relaxed(uniform(1.7, 2))
    assert not check(strong, Tree.chain(2), law=decoded_law(weak), rows=100_000).agrees


# The instrument


@pytest.mark.slow
def test_true_laws_pass_at_the_nominal_rate():
    law = torch.rand(30, generator=torch.Generator().manual_seed(0)).double() ** 3
    law /= law.sum()
    draws = uniforms(torch.arange(400).unsqueeze(1), torch.arange(1, 5001))
    outcomes = torch.searchsorted(law.cumsum(0).float(), draws).clamp(max=29)
    results = [compare(torch.bincount(row, minlength=30), law) for row in outcomes]
    p_values = torch.tensor([result.p_value for result in results])
    assert 0.4 < p_values.mean() < 0.6
    assert (p_values < 0.05).float().mean() < 0.09
    assert (p_values < 0.05).float().mean() > 0.02
    assert torch.tensor([result.tv / result.noise for result in results]).mean() == pytest.approx(
        1, abs=0.05
    )


def test_a_small_shift_fails():
    law = torch.full((20,), 0.05).double()
    shifted = law + 0.01 * torch.tensor([1.0, -1.0] * 10).double()
    assert compare(10_000 * law, law).p_value == 1
    assert not compare(10_000 * shifted, law).agrees


def test_an_impossible_outcome_fails_outright():
    result = compare(torch.tensor([50, 49, 1]), torch.tensor([0.5, 0.5, 0.0]))
    assert result.p_value == 0
    assert "DIFFERS" in str(result)
    assert compare(torch.tensor([50, 50, 0]), torch.tensor([0.5, 0.5, 0.0])).agrees
    assert compare(torch.tensor([100, 0]), torch.tensor([1.0, 0.0])).p_value == 1


def test_rare_outcomes_are_pooled():
    law = torch.tensor([0.9999, 0.00005, 0.00005])
    assert compare(torch.tensor([9999, 1, 0]), law).agrees
    assert not compare(torch.tensor([9979, 11, 10]), law).agrees
    common = torch.cat([torch.full((100,), 0.00999), torch.full((100,), 0.00001)])
    pooled = torch.cat([torch.full((100,), 999), torch.tensor([100] + [0] * 99)])
    assert compare(
        pooled, common
    ).agrees  # one rare outcome took all of the pool: pooling cannot see that
    assert not compare(torch.cat([pooled[:100], 3 * pooled[100:]]), common).agrees


def test_a_small_pool_is_tested_by_the_law_of_its_count():
    """Expected fewer than 5 times: many are rare, none are not."""
    common, pool = 1_000_000, 4.5
    law = torch.tensor([common, common, pool], dtype=torch.float64) / (2 * common + pool)
    none, many = (compare(torch.tensor([common, common, seen]), law).p_value for seen in (0, 14))
    poisson = [math.exp(-pool) * pool**count / math.factorial(count) for count in range(14)]
    assert none == pytest.approx(1, abs=0.01)
    assert many == pytest.approx(2 * (1 - sum(poisson)), rel=0.05)


def test_sequences_are_counted_in_lexicographic_order():
    tokens = torch.tensor([[0, 1], [1, 0], [1, 0], [2, 2]])
    assert emitted_law(tokens, 3).tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 1]


def test_tables_follow_the_sampling():
    sampling = Sampling(guidance=3.0, temperature=0.8, top_k=2)
    target = TableTarget(3, 3, sampling)
    assert target.logits.shape == (2, 13, 3)
    torch.testing.assert_close(target.table, sampling.distribution(target.logits)[0])
    assert [p.shape for p in target.conditionals()] == [(1, 3), (3, 3), (9, 3)]
    assert target.law().sum().item() == pytest.approx(1)
    p = target.conditionals()
    assert target.law()[2 * 9 + 0 * 3 + 1].item() == pytest.approx(
        (p[0][0, 2] * p[1][2, 0] * p[2][2 * 3 + 0, 1]).item()
    )


def test_the_noise_of_a_draft_is_a_standard_deviation():
    target = TableTarget(6, 5, spread=0.1)
    noise = [TableDraft(target, noise).table.log() - target.table.log() for noise in (0, 0.5, 2)]
    none, some, more = (part - part.mean(-1, keepdim=True) for part in noise)
    assert none.abs().max() < 1e-5
    torch.testing.assert_close(more, 4 * some, rtol=1e-4, atol=1e-4)
    # the mean of 6 logits has taken 1/6 of the variance
    assert some.square().mean().item() == pytest.approx(0.5**2 * 5 / 6, rel=0.1)


@pytest.mark.parametrize(("vocab_size", "length"), [(5, 9), (100_001, 1)])
def test_too_many_outcomes_are_refused(vocab_size, length):
    with pytest.raises(TemperaError, match=f"{vocab_size}\\^{length} outcomes"):
        check(Exact(), Tree.chain(1), vocab_size=vocab_size, length=length)


def test_a_report_states_its_result():
    assert str(check(Exact(), Tree.chain(1), rows=1000)).startswith("agrees: p = 0.")
    assert RandomStreams(0, ["a"]).next(1).shape == (1, 1)


def test_distributions_by_length_are_normalised_in_float64():
    table = torch.rand(1 + 3, 3, generator=torch.Generator().manual_seed(0))
    first, second = by_length(table, 2)
    assert (first.dtype, first.shape, second.shape) == (torch.float64, (1, 3), (3, 3))
    torch.testing.assert_close(first[0], table[0].double() / table[0].double().sum())
    assert (second.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([9, 4, 7], [10.0, 5.0, 5.0]),  # expected 5 times: a cell of its own
        ([9, 8, 1, 2], [10.0, 5.0, 2.5, 2.5]),  # a pool of 5: one more cell
        ([14, 6, 3, 3], [13.0, 7.0, 4.0, 2.0]),
    ],
)
def test_the_p_value_is_pearsons(counts: list[int], expected: list[float]) -> None:
    from scipy.stats import chisquare

    found = compare(torch.tensor(counts), torch.tensor(expected) / sum(expected))
    common = [place for place, count in enumerate(expected) if count >= 5]
    rare = [place for place, count in enumerate(expected) if count < 5]
    cells = [(counts[place], expected[place]) for place in common]
    if rare:
        cells.append((sum(counts[place] for place in rare), sum(expected[place] for place in rare)))
    assert found.p_value == pytest.approx(chisquare(*zip(*cells, strict=True)).pvalue)


def test_a_small_pool_counts_only_where_it_was_seen() -> None:
    law = torch.tensor([10.0, 8.0, 2.0], dtype=torch.float64) / 20
    unseen = compare(torch.tensor([12, 8, 0]), law)
    assert unseen.p_value == pytest.approx(math.erfc((0.4 / 2) ** 0.5), rel=1e-6)  # one degree
    lone = compare(torch.tensor([19, 1]), torch.tensor([0.95, 0.05], dtype=torch.float64))
    assert lone.p_value == 1  # one cell tests nothing, and one of one expected is no surprise


def test_the_noise_is_the_mean_distance_of_true_frequencies() -> None:
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = compare(torch.tensor([50, 30, 20]), law)
    assert found.tv == pytest.approx(0)
    expected = sum((p * (1 - p) / (2 * math.pi * 100)) ** 0.5 for p in law.tolist())
    assert (found.noise, found.rows) == (pytest.approx(expected), 100)


def test_one_in_10_000_is_the_level() -> None:
    assert LawComparison(1.1e-4, 0.1, 0.1, 10).agrees
    assert not LawComparison(1e-4, 0.1, 0.1, 10).agrees


def test_100_000_outcomes_are_not_too_many() -> None:
    assert check(Exact(), Tree.chain(1), vocab_size=10, length=5, rows=20).rows == 20


def test_drafts_past_the_image_get_the_first_row() -> None:
    table = torch.rand(4, 3)
    found = lookup(table, torch.tensor([[3, 4], [0, 99]]))
    assert found.equal(torch.stack([table[[3, 0]], table[[0, 0]]]))


def test_forced_tokens_are_forced_after_every_prefix() -> None:
    target = TableTarget(3, 3, forced={2: 1})
    assert target.forced.tolist() == [[-1] * 4 + [1] * 9]
    assert target.grid == (1, 3) and TableTarget(3, 4, grid=(2, 2)).grid == (2, 2)
    assert TableTarget(3, 2, spread=0.0).logits.abs().max() == 0
    torch.testing.assert_close(TableTarget(spread=3.0).logits, 2 * TableTarget().logits)
    assert TableTarget().logits.shape == (1, 1 + 3 + 9 + 27, 3)


def test_greedy_tables_also_give_the_law_at_temperature_one() -> None:
    nothing = Draft(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, 3), Tree.empty())
    for temperature in (0.0, 0.7):
        target = TableTarget(3, 2, Sampling(1.0, temperature))
        target.begin(["a", "b"], 0)
        scores = target.score(nothing)
        assert scores.hidden.shape == (2, 1, 0) and not target.compiled
        if temperature > 0:
            assert scores.soft is None
        else:
            assert scores.soft is not None
            root = TableTarget(3, 2).table[:1]
            torch.testing.assert_close(scores.soft, root.expand(2, 1, 3))


def test_only_the_first_round_of_a_batch_is_drafted() -> None:
    drafter = FirstRoundOnly(StaticTreeDrafter(TableDraft(TableTarget()), Tree.chain(2)))
    for _ in range(2):
        drafter.begin(["a"] * 5)
        first, *later = (drafter.propose(torch.rand(5, drafter.uniforms)) for _ in range(3))
        assert first.tokens.shape == (5, 2) and first.tree.nodes == 2
        for draft in later:
            assert draft.tokens.shape == (5, 0) and draft.q.shape == (5, 0, 0)
            assert draft.tree.nodes == 0


def test_a_check_unless_told_is_of_100_000_images_of_four_tokens_out_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def few(rows: int, seed: int) -> RandomStreams:
        asked.append(rows)
        return RandomStreams(seed, list(map(str, range(30))))

    def law(target: TableTarget, draft: TableDraft) -> torch.Tensor:
        assert target.table.equal(TableTarget(3, 4).table)
        assert draft.table.equal(TableDraft(target, 1.5, 1).table)
        return target.law()

    monkeypatch.setattr(tables, "_streams", few)
    found = check(Exact(), Tree.chain(1), law=law)
    target = TableTarget()
    output = emit(target, StaticTreeDrafter(TableDraft(target), Tree.chain(1)), Exact())
    assert asked == [100_000] * 2 and output.trace.tv is None
    assert found.tv == compare(emitted_law(output.tokens, 3), target.law()).tv
    assert found.accepted_length == float(output.trace.accepted_length.mean())
