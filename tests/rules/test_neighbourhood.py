import math
from dataclasses import replace

import pytest
import torch
from cases import slow_but
from near_codes import near, near_rules
from random_drafts import SMALL, RowTrees, random_draft

from tempera.decoding import probabilities
from tempera.decoding.diagnostics import diagnose, proximity
from tempera.decoding.interfaces import Scores
from tempera.decoding.probabilities import Sampling, normalise, one_hot
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness import theory
from tempera.exactness.tables import FirstRoundOnly, TableDraft, TableTarget, check, emit
from tempera.rules import neighbourhood
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP, _places_away
from tempera.rules.standard import Exact

DEPTH = torch.tensor(1)
TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
DEEP = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
NARROW = near(4, 2)
RULES = [pytest.param(rule, id=name) for name, rule in near_rules(4).items()]
ROUGH = [pytest.param(rule, id=name) for name, rule in near_rules(4).items() if "published" in name]


def laws(count=40, codes=12, zeros=0.3, seed=0):
    """Pairs of distributions, some of whose entries are 0."""
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(2, count, codes, generator=generator, dtype=torch.float64) ** 3
    mass = mass * (torch.rand(mass.shape, generator=generator) > zeros)
    return normalise(mass, otherwise=torch.full_like(mass, 1 / codes))


# The definitions, one code at a time


def moved(p, members, x):
    """p_{A,x}."""
    changed = p.clone()
    changed[members] = 0
    changed[x] = p[members].sum()
    return changed


def divergence(a, b, measure):
    if measure == "tvd":
        return 0.5 * (a - b).abs().sum().item()
    mean = (a + b) / 2
    return (
        0.5
        * (
            torch.xlogy(a, a / mean).nan_to_num().sum()
            + torch.xlogy(b, b / mean).nan_to_num().sum()
        ).item()
    )


def proximity_set(p, x, table, fits):
    """Algorithm 2 of LANTERN."""
    members = [x]
    for code in table[x, 1:].tolist():
        if not fits([*members, code]):
            break
        members.append(code)
    return members


def by_hand(rule, p, x):
    table = rule.neighbours.table
    if isinstance(rule, Lantern):
        return proximity_set(
            p,
            x,
            table,
            lambda members: divergence(moved(p, members, x), p, rule.measure) < rule.delta,
        )
    return proximity_set(p, x, table, lambda members: p[members[1:]].sum() < rule.lam * p[x])


TABLE = near(12, 5)
AGGREGATED = [
    Lantern(TABLE, 0.05),
    Lantern(TABLE, 0.4),
    Lantern(TABLE, 0.1, "jsd"),
    Lantern(TABLE, 0.3, "jsd"),
    LanternPP(TABLE, 0.5),
    LanternPP(TABLE, 2),
    Lantern(near(12, 12), 0.99),
    LanternPP(near(12, 1), 2),
]


@pytest.mark.parametrize(
    "rule", slow_but(AGGREGATED, Lantern(TABLE, 0.4), LanternPP(TABLE, 2)), ids=str
)
def test_lantern_follows_the_papers(rule):
    best = replaced(rule, "optimal")
    for p, q in zip(*laws(), strict=True):
        f = []
        for x in range(12):
            members = by_hand(rule, p, x)
            f.append(min(1.0, (p[members].sum() / q[x]).item()) if q[x] > 0 else 1.0)
            assert rule.accept_at(p, q, torch.tensor(x), DEPTH).item() == pytest.approx(f[-1])
            left = (moved(p, members, x) - q).clamp(min=0)
            expected = left / left.sum() if left.sum() > 1e-12 else p
            torch.testing.assert_close(rule.residual(p, q, torch.tensor(x), DEPTH), expected)
            assert rule.keeps(p, torch.tensor(x)) == (
                moved(p, members, x)[x] >= moved(p, members, x).max()
            )
        f = torch.tensor(f, dtype=torch.float64)
        torch.testing.assert_close(rule.accept(p, q, DEPTH), f)
        left = (p - q * f).clamp(min=0)
        torch.testing.assert_close(
            best.residual(p, q, torch.tensor(0), DEPTH),
            left / left.sum() if left.sum() > 1e-12 else p,
        )
        assert rule.keeps_each(p).tolist() == [
            bool(rule.keeps(p, torch.tensor(x))) for x in range(12)
        ]


