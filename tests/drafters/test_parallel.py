"""Parallel drafting against its own network without a cache, and its law through the real loop."""

from functools import partial
from itertools import product

import pytest
import torch
from cases import slow_but, slow_rows_but
from drafter_checks import check_batch, check_bookkeeping, check_greedy, check_one_read
from tiny_networks import (
    LENGTH,
    PROMPTS,
    TREE,
    VOCAB,
    TextLlama,
    full_hidden,
    full_parallel,
    lively,
    llamagen,
    tiny_eagle,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import build_eagle
from tempera.drafters.none import NoDraft
from tempera.drafters.parallel import ParallelDraft, build_parallel
from tempera.drafters.parallel_network import ParallelModel, parallel_network
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import compare, emitted_law
from tempera.rules.schedules import exponential
from tempera.rules.standard import BlockVerification, Exact, Relaxed

TREES = {"chain": Tree.chain(4), "short": Tree.chain(2), "one": Tree.chain(1), "tree": TREE}


def parallel_drafter(target, tree, network=None):
    network = network or tiny_parallel(target)
    return StaticTreeDrafter(ParallelDraft(network, target, tree.max_depth), tree)


def check_q(target, network, tree, prompts, forced=None):
    drafter = parallel_drafter(target, tree, network)
    predicted = partial(full_parallel, network, target, prompts)
    check_bookkeeping(target, drafter, prompts, predicted, forced)


@pytest.mark.parametrize(
    ("name", "guidance", "sizes"),
    slow_rows_but(
        [
            ("chain", 1.0, {}),
            ("chain", 3.0, {}),
            ("chain", 3.0, {"rank": 0}),
            ("chain", 3.0, {"layers": 2}),
            ("chain", 3.0, {"features": (0, 1), "layers": 2}),
            ("short", 3.0, {}),
            ("one", 3.0, {}),
            ("tree", 3.0, {}),
            ("tree", 1.0, {"rank": 0, "features": (1,)}),
        ],
        ("chain", 3.0, {"features": (0, 1), "layers": 2}),
        ("tree", 3.0, {}),
    ),
)
def test_q_equals_a_forward_pass_from_scratch_after_any_rounds(name, guidance, sizes):
    target = tiny_target(
        Sampling(guidance, temperature=5.0), network=llamagen(grid=(3, 4)), granularity=4
    )
    check_q(target, tiny_parallel(target, **sizes), TREES[name], PROMPTS[1:4:2])


def test_the_cache_has_room_for_a_rounds_tokens_and_masks_behind_the_image():
    target = tiny_target(granularity=1)
    drafter = parallel_drafter(target, Tree.chain(4), tiny_parallel(target))
    target.begin(["a"], drafter.nodes)
    drafter.begin(["a"])
    assert drafter.model.cache.capacity == target.session.capacity(2 * 4)


def test_a_language_model_with_forced_positions():
    network, forced = lively(TextLlama()), torch.full((6,), -1)
    forced[[2, 5]] = 0
    target = tiny_target(
        Sampling(2.0),
        network=network,
        conditioner=network.conditioner,
        grid=(2, 3),
        token_ids=torch.tensor([29, 11, 12, 13, 20]),
        token_bias=torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0]),
        forced=forced,
        granularity=4,
    )
    check_q(target, tiny_parallel(target, length=3), Tree.chain(3), ["xyz", "a"], forced)


def test_a_draft_for_another_depth_drafts_what_one_made_for_it_drafts():
    target = tiny_target(Sampling(3.0, temperature=5.0))
    network = tiny_parallel(target)
    made, first = (ParallelDraft(network, target, depth) for depth in (2, 4))
    tokens = []
    for draft in (made, first.for_depth(2), first):
        drafter = StaticTreeDrafter(draft, Tree.chain(draft.depth))
        streams = RandomStreams(0, ["0", "1"], torch.device("cpu"))
        tokens.append(decode(target, drafter, Exact(), streams, PROMPTS[:2]))
    assert tokens[0].tokens.equal(tokens[1].tokens)
    assert tokens[0].trace.rounds.equal(tokens[1].trace.rounds)
    assert not tokens[0].trace.rounds.equal(tokens[2].trace.rounds)
    with pytest.raises(TemperaError, match="trained to draft 4 tokens in one pass, not 6"):
        first.for_depth(6)


