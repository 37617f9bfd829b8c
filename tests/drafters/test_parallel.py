"""Parallel drafting: its slots and Markov head, and its law through the real loop."""

from itertools import product

import pytest
import torch
from cases import needs_torchao
from network_drafts import dflash, medusa, parallel, small_captions, small_model
from random_drafts import new_sequences
from tiny_networks import (
    LENGTH,
    PROMPTS,
    WIDE,
    full_hidden,
    llamagen,
    tiny_eagle,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dflash import dflash_network, spread
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_network import build_eagle
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.medusa import medusa_network
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.parallel_network import ParallelModel, build_parallel, parallel_network
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import compare, emitted_law
from tempera.rules.schedules import exponential
from tempera.rules.standard import BlockVerification, Exact, Relaxed
from tempera.rules.traversal import Traversal

CHAIN, TREE = Tree.chain(2), Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])


def test_trees_of_several_depths_take_turns_with_one_draft():
    target = tiny_target(Sampling(3.0, temperature=5.0))
    network = tiny_parallel(target)
    found = []
    draft = ParallelDraft(network, target)
    for depth, model in ((2, ParallelDraft(network, target)), (4, draft), (2, draft), (4, draft)):
        drafter = StaticTreeDrafter(model, Tree.chain(depth))
        found.append(decode(target, drafter, Exact(), RandomStreams(0, ["0", "1"]), PROMPTS[:2]))
    for one, other in ((0, 2), (1, 3)):
        assert found[one].tokens.equal(found[other].tokens)
        assert found[one].trace.rounds.equal(found[other].trace.rounds)
    assert not found[0].trace.rounds.equal(found[1].trace.rounds)
    with pytest.raises(TemperaError, match="trained to draft 4 tokens in one pass, not 6"):
        StaticTreeDrafter(draft, Tree.chain(6))


@pytest.mark.parametrize("rank", [0, 4])
def test_slots_depend_on_each_other_through_the_markov_head_alone(rank):
    target = tiny_target(Sampling(1.0, temperature=5.0))
    drafter, drafts = parallel(target, Tree.chain(3), rank=rank), []
    for first in (0.01, 0.99):
        images = new_sequences(1, target.length)
        target.begin(["a"], 3)
        drafter.begin(["a"], images, torch.empty(1, 0), None)
        drafts.append(drafter.propose(images, torch.tensor([[first, 0.5, 0.5]])))
    assert drafts[0].tokens[0, 0] != drafts[1].tokens[0, 0]
    assert drafts[0].q[0, 0].equal(drafts[1].q[0, 0])
    assert drafts[0].q[0, 1].equal(drafts[1].q[0, 1]) == (rank == 0)


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("make", [parallel, dflash])
def test_a_round_runs_the_layers_once(make, name):
    target, passes, rounds = tiny_target(), [], []
    drafter = make(target, CHAIN if name == "chain" else TREE)
    drafter.model.run.network.register_forward_hook(lambda *_: passes.append(len(rounds)))
    streams = RandomStreams(1, PROMPTS)
    decode(target, drafter, Exact(), streams, PROMPTS, watch=[rounds.append])
    assert passes == [0, *range(len(passes) - 1)]  # over the prefix, and at the end of each round


def test_an_untrained_draft_has_no_markov_correction():
    draft = parallel_network(tiny_target(), "tiny")
    assert (draft.config.layers, draft.config.rank, draft.config.length) == (1, 64, 5)
    assert draft.markov_in.weight.any() and not draft.markov_out.weight.any()


def test_a_block_reads_layers_at_even_distances_by_default():
    assert spread(36, 5) == (2, 10, 18, 26, 34)  # of Qwen3-8B, whose public draft has 5 layers
    assert (spread(8, 2), spread(8, 1), spread(3, 2)) == ((2, 6), (5,), (2, 1))
    draft = dflash_network(tiny_target(network=llamagen(num_hidden_layers=5)), "tiny")
    assert (draft.features, draft.config.layers, draft.config.rank) == ((2, 3), 2, 0)
    assert dflash_network(tiny_target(), "tiny", features=[]).features == ()


@torch.no_grad()
def enumerated(target, prompt):
    """The target's law over whole images, token by token without a cache: [V^length]."""
    images = [torch.tensor(image) for image in product(range(target.vocab_size), repeat=3)]
    law = torch.ones(len(images))
    for place in range(target.length):
        known = sorted({tuple(image[:place].tolist()) for image in images})
        prefixes = [torch.tensor(prefix, dtype=torch.int64) for prefix in known]
        hidden = full_hidden(target, [prompt] * len(known), prefixes)
        states = torch.stack([state[:, -1] for state in hidden], 1)
        rows = target.sampling.distribution(target.head.lm_logits(states))[0]
        table = dict(zip(known, rows, strict=True))
        law *= torch.stack([table[tuple(i[:place].tolist())][i[place]] for i in images])
    return law