def replaced(rule, residual):
    if isinstance(rule, Lantern):
        return Lantern(rule.neighbours, rule.delta, rule.measure, residual)
    return LanternPP(rule.neighbours, rule.lam, residual)


@pytest.mark.parametrize("most", [0, 1, 7, 40])
def test_places_in_the_order_of_p_are_those_of_a_sort(most):
    p = torch.randint(0, 6, (50, 30)) / 6.0  # many are equal, some 0
    near = torch.rand(50, 30).argsort(-1)[:, :9]
    order = p.argsort(dim=-1, descending=True, stable=True).argsort(-1).gather(-1, near)
    expected = (order - order[:, :1]).abs() <= most
    assert _places_away(p, near, most).equal(expected)
    assert _places_away(-0.0 * p, near, most).equal((near - near[:, :1]).abs() <= most)


@pytest.mark.parametrize(
    "rule", [GSD(TABLE, 2), GSD(TABLE, 0), GSD(near(12, 12), 3), GSD(TABLE, None)], ids=str
)
def test_grouped_follows_the_paper(rule):
    for p, q in zip(*laws(), strict=True):
        order = sorted(range(12), key=lambda code: (-p[code].item(), code))
        groups = [
            [
                y
                for y in rule.neighbours.table[x].tolist()
                if rule.ranks is None or abs(order.index(y) - order.index(x)) <= rule.ranks
            ]
            for x in range(12)
        ]
        f = [
            min(1.0, (p[group].sum() / q[group].sum()).item()) if q[group].sum() > 0 else 1.0
            for group in groups
        ]
        torch.testing.assert_close(rule.accept(p, q, DEPTH), torch.tensor(f, dtype=torch.float64))
        for x in range(12):
            assert rule.accept_at(p, q, torch.tensor(x), DEPTH).item() == pytest.approx(f[x])
            assert rule.keeps(p, torch.tensor(x)) == (order[0] in groups[x])
        torch.testing.assert_close(
            rule.residual(p, q, DEPTH, DEPTH), Exact().residual(p, q, DEPTH, DEPTH)
        )
        best = GSD(rule.neighbours, rule.ranks, "optimal").residual(p, q, DEPTH, DEPTH)
        left = (p - q * torch.tensor(f)).clamp(min=0)
        torch.testing.assert_close(
            best, left / left.sum() if left.sum() > 1e-7 else p, atol=1e-7, rtol=1e-6
        )


@pytest.mark.parametrize(
    "rule",
    [LanternPP(near(12, 1), 2), Lantern(near(12, 1), 1.0), GSD(near(12, 1), None), GSD(TABLE, 0)],
)
def test_a_code_without_neighbours_is_tested_exactly(rule):
    p, q = laws()
    torch.testing.assert_close(rule.accept(p, q, DEPTH), Exact().accept(p, q, DEPTH))
    token = torch.zeros(40, dtype=torch.int64)
    rejected = Exact().accept_at(p, q, token, DEPTH) < 1
    torch.testing.assert_close(
        rule.residual(p, q, token, DEPTH)[rejected], Exact().residual(p, q, token, DEPTH)[rejected]
    )


def test_of_4_3_codes_the_fifth_counts_with_a_weight_of_three_tenths():
    p, q = laws(30, zeros=0.0)
    rule, weight = GSD(TABLE, None, k=4.3), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.3])
    expected = [
        (p[:, near] @ weight.double() / (q[:, near] @ weight.double())).clamp(max=1)
        for near in TABLE.table
    ]
    f = rule.accept(p, q, DEPTH)
    torch.testing.assert_close(f, torch.stack(expected, -1), rtol=1e-6, atol=1e-6)
    token = torch.arange(30) % 12
    torch.testing.assert_close(rule.accept_at(p, q, token, DEPTH), f[torch.arange(30), token])
    assert GSD(TABLE, k=5) == GSD(TABLE, 7) != GSD(TABLE, 7, k=4.3)


def test_no_positions_have_no_chances():
    p = torch.zeros(0, 12)
    for rule in (Lantern(TABLE, 0.3), GSD(TABLE, 2)):
        assert rule.accept(p, p, DEPTH).shape == (0, 12)