@pytest.mark.parametrize("rank", [0, 4])
def test_slots_depend_on_each_other_through_the_markov_head_alone(rank):
    target = tiny_target(Sampling(1.0, temperature=5.0))
    drafter = parallel_drafter(target, Tree.chain(3), tiny_parallel(target, rank=rank))
    laws = []
    for first in (0.01, 0.99):
        target.begin(["a"], 3)
        drafter.begin(["a"])
        laws.append(drafter.propose(torch.tensor([[first, 0.5, 0.5]])))
    assert laws[0].tokens[0, 0] != laws[1].tokens[0, 0]
    assert laws[0].q[0, 0].equal(laws[1].q[0, 0])
    assert laws[0].q[0, 1].equal(laws[1].q[0, 1]) == (rank == 0)


def test_an_untrained_draft_has_small_weights_and_no_markov_correction():
    target = tiny_target()
    draft = parallel_network(target, "tiny")
    assert (draft.config.layers, draft.config.rank, draft.config.length) == (1, 64, 5)
    made = ParallelModel.of(target.network, "tiny", target.vocab_size, target.identity)
    assert made.config == draft.config
    linears = [module for module in draft.modules() if isinstance(module, torch.nn.Linear)]
    small = [one for one in linears if one not in (draft.markov_in, draft.markov_out)]
    weights = torch.cat([one.weight.flatten() for one in small])
    assert weights.std().item() == pytest.approx(0.02, rel=0.1)
    assert not any(one.bias.any() for one in small if one.bias is not None)
    masks = torch.cat([draft.mask_embed, draft.mask_hidden])
    assert masks.std().item() == pytest.approx(0.02, rel=0.5)
    assert draft.markov_in.weight.std().item() == pytest.approx(
        draft.config.hidden_size**-0.5, rel=0.2
    )
    assert not draft.markov_out.weight.any()


def test_a_draft_may_be_as_long_as_the_image_and_as_short_as_two():
    target = tiny_target()
    assert parallel_network(target, "tiny", length=LENGTH).slots == LENGTH
    for depth, slots in ((1, 2), (2, 2), (3, 3)):
        assert build_parallel("random", target, Tree.chain(depth)).model.network.slots == slots


@torch.no_grad()
def enumerated(target, prompt):
    """The target's law over whole images, token by token without a cache: [V^length]."""
    images = [torch.tensor(image) for image in product(range(VOCAB), repeat=target.length)]
    law = torch.ones(len(images))
    for place in range(target.length):
        known = sorted({tuple(image[:place].tolist()) for image in images})
        hidden = full_hidden(
            target, [prompt] * len(known), [torch.tensor(k, dtype=torch.int64) for k in known]
        )
        states = torch.stack([state[:, -1] for state in hidden], 1)
        rows = target.sampling.distribution(target.head.lm_logits(states))[0]
        table = dict(zip(known, rows, strict=True))
        law *= torch.stack([table[tuple(i[:place].tolist())][i[place]] for i in images])
    return law