LAWS = {
    "exact": (Exact(), CHAIN, 4),
    "independent slots": (Exact(), CHAIN, 0),
    "tree": (Exact(), TREE, 4),
    "block": (BlockVerification(), CHAIN, 4),
    "relaxed": (Relaxed(exponential(3.0, 2)), CHAIN, 4),
    "dflash": (Exact(), CHAIN, "dflash"),
    "dflash, tree": (Exact(), TREE, "dflash"),
    "dflash, block": (BlockVerification(), CHAIN, "dflash"),
    "medusa": (Exact(), TREE, "medusa"),
    "medusa, block": (BlockVerification(), CHAIN, "medusa"),
    "traversal": (Traversal(), TREE, 4),
    "a smaller model": (Exact(), TREE, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_law_through_the_real_loop(name):
    """All images of 1×3 tokens, with real networks, caches and the Markov head."""
    check_law(name)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "block", "relaxed", "dflash, tree", "medusa"])
def test_the_law_of_a_draft_of_eight_bits(name):
    check_law(name, torch.int8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "block", "relaxed", "dflash, tree", "medusa"])
def test_the_law_of_a_draft_of_four_bits(name):
    check_law(name, torch.int4)


def check_law(name, dtype=None):
    """It is the target's, unless the rule is relaxed."""
    rule, tree, rank = LAWS[name]
    sampling = Sampling(2.0, temperature=2.0, top_k=4)
    if rank is None:
        target, draft = (small_model(sampling, seed, (1, 3), 6, granularity=4) for seed in (3, 4))
        drafter = StaticTreeDrafter(IndependentDraft(draft, target), tree)
        draft.conditioner.encode = target.conditioner.encode = small_captions
    else:
        sizes = WIDE if dtype == torch.int4 else {}
        network = llamagen(grid=(1, 3), num_hidden_layers=1, **sizes)
        target = tiny_target(sampling, network=network, granularity=4)
        if rank == "medusa":
            drafter = medusa(target, tree, dtype, length=2)
        elif rank == "dflash":
            drafter = dflash(target, tree, dtype, length=2)
        else:
            drafter = parallel(target, tree, dtype, rank=rank, length=2)
    tokens = []
    for seed in range(4):
        streams = RandomStreams(seed, [str(row) for row in range(2000)])
        tokens.append(decode(target, drafter, rule, streams, ["bb"] * 2000).tokens)
    found = compare(emitted_law(torch.cat(tokens), target.vocab_size), enumerated(target, "bb"))
    assert found.agrees == (name != "relaxed"), found


def test_refusals_are_one_sentence(tmp_path):
    target = tiny_target()
    save_draft(tiny_parallel(target), tmp_path / "parallel")
    save_draft(tiny_eagle(target), tmp_path / "eagle")
    for build, path, tree, message in (
        (build_parallel, "parallel", Tree.chain(6), "in one pass, not 6: draft 4 or fewer"),
        (build_parallel, "parallel", Tree.empty(), "a depth of 0|tree of depth 0"),
        (build_parallel, "eagle", CHAIN, r"a draft of type parallel \(length is missing\)"),
        (build_eagle, "parallel", CHAIN, "does not describe a draft of type eagle"),
    ):
        with pytest.raises(TemperaError, match=message):
            build(str(tmp_path / path), target, tree)
    for sizes, message in (
        ({"layers": 0}, "layers=0 is not valid: give 1 or more"),
        ({"rank": -1}, "rank=-1 is not valid: give 0 or more"),
        ({"length": 1}, "length=1 is not valid: give 2 or more"),
    ):
        with pytest.raises(TemperaError, match=message):
            ParallelModel.of(target.network, "tiny", **sizes)
    with pytest.raises(TemperaError, match=f"length={LENGTH + 1} is not valid: an image has"):
        parallel_network(target, "tiny", length=LENGTH + 1)
    columns = target.grid[1]
    with pytest.raises(TemperaError, match=f"give length={columns - 1} or less, or above=false"):
        medusa_network(target, "tiny", length=columns, above=True)
    assert medusa_network(target, "tiny", length=columns - 1, above=True).reach == columns - 1