def test_laxer_parameters_keep_more():
    p, q = laws(200)
    for looser, tighter in [
        (Lantern(TABLE, 0.4), Lantern(TABLE, 0.1)),
        (Lantern(TABLE, 0.3, "jsd"), Lantern(TABLE, 0.1, "jsd")),
        (LanternPP(TABLE, 2), LanternPP(TABLE, 1)),
        (Lantern(TABLE, 0.4), Lantern(near(12, 3), 0.4)),
    ]:
        more = looser.accept(p, q, DEPTH) - tighter.accept(p, q, DEPTH)
        assert more.min() >= 0
        assert more.max() > 0.1


def check_mean_residual(rule, p, q):
    rows, codes = p.shape
    tokens = [torch.full((rows,), token) for token in range(codes)]
    rejected = q * (1 - rule.accept(p, q, DEPTH))
    each = torch.stack([rule.residual(p, q, token, DEPTH) for token in tokens], 1)
    mean = (rejected.unsqueeze(-1) * each).sum(1) / rejected.sum(-1, keepdim=True)
    some = rejected.sum(-1) > 1e-9
    assert some.any()
    found = rule.mean_residual(p, q, torch.ones(rows))
    torch.testing.assert_close(found[some], mean[some])
    assert found.sum(-1).tolist() == pytest.approx([1] * rows)


@pytest.mark.parametrize(
    "rule", [rule for rule in AGGREGATED if 1 < rule.neighbours.k < 12], ids=str
)
def test_the_mean_residual_is_the_mean_over_the_rejected_tokens(rule):
    p, q = laws()
    for kind in ("published", "optimal"):
        check_mean_residual(replaced(rule, kind), p, q)


def test_a_token_that_is_kept_may_have_all_that_lacks_near_it():
    check_mean_residual(LanternPP(near(3, 2), 2.0), *laws(200, codes=3, zeros=0.0))


@pytest.mark.parametrize(
    "rule", [Lantern(TABLE, 0.3), LanternPP(TABLE, 2.0, "optimal"), GSD(TABLE, 2)], ids=str
)
def test_chunks_of_the_vocabulary_give_the_same_result(rule, monkeypatch):
    p, q = laws()

    def everything():
        token = torch.ones(40, dtype=torch.int64)
        results = [
            rule.accept(p, q, DEPTH),
            rule.residual(p, q, token, DEPTH),
            rule.keeps_each(p).double(),
        ]
        return (
            [*results, rule.mean_residual(p, q, torch.ones(40))]
            if isinstance(rule, Lantern | LanternPP)
            else results
        )

    whole = everything()
    monkeypatch.setattr(neighbourhood, "AT_ONCE", 40 * 5 * 5)
    torch.testing.assert_close(everything(), whole)
    monkeypatch.setattr(neighbourhood, "AT_ONCE", 1)
    torch.testing.assert_close(everything(), whole)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", slow_but([Tree.chain(3), SMALL], SMALL), ids=["chain", "tree"])
def test_no_neighbour_replaces_a_forced_token(rule, tree):
    target = TableTarget(4, 4, forced={0: 2, 2: 1})
    tokens = emit(target, StaticTreeDrafter(TableDraft(target), tree), rule, rows=2000).tokens
    assert tokens[:, 0].eq(2).all()
    assert tokens[:, 2].eq(1).all()
    assert tokens[:, 1].unique().numel() == 4
    target = TableTarget(4, 4, Sampling(1.0, 0), forced={0: 2, 2: 1})
    tokens = emit(target, StaticTreeDrafter(TableDraft(target), tree), rule, rows=200).tokens
    assert tokens[:, 0].eq(2).all()
    assert tokens[:, 2].eq(1).all()


@pytest.mark.parametrize(
    "rule",
    [Lantern(near(4, 4), 1.0), Lantern(near(4, 4), math.log(2), "jsd"), GSD(near(4, 4), None)],
)
def test_no_neighbour_replaces_a_forced_token_at_the_largest_parameters(rule):
    p, q = one_hot(torch.tensor(2), 4), torch.tensor([0.5, 0.0, 0.5, 0.0])
    assert rule.accept(p, q, DEPTH).tolist() == [0, 1, 1, 1]


# Laws


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_on_a_chain_the_law_is_that_of_the_definition_and_not_the_targets(rule):
    report = check(rule, Tree.chain(3), vocab_size=4, law=chain_law(rule))
    assert report.agrees, report
    report = check(rule, Tree.chain(3), vocab_size=4, rows=60_000)
    assert not report.agrees, report


