"""An independent draft: its cached passes equal whole forward passes, and a draft equal to the
target is always accepted.
"""

from itertools import product

import pytest
import torch
from cases import slow_but
from drafter_checks import check_batch, check_greedy, check_one_read
from dynamic_trees import grown, token_paths
from tiny_networks import (
    GRID,
    LENGTH,
    PROMPTS,
    TREE,
    VOCAB,
    TextLlama,
    captions,
    check_q,
    full_hidden,
    lively,
    llamagen,
    random_rounds,
    tiny_target,
)  # fmt: skip

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.independent import IndependentDraft, build_independent
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.exactness.tables import check, compare, emit, emitted_law
from tempera.exactness.theory import sequence_law
from tempera.rules.standard import Exact, Relaxed
from tempera.runtime.network_directory import write_network
from tempera.shapes.networks import TextEncoder, load_smaller, target_config
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig, to_official

TREES = {
    "chain": Tree.chain(4),
    "tree": TREE,
    "one": Tree.chain(1),
    "bush": Tree.from_paths([[0], [1], [2]]),
}


def small_captions(prompts):
    """Fewer condition tokens of another width than the target's."""
    features, keep = captions(prompts)
    return features[:, 1:, :4] * keep[:, 1:, None], keep[:, 1:]


def small_model(sampling=None, seed=3, grid=GRID, vocab=VOCAB, **options):
    """A model of another size with another prefix."""
    config = LlamaGenConfig(vocab, 8, 12, 2, 1, grid, prefix_length=4, caption_dim=4)
    return tiny_target(
        sampling, network=lively(LlamaGen(config), seed), conditioner=small_captions, **options
    )


def independent(target, tree, draft=None):
    return StaticTreeDrafter(IndependentDraft(draft or small_model(), target), tree)


def law_after(draft, prompt, image):
    """By a forward pass over the whole sequence."""
    states = full_hidden(draft, [prompt], [image])[0]
    return draft.sampling.distribution(draft.head.lm_logits(states[:, -1]))[0]


@pytest.mark.parametrize("name", slow_but(TREES, "tree"))
@pytest.mark.parametrize("guidance", slow_but([1.0, 3.0], 3.0))
@torch.no_grad()
def test_q_equals_a_forward_pass_from_scratch_after_any_rounds(name, guidance):
    target = tiny_target(Sampling(guidance, temperature=2.0), granularity=4)
    draft, prompts = small_model(granularity=4), PROMPTS[1:4:2]
    for drafted, images in random_rounds(
        target, independent(target, TREES[name], draft), prompts, torch.Generator().manual_seed(1)
    ):
        for row, image in enumerate(images):

            def law(path, row=row, image=image):
                return law_after(
                    draft, prompts[row], torch.cat([image, torch.tensor(path, dtype=torch.int64)])
                )

            check_q(drafted, row, law, LENGTH - len(image) - 1)


@pytest.mark.slow
@torch.no_grad()
def test_it_drafts_a_tree_per_row():
    target = tiny_target(Sampling(3.0, temperature=2.0), granularity=4)
    draft, prompts, size = small_model(granularity=4), PROMPTS[1:4:2], (3, 3, 5)
    drafter = DynamicTreeDrafter(IndependentDraft(draft, target), VOCAB, *size)
    for drafted, images in random_rounds(
        target, drafter, prompts, torch.Generator().manual_seed(2)
    ):
        for row, image in enumerate(images):
            if len(image) + size[1] <= LENGTH:

                def law(path, row=row, image=image):
                    return law_after(
                        draft,
                        prompts[row],
                        torch.cat([image, torch.tensor(path, dtype=torch.int64)]),
                    ).tolist()

                assert set(token_paths(drafted, row)) == {path for path, _ in grown(law, *size)}


@pytest.mark.parametrize(("name", "depth"), [("chain", 4), ("tree", 3), ("one", 1)])
@pytest.mark.parametrize(
    "sampling",
    slow_but(
        [Sampling(1.0), Sampling(3.0, 0.7), Sampling(4.0, 1.3, top_k=5), Sampling(2.0, 0)],
        Sampling(4.0, 1.3, top_k=5),
    ),
)
def test_a_draft_equal_to_the_target_is_always_accepted(sampling, name, depth):
    target = tiny_target(sampling)
    drafter = independent(target, TREES[name], tiny_target())
    output = decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS, diagnostics=True)
    assert output.trace.rounds.tolist() == [-(-LENGTH // (depth + 1))] * len(PROMPTS)
    assert output.trace.tv.nan_to_num().max() < 1e-5


def test_the_sampling_may_change_between_images():
    target, draft = tiny_target(Sampling(1.0)), tiny_target()
    drafter = independent(target, Tree.chain(4), draft)
    for sampling in (Sampling(1.0), Sampling(3.0, 0.5), Sampling(1.0, 2.0)):
        target.sampling = sampling
        output = decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
        assert output.trace.rounds.tolist() == [4] * len(PROMPTS)


def test_greedy_decoding_equals_greedy_autoregression():
    target = tiny_target(Sampling(3.0, temperature=0))
    check_greedy(target, independent(target, TREE))


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("guidance", slow_but([1.0, 3.0], 3.0))
def test_a_batch_generates_the_same_images_as_single_prompts(name, guidance):
    target = tiny_target(Sampling(guidance, top_k=6))
    drafter = independent(target, TREES[name])
    check_batch(target, drafter, Relaxed((1.5,)))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Tree.chain(3), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(3.0, 1.7, top_k=3)], ids=["plain", "guided top-k"]
)
def test_an_independent_table_emits_the_target_s_law(sampling, tree):
    report = check(Exact(), tree, sampling=sampling, vocab_size=4, length=4, rows=200_000)
    assert report.agrees, report


