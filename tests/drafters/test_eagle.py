"""EAGLE-2's trees on networks, and drafters built from a directory or untrained."""

import math
from itertools import pairwise

import pytest
import torch
from cases import slow_but
from network_drafts import SIZES, dflash, eagle, eagle2, medusa, parallel, write_smaller
from omegaconf import OmegaConf
from tiny_networks import (
    LENGTH,
    PROMPTS,
    TREE,
    full_draft,
    llamagen,
    node_paths,
    random_rounds,
    tiny_dflash,
    tiny_eagle,
    tiny_medusa,
    tiny_parallel,
    tiny_target,
)

from tempera.config.instantiate import options_of
from tempera.config.parts import check_draft
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dflash import build_dflash
from tempera.drafters.draft_files import builder_of, save_draft
from tempera.drafters.eagle_network import build_eagle, build_eagle2
from tempera.drafters.independent import build_independent
from tempera.drafters.medusa import build_medusa
from tempera.drafters.parallel_network import ParallelModel, build_parallel
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.shapes.networks import load_smaller


def grown(law, branches, depth, nodes):
    """EAGLE-2's tree by its definition, as paths of tokens: `law` gives the distribution after a
    path.
    """

    def best(candidates, count):
        return sorted(candidates, key=lambda candidate: -candidate[1])[:count]

    def children(path, score):
        p = law(path)
        return best([((*path, x), score + math.log(p[x])) for x in range(len(p))], branches)

    level = found = children((), 0.0)
    for _ in range(1, depth):
        level = [child for path, score in best(level, branches) for child in children(path, score)]
        found = found + level
    return best(found, nodes)


def images(target, drafter):
    return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens


@pytest.mark.parametrize("size", slow_but([(SIZES,), ((2, 5, 5),)], (SIZES,)))
@pytest.mark.parametrize(
    "sampling",
    slow_but([Sampling(1.0, 2.0), Sampling(3.0, 2.0, 3), Sampling(3.0, 0)], Sampling(3.0, 2.0, 3)),
    ids=["plain", "guided", "greedy"],
)
@torch.no_grad()
def test_dynamic_trees_equal_those_grown_from_scratch_after_any_rounds(sampling, size):
    target = tiny_target(sampling, network=llamagen(grid=(3, 4)), granularity=1)
    network, prompts, shapes = tiny_eagle(target), PROMPTS[1:4:2], set()

    def after(image, row):
        """What the draft ranks by after a path, by forward passes over whole sequences."""

        def law(path):
            hidden = full_draft(network, target, prompts, image, row, list(path))
            return target.sampling.ranking.distribution(target.head.lm_logits(hidden))[0].tolist()

        return law

    drafter, generator = eagle2(target, sizes=size), torch.Generator().manual_seed(1)
    for draft, written in random_rounds(target, drafter, prompts, generator):
        for row, image in enumerate(written):
            if len(image) + size[1] <= target.length:
                wanted, nodes = dict(grown(after(image, row), *size)), node_paths(draft.tree, row)
                paths = [tuple(draft.tokens[row, path].tolist()) for path in nodes[1:]]
                assert set(paths) == set(wanted)
                for one, other in pairwise(paths):  # of siblings the more probable one comes first
                    assert len(one) <= len(other)
                    assert one[:-1] != other[:-1] or wanted[one] > wanted[other] - 1e-5
                shapes.add(tuple(draft.tree.parents[row].tolist()))
    assert len(shapes) > (size == SIZES)


BUILT = {
    "eagle": (tiny_eagle, lambda path, target: build_eagle(path, target, TREE)),
    "eagle2": (tiny_eagle, lambda path, target: build_eagle2(path, target, *SIZES)),
    "parallel": (tiny_parallel, lambda path, target: build_parallel(path, target, TREE)),
    "dflash": (tiny_dflash, lambda path, target: build_dflash(path, target, TREE)),
    "medusa": (tiny_medusa, lambda path, target: build_medusa(path, target, TREE)),
}
MADE = {
    "eagle": lambda target: eagle(target, TREE),
    "eagle2": eagle2,
    "parallel": lambda target: parallel(target, TREE),
    "dflash": lambda target: dflash(target, TREE),
    "medusa": lambda target: medusa(target, TREE),
}


@pytest.mark.parametrize("name", BUILT)
def test_built_from_a_directory_or_with_a_warning_untrained(name, tmp_path, capsys, caplog):
    target, (network, build) = tiny_target(Sampling(3.0, top_k=2)), BUILT[name]
    save_draft(network(target), tmp_path)
    drafter = build(str(tmp_path), target)
    assert torch.equal(images(target, drafter), images(target, MADE[name](target)))
    assert drafter.identity is not None
    with pytest.raises(TemperaError, match="hidden size 16, but the target has 8"):
        build(str(tmp_path), tiny_target(network=llamagen(hidden_size=8)))
    with pytest.raises(TemperaError, match="was trained for"):
        build(str(tmp_path), tiny_target(network=llamagen(seed=5)))
    other = tiny_target(identity="in another precision")
    first, second = (build("random", other).model.run.network.state_dict() for _ in range(2))
    assert "draft: random weights" in caplog.text and not capsys.readouterr().out
    assert all(first[name].equal(second[name]) for name in first)
    assert images(other, build("random", other)).shape == (4, LENGTH)


class Mine(ParallelModel):
    """A network that nobody knows."""

    drafter = "mine"


def test_a_network_of_ones_own_is_built_as_ours_are(tmp_path):
    target, build = tiny_target(), builder_of(Mine)
    save_draft(tiny_parallel(target), tmp_path)
    ours = build_parallel(str(tmp_path), target, TREE)
    assert images(target, build(str(tmp_path), target, TREE)).equal(images(target, ours))
    node = OmegaConf.create({"path": "nowhere"})
    with pytest.raises(TemperaError, match="main.py model=tiny draft=mine`"):
        check_draft(options_of(node, build), "tiny")


@pytest.mark.parametrize(
    ("dtype", "ways"), [("float16", ()), ("bfloat16", ("pack", "compile"))], ids=str
)
def test_a_smaller_model_may_have_another_dtype_and_is_as_fast_as_the_target(
    dtype, ways, tmp_path, monkeypatch
):
    write_smaller(tmp_path)
    smaller = load_smaller(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target = tiny_target()
    for way in ways:
        getattr(target, way)()
    drafter = build_independent(smaller, target, Tree.chain(3), dtype)
    draft, rounded = drafter.model.draft, getattr(torch, dtype)
    assert (draft.runner.packed, draft.runner.compiled) == (bool(ways),) * 2
    weight = draft.network.model.embed_tokens.weight
    assert weight.dtype == (torch.float32 if dtype == "float16" else rounded)
    assert torch.equal(weight.float(), weight.to(rounded).float())
    assert images(target, drafter).shape == (4, LENGTH)


def test_a_model_that_names_no_smaller_one_is_refused():
    with pytest.raises(TemperaError, match="has no smaller model to draft for it"):
        build_independent(None, tiny_target(), Tree.chain(3))