def chain_law(rule):
    return lambda target, draft: theory.decoded_law(
        target.conditionals(), draft.conditionals(), rule, 3, target.length
    )


def tree_law(rule, tree):
    return lambda target, draft: theory.tree_law(
        target.conditionals(), draft.conditionals(), rule, tree, target.length
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_on_a_tree_the_law_is_that_of_the_definition(rule):
    report = check(rule, TREE, vocab_size=4, length=3, law=tree_law(rule, TREE))
    assert report.agrees, report
    assert report.accepted_length > 2.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [Lantern(near(3, 2), 0.2), LanternPP(near(3, 2), 1.0), GSD(near(3, 2), 1)], ids=str
)
def test_the_law_on_a_deeper_tree_over_several_rounds(rule):
    report = check(rule, DEEP, length=5, law=tree_law(rule, DEEP))
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(3.0, 1.7), Sampling(1.0, top_k=2), Sampling(2.0, 1.3, 3, 0.9)], ids=str
)
@pytest.mark.parametrize("rule", ROUGH)
def test_the_law_follows_the_sampling_of_the_target(rule, sampling):
    report = check(
        rule, TREE, vocab_size=4, length=3, sampling=sampling, law=tree_law(rule, TREE), rows=50_000
    )
    assert report.agrees, report


class WholeNeighbourhood(Lantern):
    """Public code's residual: on a rejection all of B(x) is zeroed."""

    def residual(self, p, q, token, depth):
        emptied = p.scatter(-1, self.neighbours.of(p)[token], 0.0)
        return normalise((emptied - q).clamp(min=0), otherwise=p)


class OneLate(Lantern):
    """Adds the first code that does not fit as well."""

    def _fits(self, own, moved):
        return super()._fits(own, torch.nn.functional.pad(moved, (1, -1)))


class TooLax(GSD):
    """Keeps 3% too often."""

    def accept_at(self, p, q, token, depth):
        return (super().accept_at(p, q, token, depth) * 1.03).clamp(max=1)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Tree.chain(3), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("faulty", "rule"),
    [
        (WholeNeighbourhood(NARROW, 0.1), Lantern(NARROW, 0.1)),
        (OneLate(NARROW, 0.1), Lantern(NARROW, 0.1)),
        (LanternPP(NARROW, 1.0), LanternPP(NARROW, 2.0)),
        (TooLax(NARROW, 1), GSD(NARROW, 1)),
    ],
    ids=["whole neighbourhood", "one code late", "λ - 1 for λ", "keeps 3% too often"],
)
def test_a_planted_fault_is_caught(faulty, rule, tree):
    claimed = tree_law(rule, tree)
    assert check(rule, tree, vocab_size=4, length=3, law=claimed, rows=200_000).agrees
    report = check(faulty, tree, vocab_size=4, length=3, law=claimed, rows=200_000)
    assert not report.agrees, report


# Greedy decoding

GREEDY = Sampling(1.0, temperature=0)


