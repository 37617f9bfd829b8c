import math
from dataclasses import replace

import pytest
import torch
from near_codes import near, near_rules
from random_drafts import ROWS, SMALL, new_sequences, random_draft

from tempera.decoding.diagnostics import Diagnosed
from tempera.decoding.interfaces import Round, Scores
from tempera.decoding.probabilities import (
    Sampling,
    kl_divergence,
    normalise,
    one_hot,
    total_variation,
)
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule, verify
from tempera.drafters.jacobi import sjd, sjd_pac
from tempera.errors import TemperaError
from tempera.exactness.tables import TableTarget, emit
from tempera.rules import neighbourhood
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP
from tempera.rules.standard import Exact

DEPTH = torch.tensor(1)
NARROW = near(4, 2)
ROUGH = [pytest.param(rule, id=name) for name, rule in near_rules(4).items() if "published" in name]


def laws(count=10, codes=12, zeros=0.3, seed=0):
    """Pairs of distributions, some of whose entries are 0."""
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(2, count, codes, generator=generator, dtype=torch.float64) ** 3
    mass = mass * (torch.rand(mass.shape, generator=generator) > zeros)
    mass[0, -1] = 1  # equal probabilities are at the limit of λ = 2
    return normalise(mass, otherwise=torch.full_like(mass, 1 / codes))


# The definitions, one code at a time


def moved(p, members, x):
    """p_{A,x}."""
    return p.index_fill(0, torch.tensor(members), 0.0).index_fill(0, x, p[members].sum())


def fits(rule, p, members, x):
    if isinstance(rule, LanternPP):
        return p[members[1:]].sum() < rule.lam * p[x]
    after = moved(p, members, x)
    if rule.measure == "tvd":
        return total_variation(after, p) < rule.delta
    mean = (after + p) / 2
    return (kl_divergence(after, mean) + kl_divergence(p, mean)) / 2 < rule.delta


def by_hand(rule, p, x):
    """The set A(x) (LANTERN, Algorithm 2)."""
    members = [int(x)]
    for code in rule.neighbours.table[x, 1:].tolist():
        if not fits(rule, p, [*members, code], x):
            break
        members.append(code)
    return members


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


def without(p, taken):
    """Norm[p - taken]+, p if nothing is left but rounding."""
    left = (p - taken).clamp(min=0)
    return left / left.sum() if left.sum() > 1e-7 else p


@pytest.mark.parametrize("rule", AGGREGATED, ids=str)
def test_lantern_follows_the_papers(rule):
    best = replace(rule, residual_kind="optimal")
    for p, q in zip(*laws(), strict=True):
        f = torch.ones(12, dtype=torch.float64)
        for x in torch.arange(12):
            members = by_hand(rule, p, x)
            f[x] = (p[members].sum() / q[x]).clamp(max=1) if q[x] > 0 else 1.0
            after = moved(p, members, x)
            torch.testing.assert_close(rule.accept_at(p, q, x, DEPTH), f[x])
            if f[x] < 1:
                lacking = (after - q).clamp(min=0)
                expected = normalise(lacking, p) if lacking.sum() > 1e-12 else p
                torch.testing.assert_close(rule.residual(p, q, x, DEPTH), expected)
            assert rule.accepts_greedily(p, x) == (after[x] >= after.max())
        torch.testing.assert_close(rule.accept(p, q, DEPTH), f)
        found = best.residual(p, q, torch.tensor(0), DEPTH)
        torch.testing.assert_close(found, without(p, q * f))


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
        mass = [(p[group].sum().item(), q[group].sum().item()) for group in groups]
        f = [min(1.0, of_p / of_q) if of_q > 0 else 1.0 for of_p, of_q in mass]
        torch.testing.assert_close(rule.accept(p, q, DEPTH), torch.tensor(f, dtype=torch.float64))
        for x in range(12):
            assert rule.accept_at(p, q, torch.tensor(x), DEPTH).item() == pytest.approx(f[x])
            assert rule.accepts_greedily(p, torch.tensor(x)) == (order[0] in groups[x])
        plain = rule.residual(p, q, DEPTH, DEPTH)
        torch.testing.assert_close(plain, Exact().residual(p, q, DEPTH, DEPTH))
        best = replace(rule, residual_kind="optimal").residual(p, q, DEPTH, DEPTH)
        expected = without(p, q * torch.tensor(f))
        torch.testing.assert_close(best, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [LanternPP(near(12, 1), 2), Lantern(near(12, 1), 1.0), GSD(near(12, 1), None), GSD(TABLE, 0)],
)
def test_a_code_without_neighbours_is_tested_exactly(rule):
    p, q = laws()
    torch.testing.assert_close(rule.accept(p, q, DEPTH), Exact().accept(p, q, DEPTH))
    token = torch.zeros(10, dtype=torch.int64)
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
    assert GSD(TABLE, k=5.0).accept(p, q, DEPTH).equal(GSD(TABLE).accept(p, q, DEPTH))