SIZES = [6_000, pytest.param(60_000, marks=pytest.mark.slow)]
RULES = {
    "exact": (Exact(), Tree.chain(2), 4),
    "independent slots": (Exact(), Tree.chain(2), 0),
    "tree": (Exact(), Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]]), 4),
    "block": (BlockVerification(), Tree.chain(2), 4),
    "relaxed": (Relaxed(exponential(3.0, 2)), Tree.chain(2), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("name", RULES)
def test_the_law_through_the_real_loop(name, rows):
    """All images of 1×3 tokens, with the real network, cache and Markov head."""
    rule, tree, rank = RULES[name]
    target = tiny_target(
        Sampling(2.0, temperature=2.0, top_k=4),
        network=llamagen(grid=(1, 3), num_hidden_layers=1),
        granularity=4,
    )
    drafter = parallel_drafter(target, tree, tiny_parallel(target, rank=rank, length=2))
    prompts = ["bb"] * 2000
    tokens = []
    for seed in range(rows // len(prompts)):
        streams = RandomStreams(seed, [str(row) for row in range(len(prompts))])
        output = decode(target, drafter, rule, streams, prompts)
        tokens.append(output.tokens)
    law = enumerated(target, "bb")
    report = compare(emitted_law(torch.cat(tokens), VOCAB), law)
    assert report.agrees == (name != "relaxed"), report


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("features", slow_but([(), (0, 1)], ()))
def test_greedy_parallel_drafting_equals_greedy_autoregression(name, features):
    target = tiny_target(Sampling(3.0, temperature=0))
    network = tiny_parallel(target, features=features)
    check_greedy(target, parallel_drafter(target, TREES[name], network))


@pytest.mark.parametrize("guidance", slow_but([1.0, 3.0], 3.0))
def test_a_batch_generates_the_same_images_as_single_prompts(guidance):
    target = tiny_target(Sampling(guidance, top_k=6))
    drafter = parallel_drafter(target, TREES["chain"])
    check_batch(target, drafter, Relaxed((1.5,)))


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_round_reads_once_and_runs_the_layers_once(name):
    target = tiny_target()
    drafter = parallel_drafter(target, TREES[name])
    check_one_read(target, drafter)
    passes, rounds = [], []
    handle = drafter.model.network.register_forward_hook(lambda *_: passes.append(len(rounds)))
    streams = RandomStreams(1, PROMPTS)
    decode(
        target,
        drafter,
        Exact(),
        streams,
        PROMPTS,
        observe=lambda images, *_: rounds.append(images.rounds),
    )
    handle.remove()
    assert passes == [0, *range(1, len(passes))], (
        "one pass before the first round's end, then one a round"
    )


def test_the_next_batch_reuses_the_memory():
    target = tiny_target()
    drafter = parallel_drafter(target, Tree.chain(3))
    storages = []
    for _ in range(2):
        decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
        storages.append(drafter.model.cache.entries[0].data_ptr())
    assert storages[0] == storages[1]


def test_half_precision_decodes_too():
    target = tiny_target(network=llamagen().bfloat16())
    drafter = parallel_drafter(target, TREES["chain"], tiny_parallel(tiny_target()))
    output = decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    assert drafter.model.cache.entries[0].dtype == torch.bfloat16
    assert output.tokens.shape == (4, LENGTH) and torch.isfinite(output.trace.logprob).all()


def test_built_from_a_directory(tmp_path):
    target = tiny_target()
    network = tiny_parallel(target, features=(1,), layers=2)
    network.save_pretrained(tmp_path / "draft")
    drafters = (
        build_parallel(str(tmp_path / "draft"), target, Tree.chain(3)),
        parallel_drafter(target, Tree.chain(3), network),
    )
    one, other = (
        decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens
        for drafter in drafters
    )
    assert torch.equal(one, other)
    assert drafters[0].identity is not None


def test_refusals_are_one_sentence(tmp_path):
    target = tiny_target()
    tiny_parallel(target).save_pretrained(tmp_path / "parallel")
    tiny_eagle(target).save_pretrained(tmp_path / "eagle")
    longer = "this draft was trained to draft 4 tokens in one pass, not 6: draft 4 or fewer"
    with pytest.raises(TemperaError, match=longer):
        build_parallel(str(tmp_path / "parallel"), target, Tree.chain(6))
    with pytest.raises(TemperaError, match="a depth of 0|tree of depth 0"):
        build_parallel(str(tmp_path / "parallel"), target, Tree.empty())
    with pytest.raises(TemperaError, match="was trained for|hidden size"):
        other = tiny_target(network=llamagen(seed=5))
        build_parallel(str(tmp_path / "parallel"), other, Tree.chain(2))
    with pytest.raises(
        TemperaError,
        match="does not describe a draft of the kind parallel .layers: Field required",
    ):
        build_parallel(str(tmp_path / "eagle"), target, Tree.chain(2))
    with pytest.raises(
        TemperaError, match=r"config.json does not describe a draft of the kind eagle"
    ):
        build_eagle(str(tmp_path / "parallel"), target, Tree.chain(2))
    for sizes, message in (
        ({"layers": 0}, "layers=0 is not possible: give 1 or more"),
        ({"rank": -1}, "rank=-1 is not possible: give 0 or more"),
        ({"length": 1}, "length=1 is not possible: give 2 or more"),
    ):
        with pytest.raises(TemperaError, match=message):
            ParallelModel.of(target.network, "tiny", **sizes)
    with pytest.raises(TemperaError, match=f"length={LENGTH + 1} is not possible: an image has"):
        parallel_network(target, "tiny", length=LENGTH + 1)


def test_a_random_draft_fits_any_target_and_prints_a_warning(capsys):
    target = tiny_target(identity="in another precision")
    drafter = build_parallel("random", target, Tree.chain(7))
    assert "draft: random weights" in capsys.readouterr().out
    output = decode(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"])
    assert output.tokens.shape == (1, LENGTH)


def test_a_draft_in_half_precision_beside_a_target_in_full():
    target = tiny_target(Sampling(3.0, temperature=0))
    draft = ParallelDraft(tiny_parallel(target), target, 4, torch.bfloat16)
    output = decode(
        target,
        StaticTreeDrafter(draft, Tree.chain(4)),
        Exact(),
        RandomStreams(0, PROMPTS),
        PROMPTS,
    )
    plain = decode(target, NoDraft(), Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    assert draft.cache.entries[0].dtype == torch.bfloat16
    assert torch.equal(output.tokens, plain.tokens)
