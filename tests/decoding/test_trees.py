import itertools
import json
import math
from importlib import resources

import pytest
import torch
from random_drafts import random_parents

from tempera.decoding.trees import Tree
from tempera.errors import TemperaError


def lineage(parents, node):
    line = []
    while node >= 0:
        line.append(node)
        node = parents[node]
    return line


def test_a_chain_is_one_branch():
    tree = Tree.chain(3)
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [1, 2, 3]
    assert tree.children.tolist() == [[0], [1], [2], [-1]]
    assert tree.ancestors.tolist() == torch.ones(3, 3).tril().bool().tolist()
    assert tree.is_chain and Tree.empty().is_chain
    assert not Tree.from_paths([[0], [1]]).is_chain
    assert (tree.nodes, tree.max_depth, tree.max_children) == (3, 3, 1)


def test_the_empty_tree_has_nothing():
    for tree in (Tree.from_paths([]), Tree.from_parents(torch.zeros(0, dtype=torch.int64))):
        assert tree.nodes == tree.max_depth == tree.max_children == 0
    tree = Tree.empty()
    assert (tree.nodes, tree.max_depth, tree.max_children) == (0, 0, 0)
    assert tree.children.shape == (1, 0)
    assert tree.last_children.tolist() == [-1]
    assert tree.levels == tree.sibling_tests == ()
    assert tree.walk(torch.zeros(3, 0, dtype=torch.bool)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "nodes", "children"), [("mc_sim_7b_63", 25, 4), ("naive_extend_57", 57, 5)]
)
def test_named_trees_are_the_public_ones(name, nodes, children):
    tree = Tree.named(name)
    assert (tree.nodes, tree.max_depth, tree.max_children) == (nodes, 5, children)
    ranks = {child: rank for row in tree.children.tolist() for rank, child in enumerate(row)}
    lines = (lineage(tree.parents.tolist(), node) for node in range(nodes))
    paths = [[ranks[node] for node in reversed(line)] for line in lines]
    published = json.loads(resources.files("tempera.decoding").joinpath("trees.json").read_text())
    assert sorted(paths) == sorted(published[name])
    assert Tree.from_paths(published[name][::-1]).parents.equal(tree.parents)


def test_sequoias_tree_accepts_most_of_all_trees():
    rates, depth = (0.6, 0.3, 0.1), 2
    places = [path for d in (1, 2) for path in itertools.product(range(3), repeat=d)]

    def accepted(paths):
        return sum(math.prod(rates[rank] for rank in path) for path in paths)

    for nodes in range(1, 7):
        best = 0.0
        for paths in itertools.combinations(places, nodes):
            try:
                Tree.from_paths(paths)
            except TemperaError:
                continue
            best = max(best, accepted(paths))
        tree = Tree.sequoia(nodes, depth, rates)
        ranks = {child: rank for row in tree.children.tolist() for rank, child in enumerate(row)}
        lines = (lineage(tree.parents.tolist(), node) for node in range(nodes))
        assert accepted([ranks[n] for n in line] for line in lines) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_tables_agree_with_the_parents(seed):
    parents = random_parents(1 + seed % 9, torch.Generator().manual_seed(seed))
    tree = Tree.from_parents(torch.tensor(parents))
    for node in range(tree.nodes):
        line = lineage(parents, node)
        assert tree.depths[node] == len(line)
        assert tree.ancestors[node].nonzero().flatten().tolist() == sorted(line)
        pairs = itertools.product(range(tree.nodes), line)
        earlier = [n for n, one in pairs if parents[n] == parents[one] and n < one]
        assert (tree.path_score[node] == 1).nonzero().flatten().tolist() == sorted(line)
        assert (tree.path_score[node] < -tree.nodes).nonzero().flatten().tolist() == sorted(earlier)
    for parent in range(-1, tree.nodes):
        children = [n for n in range(tree.nodes) if parents[n] == parent]
        assert [child for child in tree.children[1 + parent].tolist() if child >= 0] == children
        assert tree.last_children[1 + parent] == (children[-1] if children else -1)


def test_static_trees_are_moved_to_a_device_once():
    assert Tree.chain(4) is Tree.chain(4)
    assert Tree.named("mc_sim_7b_63") is Tree.named("mc_sim_7b_63")
    meta = Tree.chain(4).to("meta")
    assert meta is Tree.chain(4).to("meta")
    assert meta.depths.device.type == "meta"
    assert Tree.chain(4).to("cpu:0").depths.tolist() == [1, 2, 3, 4]  # tensors say `cpu`
    assert Tree.chain(4).to("cpu") is Tree.chain(4)
    assert Tree.from_parents(torch.tensor([[-1, -1]])).to("meta").depths.device.type == "meta"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tree.chain(-1), "-1 tokens"),
        (lambda: Tree.named("oak"), "mc_sim_7b_63, naive_extend_57"),
        (lambda: Tree.sequoia(3, 2, (0.1, 0.2)), "the largest first"),
        (lambda: Tree.sequoia(3, 2, (0.2, 0.0)), r"in \(0, 1\]"),
        (lambda: Tree.sequoia(7, 2, (0.2, 0.1)), "has 6 nodes, not 7"),
        (lambda: Tree.from_paths([[0], [1, 0]]), "no parent"),
        (lambda: Tree.from_paths([[0], [2]]), "sibling before it"),
        (lambda: Tree.from_paths([[0], [0]]), "distinct"),
        (lambda: Tree.from_paths([[]]), "not empty"),
        (lambda: Tree.from_parents(torch.tensor([-1, 2, 0])), "earlier node"),
        (lambda: Tree.from_parents(torch.tensor([-1, 0, -1])), "sorted by depth"),
    ],
)
def test_impossible_trees_are_refused(make, words):
    with pytest.raises(TemperaError, match=words):
        make()