@pytest.mark.slow
@pytest.mark.parametrize("make", ["chain", "tree"])
def test_the_law_is_the_targets(make):
    """Networks small enough that the law of a whole image can be written down."""
    sampling, grid, vocab = Sampling(2.0, temperature=1.5), (2, 2), 3
    target, draft = (small_model(sampling, seed, grid, vocab, granularity=4) for seed in (3, 4))
    for model in (target, draft):
        model.conditioner = lambda prompts: [
            part.expand(len(prompts), *part.shape[1:]) for part in small_captions(["bb"])
        ]
    model = IndependentDraft(draft, target)
    drafters = {
        "chain": lambda: StaticTreeDrafter(model, Tree.chain(2)),
        "tree": lambda: StaticTreeDrafter(model, Tree.from_paths([[0], [1], [0, 0], [1, 0]])),
    }
    with torch.no_grad():
        prefixes = [
            [
                torch.tensor(image, dtype=torch.int64)
                for image in product(range(vocab), repeat=count)
            ]
            for count in range(4)
        ]
        conditionals = [
            torch.stack([law_after(target, "bb", image) for image in images]).double()
            for images in prefixes
        ]
    law = sequence_law(conditionals, 4)
    output = emit(target, drafters[make](), Exact(), rows=20_000)
    found = compare(emitted_law(output.tokens, vocab), law / law.sum())
    assert found.agrees, found
    assert 1.1 < output.trace.accepted_length.mean() < 2.9


def test_a_round_reads_from_the_device_once():
    target = tiny_target()
    drafter = independent(target, TREE)
    check_one_read(target, drafter)


def test_half_precision_decodes_too():
    target = tiny_target(network=llamagen().bfloat16())
    draft = tiny_target(network=llamagen(seed=2).bfloat16())
    output = decode(
        target, independent(target, TREE, draft), Exact(), RandomStreams(0, PROMPTS), PROMPTS
    )
    assert (
        draft.session.cache.entries[0].dtype == torch.bfloat16
        and torch.isfinite(output.trace.logprob).all()
    )


def test_a_draft_of_another_family():
    ids = torch.arange(11, 11 + VOCAB)
    network = lively(TextLlama())
    draft = tiny_target(network=network, conditioner=network.conditioner, grid=GRID, token_ids=ids)
    target = tiny_target(Sampling(2.0))
    output = decode(
        target,
        independent(target, Tree.chain(2), draft),
        Exact(),
        RandomStreams(0, PROMPTS),
        PROMPTS,
    )
    assert output.tokens.shape == (4, LENGTH) and output.trace.tau.max() > 0


def save_smaller(directory):
    torch.manual_seed(0)
    network, encoder = (
        lively(LlamaGen(LlamaGenConfig(VOCAB, 8, 12, 2, 1, GRID, prefix_length=4, caption_dim=4))),
        TextEncoder(4, 4, 1, 1),
    )
    write_network(directory, to_official(network.state_dict(), 1), target_config(network))
    write_network(directory / "text_encoder", encoder.state_dict(), encoder.config)


def test_built_from_a_directory(tmp_path):
    save_smaller(tmp_path)
    target = tiny_target()
    drafter = build_independent(load_smaller(tmp_path), target, Tree.chain(3))
    assert (drafter.nodes, drafter.depth) == (3, 3)
    assert decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens.shape == (
        4,
        LENGTH,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_draft_may_have_another_dtype(tmp_path, dtype):
    save_smaller(tmp_path)
    target = tiny_target()
    drafter = build_independent(load_smaller(tmp_path), target, Tree.chain(3), dtype)
    weight, rounded = drafter.model.draft.head.linear.weight, getattr(torch, dtype)
    assert weight.dtype == (torch.float32 if dtype == "float16" else rounded)
    assert torch.equal(weight.float(), weight.to(rounded).float())
    assert target.dtype == torch.float32
    decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)


@pytest.mark.parametrize("ways", [(), ("fuse",), ("fuse", "compile")], ids="-".join)
def test_the_draft_is_as_fast_as_the_target(tmp_path, ways):
    """Fused and compiled as the target is."""
    save_smaller(tmp_path)
    target = tiny_target()
    for way in ways:
        getattr(target, way)()
    draft = build_independent(load_smaller(tmp_path), target, Tree.chain(3)).model.draft
    assert (draft.fused, draft.compiled) == (target.fused, target.compiled)
    assert (target.fused, target.compiled) == ("fuse" in ways, "compile" in ways)


def test_bad_input_is_reported_in_one_sentence(tmp_path):
    target = tiny_target()
    with pytest.raises(
        TemperaError,
        match="^the draft has a vocabulary of 7 tokens, the target of 11: give a draft with the "
        "target's",
    ):
        IndependentDraft(small_model(vocab=7), target)
    with pytest.raises(
        TemperaError,
        match="^the draft generates 5×4 tokens, the target 4×5: give a draft of the same image "
        "size",
    ):
        IndependentDraft(small_model(grid=(5, 4)), target)
    with pytest.raises(TemperaError, match="holds no config.json"):
        build_independent(load_smaller(tmp_path), target, Tree.chain(3))
    with pytest.raises(TemperaError, match="a tree of depth 0 drafts nothing"):
        independent(target, Tree.empty())