@pytest.mark.parametrize(
    "tree", slow_but([Tree.chain(3), SMALL, None], SMALL), ids=["chain", "tree", "tree per row"]
)
@pytest.mark.parametrize("rule", ROUGH)
def test_greedy_decoding_accepts_by_the_untempered_distribution(rule, tree):
    """Row by row: the first child that the rule keeps, else the target's choice."""
    target = TableTarget(4, 5, GREEDY, seed=3)
    shapes = torch.tensor(
        [
            [-1, -1, 0, 0, 1],
            [-1, 0, 1, 2, 3],
            [-1, -1, -1, 1, 3],
            [-1, 0, 0, 0, 3],
            [-1, -1, -1, -1, -1],
        ]
    )
    draft, _, uniforms = random_draft(50, tree or Tree.from_parents(shapes.repeat(10, 1)), 4)
    soft = torch.rand(
        50, 1 + draft.tree.nodes, 4, generator=torch.Generator().manual_seed(1)
    ).softmax(-1)
    p = one_hot(soft.argmax(-1), 4)
    verdict = verify(draft, Scores(p, p, soft), rule, uniforms)
    for row in range(50):
        parents = (draft.tree.parents[row] if draft.tree.per_row else draft.tree.parents).tolist()
        node, path = -1, []
        while True:
            children = [
                n
                for n, parent in enumerate(parents)
                if parent == node and rule.keeps(soft[row, 1 + node], draft.tokens[row, n])
            ]
            if not children:
                break
            node = children[0]
            path.append(node)
        assert verdict.path[row, : len(path) + 1].tolist()[: len(path)] == path
        assert verdict.accepted[row] == len(path)
        assert verdict.next_token[row] == soft[row, 1 + node].argmax()
    plain = verify(draft, Scores(p, p, soft), Exact(), uniforms)
    assert verdict.accepted.sum() > plain.accepted.sum()
    drafter = (
        RowTrees(TableDraft(target))
        if tree is None
        else StaticTreeDrafter(TableDraft(target), tree)
    )
    exact, relaxed = (
        emit(target, drafter, Exact(), rows=2),
        emit(target, drafter, rule, rows=2, diagnostics=True),
    )
    assert relaxed.trace.rounds[0] <= exact.trace.rounds[0]
    assert relaxed.tokens[0].equal(relaxed.tokens[1])
    assert (relaxed.trace.bound.sum(-1) > 0.5).equal((relaxed.tokens != exact.tokens).any(-1))


@pytest.mark.parametrize("rule", [Lantern(near(6, 3), 0.3), GSD(near(6, 3), None)], ids=str)
def test_in_greedy_decoding_a_token_other_than_the_argmax_has_infinite_kl(rule):
    draft, _, uniforms = random_draft(60, Tree.chain(1))
    soft = torch.rand(60, 2, 6, generator=torch.Generator().manual_seed(1)).softmax(-1)
    p = one_hot(soft.argmax(-1), 6)
    verdict = verify(draft, Scores(p, p, soft), rule, uniforms)
    _, bound, kl = diagnose(draft, verdict, p, rule, soft)
    wrong = (draft.q[:, 0] * rule.keeps_each(soft[:, 0]) * (1 - p[:, 0])).sum(-1)
    torch.testing.assert_close(bound[:, 0], wrong)
    assert kl[:, 0].isinf().equal(wrong > 0)


# Diagnostics


@pytest.mark.parametrize("rule", slow_but(RULES, "lantern published"))
def test_the_loop_measures_what_theory_expects_of_a_round(rule):
    target = TableTarget(4, 4)
    draft = TableDraft(target)
    p, q = target.conditionals(), draft.conditionals()
    trace = emit(
        target,
        FirstRoundOnly(StaticTreeDrafter(draft, Tree.chain(3))),
        rule,
        rows=40_000,
        diagnostics=True,
    ).trace
    _near((trace.round == 0).sum(-1), theory.expected_emitted(p, q, rule, 3))
    _near(trace.bound.sum(-1), theory.tv_bound(p, q, rule, 3))
    _near(trace.kl.sum(-1), theory.kl_bound(p, q, rule, 3))
    law, truth = theory.one_round_law(p, q, rule, 3), theory.sequence_law(p, 4)
    assert probabilities.total_variation(law, truth) <= theory.tv_bound(p, q, rule, 3)
    assert probabilities.kl_divergence(law, truth) <= theory.kl_bound(p, q, rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Tree.chain(2), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_over_many_rounds_the_measured_bounds_bound(rule, tree):
    target = TableTarget(4, 3)
    draft = TableDraft(target)
    trace = emit(target, StaticTreeDrafter(draft, tree), rule, rows=20_000, diagnostics=True).trace
    law, truth = (
        theory.tree_law(target.conditionals(), draft.conditionals(), rule, tree, 3),
        target.law(),
    )
    assert probabilities.total_variation(law, truth) <= _upper(trace.bound.sum(-1))
    assert probabilities.kl_divergence(law, truth) <= _upper(trace.kl.sum(-1))
    assert trace.kl.isfinite().all()
    assert trace.kl.sum(-1).mean() < 2 * probabilities.kl_divergence(law, truth) + 0.02


def _near(samples, expected):
    samples = samples.double()
    error = samples.std().item() / len(samples) ** 0.5
    assert samples.mean().item() == pytest.approx(expected, abs=5 * error + 1e-6)


def _upper(samples):
    samples = samples.double()
    return samples.mean() + 5 * samples.std().nan_to_num() / len(samples) ** 0.5 + 1e-6


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Lantern(TABLE, 0),
            "delta=0 does not bound a distortion by measure=tvd; give a number above 0, at most 1",
        ),
        (lambda: Lantern(TABLE, -0.1), "delta=-0.1 does not bound"),
        (lambda: Lantern(TABLE, 1.1), "delta=1.1 does not bound"),
        (lambda: Lantern(TABLE, float("nan")), "delta=nan does not bound"),
        (
            lambda: Lantern(TABLE, 0.8, "jsd"),
            "delta=0.8 does not bound a distortion by measure=jsd; give a number above 0, at "
            "most 0.6931",
        ),
        (lambda: Lantern(TABLE, 0.1, "kl"), "measure=kl is not known; choose one of tvd, jsd"),
        (
            lambda: Lantern(TABLE, 0.1, "tvd", "vanilla"),
            "residual=vanilla is not known; choose one of published, optimal",
        ),
        (
            lambda: LanternPP(TABLE, 0),
            "lam=0 lets a token take nothing from its neighbours; give a finite number above 0",
        ),
        (lambda: LanternPP(TABLE, -1), "lam=-1 "),
        (lambda: LanternPP(TABLE, float("inf")), "lam=inf "),
        (lambda: GSD(TABLE, -1), "ranks=-1 is not a distance"),
        (lambda: GSD(TABLE, k=4), "k=4 codes do not go with a table of 5 neighbours"),
        (lambda: GSD(TABLE, k=5.1), "k=5.1 codes do not go with a table of 5 neighbours"),
    ],
)
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(TemperaError, match=message.replace("(", "\\(")) as problem:
        make()
    assert "\n" not in str(problem.value)


