"""SJD-PAC: the law with either part and both, the tree and its chain in one window, what each place
is drawn from.
"""

import functools
from itertools import pairwise

import pytest
import torch
from random_drafts import Spy
from window_laws import check_window, local_target

from tempera.decoding.probabilities import Sampling, normalise
from tempera.drafters.jacobi import sjd_pac
from tempera.errors import TemperaError
from tempera.exactness.tables import emit
from tempera.rules.standard import Exact, Relaxed

GUIDED, TOP_K = Sampling(3.0, 1.7), Sampling(2.0, 1.3, 2)
TWO = {"branches": 2, "levels": 2}
LAWS = {
    "continued": (6, "random", TWO, (2, 3), {}),
    "proactive": (6, "random", {**TWO, "continuation": False}, (2, 3), {}),
    # three nodes for two places: most enter later, also as the first of several candidates
    "repeat": (3, "horizontal_repeat", {"branches": 2, "levels": 1}, (2, 3), {}),
    "repeat above": (3, "vertical_repeat", {"branches": 2, "levels": 1}, (2, 3), {}),
    "sample": (3, "horizontal_sample", {"branches": 2, "levels": 1}, (2, 3), {}),
    "sample above": (3, "vertical_sample", {"branches": 2, "levels": 1}, (2, 3), {}),
    "full": (6, "horizontal_repeat", {**TWO, "shape": "full"}, (2, 3), {}),
    # candidates exhaust the vocabulary
    "all": (4, "horizontal_repeat", {"branches": 3, "levels": 1}, (2, 2), {"sampling": GUIDED}),
    "top-k": (4, "horizontal_repeat", {"branches": 3, "levels": 1}, (2, 2), {"sampling": TOP_K}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_the_targets(name):
    window, initialisation, options, grid, more = LAWS[name]
    make = functools.partial(sjd_pac, window=window, initialisation=initialisation, **options)
    result = check_window(make, rows=40_000, grid=grid, **more)
    assert result.agrees, result
    assert result.accepted_length > 1.2


def test_several_candidates_are_accepted_more_often_and_strict_relaxation_stays_exact():
    def law(rule=None, window=5, **options):
        make = functools.partial(sjd_pac, window=window, **options)
        return check_window(make, rule, rows=20_000, grid=(2, 3))

    chain, tree = law(window=2, proactive=False), law(**TWO)
    assert tree.accepted_length > chain.accepted_length + 0.05
    strict = law(Relaxed((0.7, 0.4)), **TWO)
    assert strict.agrees and strict.accepted_length < tree.accepted_length


def path_of(node, parents):
    """Node numbers from the root to a node."""
    return [] if node < 0 else [*path_of(parents[node], parents), node]


@pytest.mark.parametrize("continuation", [False, True])
def test_every_q_is_the_stale_distribution_without_earlier_siblings(continuation):
    target, rows = local_target(3, (3, 4)), 30
    spy = Spy(sjd_pac(target, 12, **TWO, continuation=continuation))
    emit(target, spy, Exact(), rows)
    parents = spy.heard[0][0].tree.parents.tolist()
    paths = {node: path_of(node, parents) for node in range(-1, len(parents))}
    children = {above: [n for n, one in enumerate(parents) if one == above] for above in paths}
    spine = max(paths.values(), key=len)
    sideways = 0
    for row in range(rows):
        for (_, verdict, scores, emitted), (draft, *_) in pairwise(spy.heard):
            count, walk = int(emitted[row]), list(paths[int(verdict.path[row].max())])
            if not count:
                break
            while below := children[walk[-1] if walk else -1]:
                walk.append(below[0])
            walk += spine[len(walk) :]
            sideways += walk[0] != spine[0]
            stale = [scores.p[row, 0], *(scores.p[row, 1 + node] for node in walk)][count:]
            stale += [torch.full((3,), 1 / 3)] * (len(spine) - len(stale))
            for above in filter(children.get, paths):
                q = stale[len(paths[above])]
                for node in children[above]:
                    torch.testing.assert_close(draft.q[row, node], q)
                    token = draft.tokens[row, node]
                    assert q[token] > 0
                    q = normalise(q.scatter(0, token[None], 0.0), otherwise=q)
    assert sideways


class Large:
    """What a window must know of a target."""

    vocab_size, length, grid = 100, 256, (16, 16)


@pytest.mark.parametrize(
    ("options", "length", "tree"),
    [
        ({}, 42, 25),
        ({"levels": 4}, 24, 44),
        ({"branches": 1}, 64, 0),
        ({"levels": 0}, 64, 0),
        ({"levels": 2, "shape": "full"}, 46, 20),
        ({"branches": 3, "levels": 2, "shape": "full"}, 54, 12),
    ],
)
def test_tree_and_chain_share_the_window_of_64(options, length, tree):
    drafter = sjd_pac(Large(), **options)
    depths = drafter.window.tree.depths
    assert (drafter.nodes, drafter.depth, len(depths)) == (64, length, 64)
    levels = options.get("levels", 3) if tree else 0
    assert (depths <= levels).sum() == tree
    assert depths[tree:].tolist() == [*range(levels + 1, length + 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 10, "levels": 30}, "ranked tree that is larger than window=64"),
        ({"shape": "full"}, "full tree that is larger than window=64"),
        ({"branches": 0}, "branches=0 and levels=3 do not make a tree"),
        ({"window": 300}, "window=300 is longer than the image of 256 tokens"),
        ({"window": 0}, "window=0 is empty"),
    ],
)
def test_windows_that_do_not_fit_are_refused(options, message):
    with pytest.raises(TemperaError, match=message):
        sjd_pac(Large(), **options)
