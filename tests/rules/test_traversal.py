"""Traversal verification against the recursion that defines it, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from random_drafts import ROWS, SMALL, Spy, random_draft, random_parents
from window_laws import check_window

from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.probabilities import one_hot, sample
from tempera.decoding.trees import Tree
from tempera.decoding.verification import verify
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.jacobi import scd, sjd_pac
from tempera.errors import TemperaError
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.standard import BlockVerification
from tempera.rules.traversal import Traversal


def by_hand(tree, tokens, q, p, uniforms):
    """One row, node by node: the node (0 the root) that the traversal accepts, and P there."""
    children = [[child for child in row if child >= 0] for row in tree.children.tolist()]

    def visit(place, weight):
        rest = p[place]
        for child in children[place]:
            here, drawn = rest[tokens[child]].item(), q[child, tokens[child]].item()
            found = visit(1 + child, min(1.0, weight * here / drawn))
            if found is not None:
                return found
            lack = (weight * rest - q[child]).clamp(min=0)
            mass = lack.sum().item()
            rest = lack / mass if mass > 0 else rest
            weight = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
        if place == 0 or uniforms[place - 1] < weight:
            return place, rest
        return None

    return visit(0, 1.0)


TREES = {
    "chain": Tree.chain(4),
    "small": SMALL,
    "mc_sim_7b_63": Tree.named("mc_sim_7b_63"),
    **{
        f"random {seed}": Tree.from_parents(
            torch.tensor(random_parents(9, torch.Generator().manual_seed(seed)))
        )
        for seed in range(4)
    },
}


@pytest.mark.parametrize("name", TREES)
def test_each_row_follows_the_recursion(name):
    tree = TREES[name]
    draft, p, uniforms = random_draft(80, tree, forced=0.1)
    verdict = verify(draft, Scores(p, p), Traversal(), None, uniforms)
    for row in range(80):
        place, rest = by_hand(
            tree, draft.tokens[row], draft.q[row].double(), p[row].double(), uniforms[row]
        )
        assert verdict.stop[row] == place
        assert verdict.next_token[row] == sample(rest.float(), uniforms[row, -1])
    assert verdict.accepted.unique().numel() >= 3


def test_a_chain_is_verified_as_by_block_verification():
    draft, p, uniforms = random_draft(2_000, Tree.chain(5), forced=0.1)
    block, traversal = (
        verify(draft, Scores(p, p), rule, None, uniforms)
        for rule in (BlockVerification(), Traversal())
    )
    assert block.stop.equal(traversal.stop) and block.next_token.equal(traversal.next_token)


@pytest.mark.parametrize("parents", [*ROWS, SMALL.parents.tolist()])
def test_a_turn_comes_after_all_descendants_and_earlier_siblings(parents):
    tree = Tree.from_parents(torch.tensor(parents))

    def order(place):
        below = [order(1 + child) for child in tree.children[place].tolist() if child >= 0]
        return [*(node for part in below for node in part), place]

    turns = [node - 1 for node in order(0)[:-1]]
    assert tree.post_order.tolist() == [turns.index(node) for node in range(tree.nodes)]
    assert Tree.from_parents(torch.tensor([parents] * 2)).post_order[1].equal(tree.post_order)


def test_a_perfect_draft_is_kept_whole():
    draft, p, uniforms = random_draft(200, Tree.chain(4))
    for law in (p, torch.cat([one_hot(draft.tokens, 6), p[:, -1:]], 1)):
        same = Draft(sample(law[:, :-1], torch.rand(200, 4)), law[:, :-1], draft.tree)
        assert verify(same, Scores(law, law), Traversal(), None, uniforms).accepted.eq(4).all()


# What is refused


class Unmarked(Spy):
    """Does not say that its parents share candidates."""

    def propose(self, images, uniforms):
        return replace(super().propose(images, uniforms), shared=False)


def window(target, levels=2):
    return sjd_pac(target, 5, branches=2, levels=levels, continuation=False)


def test_shared_candidates_would_change_the_law():
    options = {"rows": 50_000, "grid": (1, 5)}
    unmarked = check_window(lambda target: Unmarked(window(target)), Traversal(), **options)
    assert not unmarked.agrees, unmarked
    one_level = check_window(lambda target: window(target, 1), Traversal(), **options)
    assert one_level.agrees, one_level


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda target: scd(target, 3), "draw new ones"),
        (window, "levels=1"),
        (lambda target: DynamicTreeDrafter(TableDraft(target), 3, 2, 2, 3), "static tree"),
    ],
    ids=["surviving guesses", "shared candidates", "dynamic trees"],
)
def test_what_it_would_bias_or_not_help_is_refused(make, advice):
    target = TableTarget(3, 5)
    with pytest.raises(TemperaError, match=advice):
        emit(target, make(target), Traversal(), rows=2)