def test_rules_are_values_with_a_readable_repr():
    assert Lantern(near(12, 5), 0.3) == Lantern(near(12, 5), 0.3)
    assert hash(LanternPP(near(12, 5), 2)) == hash(LanternPP(near(12, 5), 2.0))
    assert GSD(near(12, 5), 3) != GSD(near(12, 4), 3)
    assert "l2, k=5, codebook=" in repr(LanternPP(TABLE, 2.0))
    assert replace(random_draft(1, Tree.chain(1))[0], fresh=False).fresh is False


@pytest.mark.parametrize("rule", [Lantern(NARROW, 0.3), LanternPP(NARROW, 2.0)], ids=["δ", "λ"])
def test_the_size_of_the_set_of_the_first_draft(rule):
    """LANTERN, Figure 7: counted where a draft was tested, and nowhere else."""
    draft, p, uniforms = random_draft(50, SMALL, vocab_size=4)
    verdict = verify(draft, Scores(p, p), rule, uniforms)
    sizes = proximity(draft, verdict, p, rule)
    children = draft.tree.children.tolist()
    for row in range(50):
        for place, node in enumerate(verdict.visited[row].tolist()):
            first = children[node][0]
            if first < 0:
                assert sizes[row, place].isnan()
                continue
            law, token = p[row, node], int(draft.tokens[row, first])
            moved = law.clone()
            moved[token] = 0
            near = NARROW.table[token].tolist()
            sets = [near[: 1 + count] for count in range(len(near))]
            bound = rule.delta if isinstance(rule, Lantern) else rule.lam * law[token]
            fitting = [one for one in sets if len(one) == 1 or moved[one].sum() < bound]
            assert sizes[row, place] == len(fitting[-1])
    assert sizes[~sizes.isnan()].unique().numel() > 1
    assert proximity(draft, verdict, p, Exact()).isnan().all()


@pytest.mark.parametrize(("own", "moved"), [(0.3, 0.2), (0.0, 0.4), (0.5, 0.0), (0.0, 0.0)])
def test_the_divergence_of_gathered_mass(own, moved):
    """Jensen and Shannon's, of the two places that differ, by definition; 0 without mass."""
    before, after = (own, moved), (own + moved, 0.0)
    expected = sum(
        side * math.log(2 * side / (one + other)) / 2
        for one, other in zip(before, after, strict=True)
        for side in (one, other)
        if side
    )
    found = neighbourhood._jensen_shannon(torch.tensor(own), torch.tensor(moved))
    assert float(found) == pytest.approx(expected, abs=1e-7)