def check_mean_residual(rule, p, q):
    rows, codes = p.shape
    tokens = [torch.full((rows,), token) for token in range(codes)]
    rejected = q * (1 - rule.accept(p, q, DEPTH))
    each = torch.stack([rule.residual(p, q, token, DEPTH) for token in tokens], 1)
    mean = (rejected.unsqueeze(-1) * each).sum(1) / rejected.sum(-1, keepdim=True)
    some = rejected.sum(-1) > 1e-9
    assert some.any()
    _, found = rule.expected(p, q, torch.ones(rows))
    torch.testing.assert_close(found[some], mean[some])
    assert found.sum(-1).tolist() == pytest.approx([1] * rows)


@pytest.mark.parametrize(
    "rule", [rule for rule in AGGREGATED if 1 < rule.neighbours.k < 12], ids=str
)
def test_the_mean_residual_is_the_mean_over_the_rejected_tokens(rule):
    p, q = laws()
    for kind in ("published", "optimal"):
        check_mean_residual(replace(rule, residual_kind=kind), p, q)


@pytest.mark.parametrize("rule", [Lantern(TABLE, 0.3), LanternPP(TABLE, 2.0, "kl")], ids=str)
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_neighbours_are_gathered_for_the_tokens_that_a_draft_can_have(rule, at_once, monkeypatch):
    p, q = laws()
    q = q.masked_fill(q < q.topk(4).values[..., -1:], 0.0)
    q = q / q.sum(-1, keepdim=True)
    f = rule.accept(p, q, DEPTH)
    tokens = [torch.full((len(p),), token) for token in range(p.shape[-1])]
    each = torch.stack([rule.residual(p, q, token, DEPTH) for token in tokens], 1)
    rejected = q * (1 - f)
    mean = (rejected.unsqueeze(-1) * each).sum(1) / rejected.sum(-1, keepdim=True)
    some = rejected.sum(-1) > 1e-9
    assert some.sum() > len(p) // 2
    monkeypatch.setattr(neighbourhood, "AT_ONCE", at_once)
    gathered, inner = [0], neighbourhood._gathered

    def counted(p, near):
        gathered[0] += near[..., 0].numel()
        return inner(p, near)

    monkeypatch.setattr(neighbourhood, "_gathered", counted)
    found, of_rejected = rule.expected(p, q, DEPTH)
    torch.testing.assert_close(torch.where(q > 0, found, 1.0), torch.where(q > 0, f, 1.0))
    torch.testing.assert_close(of_rejected[some], mean[some])
    assert gathered[0] <= 2 * 4 * len(p)  # of p, and of what the draft lacks


class ByToken(TokenRule):
    """A rule whose mean residual is added up token by token."""

    def __init__(self, rule):
        self.rule = rule
        self.accept, self.residual = rule.accept, rule.residual

    accept = residual = None

    def expected(self, p, q, depth):
        f = self.rule.accept(p, q, depth)
        every = torch.arange(p.shape[-1]).expand_as(p)
        each = [self.rule.residual(p, q, every[..., token], depth) for token in range(p.shape[-1])]
        mean = ((q * (1 - f)).unsqueeze(-1) * torch.stack(each, -2)).sum(-2)
        return f, normalise(mean, otherwise=p)


