from dataclasses import replace

import pytest
import torch
from random_drafts import ROWS, SMALL, random_draft

from tempera.decoding.interfaces import ACCEPTED, Draft, Rule, Scores
from tempera.decoding.probabilities import Sampling, one_hot, sample
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule, drafted_acceptance_probs, verify
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.optimal import Priced
from tempera.rules.standard import BlockVerification, Exact, Match, Relaxed
from tempera.rules.traversal import Traversal

RULES = [Exact(), Relaxed((2.0, 0.7, 0.3)), Relaxed((1.5, 0.5), "vanilla")]


def walk_down(parents, tokens, q, p, rule, uniforms):
    """The definition, one row and one test at a time -> path, emitted tokens."""
    node, path = -1, []
    while True:
        law, kept = p[1 + node], None
        for child in [n for n, parent in enumerate(parents) if parent == node]:
            token, depth = tokens[child], torch.tensor(len(path) + 1)
            if law[token] >= 1 or uniforms[child] < rule.accept_at(law, q[child], token, depth):
                kept = child
                break
            law = rule.residual(law, q[child], token, depth)
        if kept is None:
            return path, [*(tokens[n].item() for n in path), sample(law, uniforms[-1]).item()]
        path.append(kept)
        node = kept


def same_as_defined(draft, p, uniforms, rule):
    verdict = verify(draft, Scores(p, p), rule, None, uniforms)
    depth = draft.tree.max_depth
    assert verdict.path.shape == (len(p), depth)
    assert verdict.tokens.shape == (len(p), depth + 1)
    for row in range(len(p)):
        parents = (draft.tree.parents[row] if draft.tree.per_row else draft.tree.parents).tolist()
        path, tokens = walk_down(
            parents, draft.tokens[row], draft.q[row], p[row], rule, uniforms[row]
        )
        assert verdict.accepted[row] == len(path)
        assert verdict.path[row].tolist() == path + [-1] * (depth - len(path))
        before = [0, *(1 + node for node in path)]  # the root, then the path
        assert verdict.visited[row].tolist() == before + [0] * (depth - len(path))
        assert verdict.tokens[row, : len(tokens)].tolist() == tokens
        assert verdict.next_token[row] == tokens[-1]
    return verdict


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "tree",
    [
        Tree.chain(1),
        Tree.chain(5),
        SMALL,
        Tree.named("mc_sim_7b_63"),
        Tree.from_parents(torch.tensor([-1, -1, 1, 0, 1, 0, 2, 5, 3])),  # siblings apart
    ],
)
def test_testing_all_nodes_in_parallel_equals_the_walk(tree, rule):
    verdict = same_as_defined(*random_draft(60, tree), rule)
    assert verdict.accepted.unique().numel() > 1


@pytest.mark.parametrize("rule", RULES)
def test_every_row_may_have_its_own_tree(rule):
    parents = torch.tensor(ROWS).repeat(12, 1)
    chains = Tree.from_parents(torch.arange(5).repeat(60, 1) - 1)
    loose = Tree(parents, 5, 5)  # bounds: nothing is read from the device
    for tree in (Tree.from_parents(parents), chains, loose):
        same_as_defined(*random_draft(60, tree), rule)


@pytest.mark.parametrize("tree", [Tree.chain(4), SMALL])
def test_forced_positions_are_kept_whatever_the_rule(tree):
    strict = Relaxed((1e-6,))
    draft, p, uniforms = random_draft(200, tree, forced=0.5)
    same_as_defined(draft, p, uniforms, strict)
    wrong = one_hot((draft.tokens[:, 0] + 1) % 6, 6).unsqueeze(1).expand_as(p)
    verdict = verify(draft, Scores(wrong, wrong), Relaxed((1e6,)), None, uniforms)
    assert verdict.tokens[:, 0].equal((draft.tokens[:, 0] + 1) % 6)


@pytest.mark.parametrize("tree", [Tree.chain(4), SMALL])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("residual", ["optimal", "vanilla", "kl"])
def test_a_forced_token_passes_the_strictest_test(tree, drawn, residual):
    draft, p, uniforms = random_draft(200, tree)
    draft = draft if drawn else replace(draft, q=None)
    right = one_hot(draft.tokens[:, 0], 6).unsqueeze(1).expand_as(p)
    verdict = verify(draft, Scores(right, right), Relaxed((1e-6,), residual), None, uniforms)
    assert (verdict.accepted >= 1).all()


def test_the_empty_tree_draws_from_the_target():
    p = torch.rand(5, 1, 7).softmax(-1)
    u = torch.rand(5, 1)
    draft = Draft(torch.zeros(5, 0, dtype=torch.int64), torch.zeros(5, 0, 0), Tree.empty())
    verdict = verify(draft, Scores(p, p), Exact(), None, u)
    assert verdict.next_token.equal(sample(p[:, 0], u[:, 0]))
    assert verdict.tokens.equal(verdict.next_token[:, None])
    assert verdict.accepted.eq(0).all()
    assert verdict.path.shape == (5, 0)
    assert verdict.visited.tolist() == [[0]] * 5


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        *((tree, rule) for tree in (Tree.chain(3), SMALL) for rule in RULES),
        (Tree.chain(3), BlockVerification()),
        (SMALL, Traversal()),
    ],
)
@pytest.mark.parametrize("drawn", [True, False])
def test_an_impossible_token_is_rejected_even_at_a_draw_of_zero(tree, rule, drawn):
    """Also one that its q does not have either."""
    draft, p, uniforms = random_draft(20, tree, vocab_size=12)
    if not drawn:
        draft = replace(draft, q=draft.q.scatter(-1, draft.tokens.unsqueeze(-1), 0.0))
    barred = p.scatter(-1, draft.tokens[:, None].expand(-1, p.shape[1], -1), 0.0)
    barred = barred / barred.sum(-1, keepdim=True)
    verdict = verify(draft, Scores(barred, barred), rule, None, torch.zeros_like(uniforms))
    assert verdict.accepted.eq(0).all()


