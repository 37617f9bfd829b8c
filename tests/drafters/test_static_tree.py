import pytest
import torch
from random_drafts import SMALL

from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError


class Written:
    """A draft model whose distribution after a token puts more mass on the tokens near it;
    remembers what it was asked.
    """

    def __init__(self, vocab_size):
        self.table = (
            -(torch.arange(vocab_size)[:, None] - torch.arange(vocab_size)).abs().float() / 2
        ).softmax(-1)
        self.asked = []

    def roots(self):
        return self.table[[0, 3]]

    def expand(self, tokens, level):
        self.asked.append((level.depth, tokens))
        return self.table[tokens]


def propose(tree, vocab_size=9):
    model = Written(vocab_size)
    drafter = StaticTreeDrafter(model, tree)
    return model, drafter.propose(torch.rand(2, drafter.uniforms))


def test_every_node_has_the_q_it_was_drawn_from():
    for tree in (
        Tree.chain(3),
        SMALL,
        Tree.named("mc_sim_7b_63"),
        Tree.from_parents(torch.tensor([-1, -1, 1, 0, 1, 0, 2, 5, 3])),
    ):
        model, draft = propose(tree)
        parents = tree.parents.tolist()
        for row in range(2):
            for node, parent in enumerate(parents):
                law = model.roots()[row] if parent < 0 else model.table[draft.tokens[row, parent]]
                elders = [n for n in range(node) if parents[n] == parent]
                left = law.index_fill(0, draft.tokens[row, elders], 0.0)
                torch.testing.assert_close(draft.q[row, node], left / left.sum())
                assert draft.tokens[row, node] not in draft.tokens[row, elders]


def test_only_nodes_with_children_are_expanded():
    model, draft = propose(SMALL)
    assert [depth for depth, _ in model.asked] == [1, 2]
    assert model.asked[0][1].equal(draft.tokens[:, [0, 1]])
    assert model.asked[1][1].equal(draft.tokens[:, [3]])


def test_the_drafter_is_identified_by_its_model():
    model = Written(9)
    model.identity = "weights"
    assert StaticTreeDrafter(model, SMALL).identity == "weights"


def test_the_drafter_declares_its_uniforms():
    drafter = StaticTreeDrafter(Written(3), SMALL)
    assert (drafter.nodes, drafter.depth, drafter.uniforms) == (7, 3, 7)


def test_an_empty_tree_is_refused():
    with pytest.raises(TemperaError, match="a tree of depth 0 drafts nothing"):
        StaticTreeDrafter(Written(3), Tree.empty())