@pytest.mark.parametrize("kind", ["published", "optimal"])
@pytest.mark.parametrize("rule", [Lantern(near(9, 4), 0.3), LanternPP(near(9, 4), 2.0)], ids=str)
@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: sjd(target, 3),
        lambda target: sjd(target, 3, refinement=False),
        lambda target: sjd_pac(target, 5, branches=2, levels=2),
    ],
    ids=["sjd", "without refinement", "sjd_pac"],
)
def test_the_bounds_of_guesses_that_may_be_any_token_are_the_full_sums(drafter, rule, kind):
    """Jacobi drafters guess uniformly at first, whatever the target's top-k is."""
    rule = replace(rule, residual_kind=kind)
    target = TableTarget(9, 6, Sampling(1.0, top_k=4))
    found, full = (
        emit(target, drafter(target), one, rows=40, diagnostics=True)
        for one in (rule, ByToken(rule))
    )
    assert found.tokens.equal(full.tokens) and found.trace.bound.sum() > 1
    torch.testing.assert_close(found.trace.bound, full.trace.bound)
    torch.testing.assert_close(found.trace.kl, full.trace.kl, atol=1e-5, rtol=1e-4)


def test_a_token_that_is_kept_may_have_all_that_lacks_near_it():
    check_mean_residual(LanternPP(near(3, 2), 2.0), *laws(50, codes=3, zeros=0.0))


@pytest.mark.parametrize(
    "rule", [Lantern(TABLE, 0.3), LanternPP(TABLE, 2.0, "optimal"), GSD(TABLE, 2)], ids=str
)
def test_portions_of_the_vocabulary_give_the_same_result(rule, monkeypatch):
    p, q = laws()
    ones = torch.ones(len(p), dtype=torch.int64)

    def everything():
        return [
            rule.accept(p, q, DEPTH),
            rule.residual(p, q, ones, DEPTH),
            *rule.expected(p, q, ones),
        ]

    whole = everything()
    for at_once in (len(p) * 5 * 5, 1):
        monkeypatch.setattr(neighbourhood, "AT_ONCE", at_once)
        torch.testing.assert_close(everything(), whole)


@pytest.mark.parametrize(
    "rule",
    [Lantern(near(4, 4), 1.0), Lantern(near(4, 4), math.log(2), "jsd"), GSD(near(4, 4), None)],
)
def test_no_neighbour_replaces_a_forced_token_at_the_largest_parameters(rule):
    p, q = one_hot(torch.tensor(2), 4), torch.tensor([0.5, 0.0, 0.5, 0.0])
    assert rule.accept(p, q, DEPTH).tolist() == [0, 1, 1, 1]


# Greedy decoding

ROW_TREES = Tree.from_parents(torch.tensor(ROWS).repeat(10, 1))


@pytest.mark.parametrize(
    "tree", [Tree.chain(3), SMALL, ROW_TREES], ids=["chain", "tree", "tree per row"]
)
@pytest.mark.parametrize("rule", ROUGH)
def test_greedy_decoding_accepts_by_the_untempered_distribution(rule, tree):
    """Row by row: the first child that the rule keeps, else the target's choice."""
    draft, _, uniforms = random_draft(50, tree, 4)
    soft = torch.rand(
        50, 1 + draft.tree.nodes, 4, generator=torch.Generator().manual_seed(1)
    ).softmax(-1)
    p = one_hot(soft.argmax(-1), 4)
    verdict = verify(draft, Scores(p, p, soft), rule, None, uniforms)
    for row in range(50):
        parents = (draft.tree.parents[row] if draft.tree.per_row else draft.tree.parents).tolist()
        node, path = -1, []
        while True:
            p_here = soft[row, 1 + node]
            children = (n for n, parent in enumerate(parents) if parent == node)
            kept = [n for n in children if rule.accepts_greedily(p_here, draft.tokens[row, n])]
            if not kept:
                break
            node = kept[0]
            path.append(node)
        assert verdict.path[row, : verdict.accepted[row]].tolist() == path
        assert verdict.next_token[row] == soft[row, 1 + node].argmax()
    plain = verify(draft, Scores(p, p, soft), Exact(), None, uniforms)
    assert verdict.accepted.sum() > plain.accepted.sum()


