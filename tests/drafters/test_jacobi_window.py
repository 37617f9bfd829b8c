"""SJD-PAC: the law with either part and both, the tree and its chain in one window, what each place
is drawn from.
"""

from dataclasses import replace

import pytest
import torch
from cases import slow_but
from random_drafts import Spy
from tiny_networks import PROMPTS, tiny_target
from window_laws import check_window, local_target

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling, normalise
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.jacobi import Continue, Jacobi, jacobi, scd, sjd, sjd_pac
from tempera.drafters.jacobi_window import Shape
from tempera.errors import TemperaError
from tempera.exactness.tables import emit
from tempera.rules.standard import Exact, Relaxed

BRANCHINGS = ["ranked", "first", "full"]
GUIDED = Sampling(3.0, 1.7)


def pac(window, initialisation="random", **options):
    return lambda target: sjd_pac(target, window, initialisation, **options)


# Laws


@pytest.mark.slow
@pytest.mark.parametrize("continuation", [False, True], ids=["proactive", "both"])
@pytest.mark.parametrize("branching", BRANCHINGS)
def test_the_law_is_the_targets_with_every_branching(branching, continuation):
    """Six nodes: two candidates on two levels, and with `first` a chain of two more."""
    result = check_window(
        pac(6, branches=2, levels=2, branching=branching, continuation=continuation), grid=(2, 3)
    )
    assert result.agrees, result
    assert result.accepted_length > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "initialisation",
    ["random", "horizontal_repeat", "vertical_repeat", "horizontal_sample", "vertical_sample"],
)
def test_the_law_is_the_targets_with_every_initialisation(initialisation):
    """Three nodes for two places: most positions enter later, also as the first of several
    candidates.
    """
    result = check_window(pac(3, initialisation, branches=2, levels=1), grid=(2, 3))
    assert result.agrees, result


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), GUIDED, Sampling(2.0, 1.3, 2)],
    ids=["plain", "guided", "guided top-k"],
)
def test_the_law_if_candidates_exhaust_the_vocabulary(sampling):
    result = check_window(pac(4, "horizontal_repeat", branches=3, levels=1), sampling=sampling)
    assert result.agrees, result


@pytest.mark.slow
def test_strict_relaxation_is_exact_on_trees_too():
    result = check_window(
        pac(4, branches=2, levels=2, branching="first"), Relaxed((0.7, 0.4)), rows=50_000
    )
    assert result.agrees, result


def test_several_candidates_are_accepted_more_often():
    chain = check_window(pac(2, proactive=False), rows=20_000)
    tree = check_window(pac(4, branches=2, levels=2, branching="first"), rows=20_000)
    assert tree.accepted_length > chain.accepted_length + 0.05


def test_with_both_parts_off_it_is_sjd():
    target = local_target(3, (3, 3))
    off = emit(
        target,
        sjd_pac(target, 4, "vertical_repeat", proactive=False, continuation=False),
        Exact(),
        rows=200,
    )
    assert off.tokens.equal(
        emit(target, sjd(target, 4, "vertical_repeat"), Exact(), rows=200).tokens
    )


# What is wrong must be seen


class SameLabel(Jacobi):
    """Labels all candidates of a place with the first one's q."""

    def _draft(self, further, start):
        draft = super()._draft(further, start)
        return replace(draft, q=self._guesses.q[:, self.shape.tree.depths - 1])


class OldGuess(Continue):
    """Continues the guess of one place further on, with that one's label."""

    def tokens(self, q, last, places, positions, uniforms):
        return super().tokens(
            q, replace(last, tokens=last.tokens.roll(-1, 1)), places, positions, uniforms
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda target: SameLabel(target, Shape.proactive(4, 2, 2, "first"), Continue()),
        lambda target: Jacobi(target, Shape.proactive(6, 2, 2, "first"), OldGuess()),
    ],
    ids=["label of siblings", "token of another place"],
)
def test_a_planted_fault_is_caught(make):
    assert not check_window(make, grid=(2, 3)).agrees


# As defined


def path_of(node, parents):
    """Node numbers from the root to a node."""
    return [] if node < 0 else [*path_of(parents[node], parents), node]


