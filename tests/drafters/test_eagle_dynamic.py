"""EAGLE-2 on networks: trees grown with a cache are those grown from whole forward passes, and
images do not depend on the batch.
"""

from operator import attrgetter

import pytest
import torch
from cases import slow_but
from drafter_checks import check_batch, check_greedy, check_one_read
from dynamic_trees import grown, token_paths
from tiny_networks import (
    GRID,
    LENGTH,
    PROMPTS,
    full_draft,
    llamagen,
    random_rounds,
    tiny_eagle,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft, build_eagle2
from tempera.errors import TemperaError
from tempera.rules.standard import Exact


def eagle2(target, branches=3, depth=3, nodes=8):
    return DynamicTreeDrafter(
        EagleDraft(tiny_eagle(target), target, attrgetter("ranking")),
        target.vocab_size,
        branches,
        depth,
        nodes,
    )


def law_after(target, eagle, prompts, image, row):
    """What the draft ranks by after a path, by forward passes over whole sequences."""

    def law(path):
        hidden = full_draft(eagle, target, prompts, image, row, list(path))
        return target.sampling.ranking.distribution(target.head.lm_logits(hidden))[0].tolist()

    return law


@pytest.mark.parametrize("size", slow_but([(3, 3, 8), (3, 4, 4)], (3, 3, 8)))
@pytest.mark.parametrize(
    "sampling",
    slow_but(
        [Sampling(1.0, 2.0), Sampling(3.0, 2.0, top_k=3), Sampling(3.0, 0)],
        Sampling(3.0, 2.0, top_k=3),
    ),
    ids=["plain", "guided", "greedy"],
)
@torch.no_grad()
def test_trees_equal_those_grown_from_scratch_after_any_rounds(sampling, size):
    target = tiny_target(sampling, network=llamagen(grid=(3, 4)), granularity=4)
    eagle, prompts, shapes = tiny_eagle(target), PROMPTS[1:4:2], set()
    for draft, images in random_rounds(
        target, eagle2(target, *size), prompts, torch.Generator().manual_seed(1)
    ):
        for row, image in enumerate(images):
            if len(image) + size[1] <= target.length:
                wanted = grown(law_after(target, eagle, prompts, image, row), *size)
                assert set(token_paths(draft, row)) == {path for path, _ in wanted}
                shapes.add(tuple(draft.tree.parents[row].tolist()))
    assert len(shapes) > 1 or size[2] == 4


def test_greedy_dynamic_trees_equal_greedy_autoregression():
    target = tiny_target(Sampling(3.0, temperature=0))
    plain, trees = check_greedy(target, eagle2(target))
    assert (trees.trace.rounds < plain.trace.rounds).all()


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_batch_generates_the_same_images_as_single_prompts(guidance):
    target = tiny_target(Sampling(guidance, top_k=6))
    drafter = eagle2(target)
    check_batch(target, drafter, Exact())


def test_drafts_at_forced_positions_are_always_accepted():
    forced = torch.full((LENGTH,), -1)
    forced[4::5] = 3
    target = tiny_target(forced=forced)
    output = decode(target, eagle2(target, 2, 3, 6), Exact(), RandomStreams(1, PROMPTS), PROMPTS)
    assert (output.tokens.view(4, *GRID)[..., -1] == 3).all()


def test_a_round_reads_from_the_device_once():
    target = tiny_target()
    drafter = eagle2(target)
    check_one_read(target, drafter)


def test_built_from_a_directory(tmp_path):
    target = tiny_target()
    tiny_eagle(target).save_pretrained(tmp_path / "draft")
    drafter = build_eagle2(str(tmp_path / "draft"), target, branches=3, depth=3, nodes=8)
    generate = [
        decode(target, d, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens
        for d in (drafter, eagle2(target))
    ]
    assert torch.equal(*generate)
    with pytest.raises(
        TemperaError,
        match=r"branches=12 is not possible with a vocabulary of 11 tokens; give 1 to 11$",
    ):
        build_eagle2(str(tmp_path / "draft"), target, branches=12)


def test_eagle_2s_sizes_are_the_defaults():
    drafter = build_eagle2("random", tiny_target())
    assert (drafter.branches, drafter.depth, drafter.nodes) == (10, 5, 59)


def test_candidates_are_ranked_without_top_k_and_at_a_positive_temperature():
    assert Sampling(3.0, 0.5, top_k=2, top_p=0.5).ranking == Sampling(3.0, 0.5)
    assert Sampling(3.0, 0.0, top_k=2).ranking == Sampling(3.0, 1.0)