@pytest.mark.parametrize("rule", [Lantern(near(6, 3), 0.3), GSD(near(6, 3), None)], ids=str)
def test_in_greedy_decoding_a_token_other_than_the_argmax_has_infinite_kl(rule):
    sets = isinstance(rule, Lantern)
    draft, _, uniforms = random_draft(60, Tree.chain(1))
    soft = torch.rand(60, 2, 6, generator=torch.Generator().manual_seed(1)).softmax(-1)
    p = one_hot(soft.argmax(-1), 6)
    verdict = verify(draft, Scores(p, p, soft), rule, None, uniforms)
    one = Round(new_sequences(60, depth=1), draft, Scores(p, p, soft), verdict)
    report = one.sequences.append(verdict.tokens, verdict.accepted + 1, verdict.broken)
    one.sequences.tell(report, 2)
    one.sequences.record({"logprob": verdict.logprob})
    diagnosed = Diagnosed(rule)
    diagnosed(one)
    trace = one.sequences.recorded(["logprob", *diagnosed.names], torch.arange(60))
    wrong = verdict.tokens != p.argmax(-1)
    assert 0 < wrong[:, 0].sum() < 60
    first = slice(0, 1)  # past a rejection nothing is defined
    assert trace["bound"][:, first].bool().equal(wrong[:, first])
    assert trace["kl"][:, first].isinf().equal(wrong[:, first])
    assert trace["logprob"][:, first].equal(torch.where(wrong[:, first], -torch.inf, 0.0))
    if sets:
        sizes = rule.set_size(soft[:, 0], draft.tokens[:, 0]).float()
        assert trace["proximity"][:, 0].equal(sizes) and sizes.unique().numel() > 1


# What is refused


REFUSED = {
    "delta=0 ": lambda: Lantern(TABLE, 0),
    "delta=1.1 ": lambda: Lantern(TABLE, 1.1),
    "delta=nan ": lambda: Lantern(TABLE, float("nan")),
    "at most 0.6931": lambda: Lantern(TABLE, 0.8, "jsd"),
    "lam=inf ": lambda: LanternPP(TABLE, float("inf")),
    "ranks=-1 ": lambda: GSD(TABLE, -1),
    "k=4.3 .* table has only 12": lambda: GSD(near(12, 12), k=4.3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_rules_are_refused(words):
    with pytest.raises(TemperaError, match=words):
        REFUSED[words]()


@pytest.mark.parametrize("rule", [Lantern(NARROW, 0.3), LanternPP(NARROW, 2.0)], ids=["δ", "λ"])
def test_the_size_of_the_set_of_the_first_draft(rule):
    """LANTERN, Figure 7: counted where a draft was tested, and nowhere else."""
    draft, p, uniforms = random_draft(50, SMALL, vocab_size=4)
    verdict = verify(draft, Scores(p, p), rule, None, uniforms)
    one = Round(new_sequences(50), draft, Scores(p, p), verdict)
    sizes = rule.figures(one)["proximity"]
    first = draft.tree.children[:, 0]
    for row in range(50):
        for place, node in enumerate(verdict.visited[row].tolist()):
            if first[node] < 0:
                assert sizes[row, place].isnan()
            else:
                members = by_hand(rule, p[row, node], draft.tokens[row, first[node]])
                assert sizes[row, place] == len(members)
    assert sizes[~sizes.isnan()].unique().numel() > 1