def test_scores_are_not_written_to():
    draft, p, uniforms = random_draft(20, SMALL)
    before = p.clone()
    verify(draft, Scores(p, p), Exact(), None, uniforms)
    assert p.equal(before)


def test_a_rule_may_verify_the_whole_draft():
    class FirstTwo(Rule):
        """Keeps two nodes of a chain and goes on with the last token of the vocabulary."""

        def walk(self, draft, scores, sequences, uniforms):
            rows = len(scores.p)
            return torch.full((rows,), 2), one_hot(torch.full((rows,), 5), 6)

    draft, p, uniforms = random_draft(4, Tree.chain(3))
    verdict = verify(draft, Scores(p, p), FirstTwo(), None, uniforms)
    assert verdict.accepted.tolist() == [2] * 4
    assert verdict.path.tolist() == [[0, 1, -1]] * 4
    assert verdict.tokens[:, :2].equal(draft.tokens[:, :2])
    assert verdict.next_token.tolist() == [5] * 4


class EveryOther(TokenRule):
    """A plain class that keeps what lies on an even place of the image, and nothing else."""

    def __init__(self, first):
        self.first = first
        self._made = object()

    def accept(self, p, q, depth):
        return torch.ones_like(p)

    def residual(self, p, q, token, depth):
        return p

    def passed(self, draft, scores, sequences, uniforms):
        place = sequences.lengths.unsqueeze(1) + draft.tree.depths - 1
        return (place - self.first) % 2 == 0


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_plain_rule_may_look_at_the_place_in_the_image(temperature):
    target = TableTarget(3, 5, Sampling(1.0, temperature=temperature))
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(2))
    trace = emit(target, drafter, EveryOther(1), rows=50).trace
    kept = trace.origin == ACCEPTED
    # rounds begin at 0, draw there; at 1, keep 1, draw 2; at 3, keep 3, draw 4
    assert kept.all(0).tolist() == [False, True, False, True, False]
    assert kept.any(0).equal(kept.all(0))
    assert repr(EveryOther(1)) == "EveryOther(first=1)"


def test_only_what_is_always_exact_calls_itself_exact():
    """Rules at the edge of exactness, and rules that change an exact one."""

    class Lax(Exact):
        def accept(self, p, q, depth):
            return torch.ones_like(p)

    exact = Exact(), Relaxed((1.0, 0.5)), Relaxed((1.0,), "vanilla"), Priced(0.0), Match()
    lossy = Lax(), Relaxed((1.0, 1.1)), Relaxed((1.0, 0.5), "vanilla"), Priced(0.1)
    assert all(rule.exact for rule in exact) and not any(rule.exact for rule in lossy)


CERTAIN = {
    "exact": Exact(),
    "relaxed": Relaxed((2.0, 1.3)),
    "vanilla": Relaxed((0.5, 1.3), "vanilla"),
    "relaxed below 1, by distributions": Relaxed((0.5, 1.3)),
}


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.parametrize(
    "tree", [SMALL, Tree.from_parents(torch.tensor(ROWS))], ids=["one", "rows"]
)
@pytest.mark.parametrize("kinds", [7, 2], ids=["siblings differ", "siblings repeat"])
def test_tokens_that_were_not_drawn_are_tested_as_with_a_one_hot_q(name, tree, kinds):
    rows = 5 if tree.per_row else 400
    draft, p, uniforms = random_draft(rows, tree, vocab_size=7)
    ranks = tree.earlier_siblings.sum(-1).expand_as(draft.tokens)
    certain = replace(draft, tokens=(draft.tokens[:, :1] + ranks) % kinds, q=None)
    dense = replace(certain, q=one_hot(certain.tokens, 7))
    rule = CERTAIN[name]
    # times the mass that is left: a sum of p is 1 only up to rounding
    own = p.flatten(1).gather(1, (1 + tree.parents) * 7 + certain.tokens)
    left = 1 - (tree.earlier_siblings.float() @ own.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        left * drafted_acceptance_probs(certain, p, rule),
        left * drafted_acceptance_probs(dense, p, rule),
        atol=1e-6,
        rtol=1e-5,
    )
    found, expected = (verify(one, Scores(p, p), rule, None, uniforms) for one in (certain, dense))
    assert found.tokens[:, 0].equal(expected.tokens[:, 0])
    assert found.stop.equal(expected.stop) and found.next_token.equal(expected.next_token)


def test_a_rule_with_another_residual_does_not_take_the_short_way():
    class Other(Exact):
        def residual(self, p, q, token, depth):
            return p

    class Never(Exact):
        def accept(self, p, q, depth):
            return torch.zeros_like(p)

    law, first = torch.full((2,), 0.5), torch.tensor(0)
    assert Never().accept_at(law, law, first, first) == 0
    assert Exact().local and not Other().local and not Never().local