@pytest.mark.parametrize("continuation", [False, True])
@pytest.mark.parametrize("branching", slow_but(BRANCHINGS, "ranked"))
def test_every_q_is_the_stale_distribution_without_earlier_siblings(branching, continuation):
    target = local_target(3, (3, 4))
    spy = Spy(
        sjd_pac(target, 12, branches=2, levels=2, branching=branching, continuation=continuation)
    )
    emit(target, spy, Exact(), rows=60)
    parents = spy.heard[0][0].tree.parents.tolist()
    children = [
        [node for node, parent in enumerate(parents) if parent == above]
        for above in range(-1, len(parents))
    ]
    sideways = 0
    for row in range(60):
        for (_, verdict, scores, emitted), (draft, *_) in zip(
            spy.heard, spy.heard[1:], strict=False
        ):
            count, stop = int(emitted[row]), int(verdict.path[row].max())
            if not count:
                break
            laws = []
            spine, walk = (
                path_of(
                    max(range(len(parents)), key=lambda node: len(path_of(node, parents))), parents
                ),
                path_of(stop, parents),
            )
            while children[1 + (walk[-1] if walk else -1)]:
                walk.append(children[1 + (walk[-1] if walk else -1)][0])
            walk += spine[len(walk) :]
            sideways += walk[0] != spine[0] if walk else 0
            laws = [scores.p[row, 0], *(scores.p[row, 1 + node] for node in walk)][count:]
            laws += [torch.full((3,), 1 / 3)] * (len(spine) - len(laws))
            for above in range(-1, len(parents)):
                law = laws[len(path_of(above, parents))] if children[1 + above] else None
                for node in children[1 + above]:
                    torch.testing.assert_close(draft.q[row, node], law)
                    token = int(draft.tokens[row, node])
                    assert law[token] > 0
                    law = normalise(law.scatter(0, torch.tensor([token]), 0.0), otherwise=law)
    assert sideways


@pytest.mark.parametrize(
    ("options", "nodes", "length", "tree"),
    [
        ({}, 64, 42, 25),
        ({"branching": "first"}, 64, 55, 12),
        ({"window": 100, "branching": "full"}, 100, 19, 84),
        ({"branches": 2}, 64, 58, 9),
        ({"branches": 5}, 64, 36, 31),
        ({"levels": 4}, 64, 24, 44),
        ({"window": 32}, 32, 10, 25),
        ({"levels": 1}, 64, 61, 4),
        ({"branches": 1}, 64, 64, 0),
        ({"levels": 0}, 64, 64, 0),
        ({"proactive": False}, 64, 64, 0),
    ],
)
def test_tree_and_chain_share_the_window(options, nodes, length, tree):
    drafter = sjd_pac(Large(), **options)
    parents = drafter.shape.tree.parents.tolist()
    assert (drafter.nodes, drafter.depth, len(parents)) == (nodes, length, nodes)
    levels = options.get("levels", 3) if tree else 0
    depths = [len(path_of(node, parents)) for node in range(nodes)]
    assert sum(depth <= levels for depth in depths) == tree
    assert [depths.count(depth) for depth in range(levels + 1, length + 1)] == [1] * (
        length - levels
    )


class Large:
    """What a window must know of a target."""

    vocab_size, length, grid = 100, 256, (16, 16)


def test_the_papers_windows_are_the_defaults():
    for make in (jacobi, sjd, scd):
        drafter = make(Large())
        assert drafter.nodes == drafter.depth == 32 and drafter.entrance.refinement
    drafter = sjd_pac(Large())
    shape = drafter.shape
    assert (shape.tree.nodes, shape.branches, shape.levels) == (64, 4, 3)
    assert isinstance(drafter.refresh, Continue)


def test_one_candidate_a_place_is_a_chain():
    for shape in (Shape.chain(6), Shape.proactive(6, 1, 3), Shape.proactive(6, 4, 0)):
        assert (shape.length, shape.branches, shape.levels) == (6, 1, 0)
        assert shape.tree is Tree.chain(6)
    assert Shape.chain(6) != Shape.chain(6)  # it holds tensors


def test_ranked_trees_have_fewer_continuations_of_late_candidates():
    parents = Shape.proactive(64, 4, 3).tree.parents.tolist()
    count = [parents.count(node) for node in range(4)]
    assert parents.count(-1) == 4
    assert count == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"branches": 5, "branching": "full"},
            "branches=5 and levels=3 with branching=full make a tree of more than the 64 tokens of "
            "window=64; take fewer branches or levels, a longer window, or branching=first",
        ),
        ({"branches": 10, "levels": 30}, "more than the 64 tokens of window=64"),
        ({"branching": "full"}, "more than the 64 tokens of window=64"),
        (
            {"levels": 20, "branching": "first"},
            "64 tokens of window=64; take fewer branches or levels, a longer window",
        ),
        ({"window": 4, "branches": 2, "levels": 2}, "more than the 4 tokens of window=4"),
        ({"branches": 0}, "branches=0 and levels=3 make no tree"),
        ({"levels": -1}, "branches=4 and levels=-1 make no tree"),
        ({"window": 300}, "window=300 is longer than the image of 256 tokens"),
        ({"window": 0}, "window=0 is empty"),
        ({"branching": "wild"}, "branching=wild is not known; choose one of ranked, first, full"),
    ],
)
def test_trees_that_do_not_fit_are_refused(options, message):
    with pytest.raises(TemperaError) as problem:
        sjd_pac(Large(), **options)
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


# The network


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_on_a_network_at_temperature_0(branching):
    target = tiny_target(Sampling(3.0, 0))
    drafter = sjd_pac(target, 14, "vertical_repeat", branches=2, levels=3, branching=branching)
    output = decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    plain = decode(target, sjd(target, 1), Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    assert output.tokens.equal(plain.tokens)
