"""EAGLE-2's trees on networks, and drafters built from a directory or untrained."""

from itertools import pairwise

import pytest
import torch
from cases import slow_but
from dynamic_trees import grown, token_paths
from network_drafts import SIZES, eagle, eagle2, parallel, write_smaller
from tiny_networks import (
    LENGTH,
    PROMPTS,
    TREE,
    full_draft,
    llamagen,
    random_rounds,
    tiny_eagle,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import build_eagle, build_eagle2
from tempera.drafters.independent import build_independent
from tempera.drafters.parallel import build_parallel
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.shapes.networks import load_smaller


def images(target, drafter):
    return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens


@pytest.mark.parametrize("size", slow_but([SIZES, (3, 4, 4)], SIZES))
@pytest.mark.parametrize(
    "sampling",
    slow_but([Sampling(1.0, 2.0), Sampling(3.0, 2.0, 3), Sampling(3.0, 0)], Sampling(3.0, 2.0, 3)),
    ids=["plain", "guided", "greedy"],
)
@torch.no_grad()
def test_dynamic_trees_equal_those_grown_from_scratch_after_any_rounds(sampling, size):
    target = tiny_target(sampling, network=llamagen(grid=(3, 4)), granularity=4)
    network, prompts, shapes = tiny_eagle(target), PROMPTS[1:4:2], set()

    def after(image, row):
        """What the draft ranks by after a path, by forward passes over whole sequences."""

        def law(path):
            hidden = full_draft(network, target, prompts, image, row, list(path))
            return target.sampling.ranking.distribution(target.head.lm_logits(hidden))[0].tolist()

        return law

    rounds = random_rounds(
        target, eagle2(target, sizes=size), prompts, torch.Generator().manual_seed(1)
    )
    for draft, written in rounds:
        for row, image in enumerate(written):
            if len(image) + size[1] <= target.length:
                wanted, paths = dict(grown(after(image, row), *size)), token_paths(draft, row)
                assert set(paths) == set(wanted)
                for one, other in pairwise(paths):  # of siblings the more probable one comes first
                    assert len(one) <= len(other)
                    assert one[:-1] != other[:-1] or wanted[one] > wanted[other] - 1e-5
                shapes.add(tuple(draft.tree.parents[row].tolist()))
    assert len(shapes) > 1 or size[2] == 4


BUILT = {
    "eagle": (tiny_eagle, lambda path, target: build_eagle(path, target, TREE)),
    "eagle2": (tiny_eagle, lambda path, target: build_eagle2(path, target, *SIZES)),
    "parallel": (tiny_parallel, lambda path, target: build_parallel(path, target, TREE)),
}
MADE = {
    "eagle": lambda target: eagle(target, TREE),
    "eagle2": eagle2,
    "parallel": lambda target: parallel(target, TREE),
}


@pytest.mark.parametrize("name", BUILT)
def test_built_from_a_directory_or_with_a_warning_untrained(name, tmp_path, capsys):
    target, (network, build) = tiny_target(), BUILT[name]
    network(target).save_pretrained(tmp_path)
    drafter = build(str(tmp_path), target)
    assert torch.equal(images(target, drafter), images(target, MADE[name](target)))
    assert drafter.identity is not None
    with pytest.raises(TemperaError, match="hidden size 16, the target 8"):
        build(str(tmp_path), tiny_target(network=llamagen(hidden_size=8)))
    with pytest.raises(TemperaError, match="was trained for"):
        build(str(tmp_path), tiny_target(network=llamagen(seed=5)))
    other = tiny_target(identity="in another precision")
    drafter = build("random", other)
    assert "draft: random weights" in capsys.readouterr().out
    assert images(other, drafter).shape == (4, LENGTH)


@pytest.fixture
def smaller(tmp_path):
    torch.manual_seed(0)
    write_smaller(tmp_path)
    return load_smaller(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "ways"), [("float16", ()), ("bfloat16", ("pack", "compile"))], ids=str
)
def test_a_smaller_model_may_have_another_dtype_and_is_as_fast_as_the_target(
    smaller, dtype, ways, monkeypatch
):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target = tiny_target()
    for way in ways:
        getattr(target, way)()
    drafter = build_independent(smaller, target, Tree.chain(3), dtype)
    draft, rounded = drafter.model.draft, getattr(torch, dtype)
    for made in (draft.session, target.session):
        assert (made.packed, made.compiled) == (bool(ways),) * 2
    linear = draft.head.linear
    weight = linear.weight.to_dense() if linear.packed else linear.weight
    assert weight.dtype == (torch.float32 if dtype == "float16" else rounded)
    assert torch.equal(weight.float(), weight.to(rounded).float())
    assert images(target, drafter).shape == (4, LENGTH)


def test_a_model_that_names_no_smaller_one_is_refused():
    with pytest.raises(TemperaError, match="names no smaller one to draft for it"):
        build_independent(None, tiny_target(), Tree.chain(3))
