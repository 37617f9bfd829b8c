from functools import partial

import pytest
import torch
from cases import slow_but, slow_rows_but
from drafter_checks import check_batch, check_bookkeeping, check_greedy, check_one_read
from tiny_networks import (
    GRID,
    LENGTH,
    PROMPTS,
    TREE,
    VOCAB,
    TextLlama,
    captions,
    full_draft,
    lively,
    llamagen,
    tiny_eagle,
    tiny_target,
)

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft, build_eagle
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact, Relaxed

TREES = {
    "chain": Tree.chain(4),
    "tree": TREE,
    "one": Tree.chain(1),
    "bush": Tree.from_paths([[0], [1], [2]]),
}


def eagle_drafter(target, tree, eagle=None, dtype=None):
    return StaticTreeDrafter(EagleDraft(eagle or tiny_eagle(target), target, dtype=dtype), tree)


def check_q(target, eagle, tree, prompts, forced=None):
    drafter = eagle_drafter(target, tree, eagle)
    predicted = partial(full_draft, eagle, target, prompts)
    check_bookkeeping(target, drafter, prompts, predicted, forced)


@pytest.mark.parametrize(
    ("name", "guidance", "features"),
    slow_rows_but(
        [
            ("chain", 1.0, ()),
            ("chain", 3.0, ()),
            ("chain", 3.0, (0, 1)),
            ("tree", 1.0, ()),
            ("tree", 3.0, ()),
            ("tree", 3.0, (1,)),
            ("one", 3.0, ()),
            ("bush", 3.0, ()),
        ],
        ("tree", 3.0, (1,)),
    ),
)
def test_q_equals_a_forward_pass_from_scratch_after_any_rounds(name, guidance, features):
    target = tiny_target(
        Sampling(guidance, temperature=5.0), network=llamagen(grid=(3, 4)), granularity=4
    )
    check_q(target, tiny_eagle(target, features=features), TREES[name], PROMPTS[1:4:2])


def test_two_drafts_of_different_features_need_a_target_each():
    target = tiny_target()
    EagleDraft(tiny_eagle(target, features=(1,)), target)
    EagleDraft(tiny_eagle(target, features=(1,)), target)
    EagleDraft(tiny_eagle(target), target)
    with pytest.raises(TemperaError, match=r"reads layers \[1\] of this target already"):
        EagleDraft(tiny_eagle(target, features=(0, 1)), target)
    absent = r"layers \[9\] are not there: give numbers from 0 to 2"
    with pytest.raises(TemperaError, match=absent):
        tiny_eagle(target, features=(9,))
    with pytest.raises(TemperaError, match=absent):
        target.session.capture_hidden_states((9,))


@pytest.mark.parametrize("features", [(), (0, 1)])
def test_a_draft_without_features_reads_none_where_another_draft_watches(features):
    target = tiny_target(Sampling(3.0))
    target.session.capture_hidden_states(features)
    drafter = eagle_drafter(target, Tree.chain(3), tiny_eagle(target))
    output = decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    alone = tiny_target(Sampling(3.0))
    drafter = eagle_drafter(alone, Tree.chain(3), tiny_eagle(alone))
    expected = decode(alone, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    assert torch.equal(output.tokens, expected.tokens)


def test_a_language_model_with_forced_positions():
    network, forced = lively(TextLlama()), torch.full((6,), -1)
    forced[[2, 5]] = 0
    ids = torch.tensor([29, 11, 12, 13, 20])
    target = tiny_target(
        Sampling(2.0),
        network=network,
        conditioner=network.conditioner,
        grid=(2, 3),
        token_ids=ids,
        forced=forced,
        granularity=4,
    )
    eagle = lively(EagleModel.of(network, "text", vocab_size=5), 1)
    check_q(target, eagle, Tree.chain(3), ["xyz", "a"], forced)


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("features", slow_but([(), (0, 1)], ()))
def test_greedy_eagle_equals_greedy_autoregression(name, features):
    target = tiny_target(Sampling(3.0, temperature=0))
    drafter = eagle_drafter(target, TREES[name], tiny_eagle(target, features=features))
    plain, eagle = check_greedy(target, drafter)
    assert (eagle.trace.rounds <= plain.trace.rounds).all()


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("guidance", slow_but([1.0, 3.0], 3.0))
def test_a_batch_generates_the_same_images_as_single_prompts(name, guidance):
    target = tiny_target(Sampling(guidance, top_k=6))
    drafter = eagle_drafter(target, TREES[name])
    check_batch(target, drafter, Relaxed((1.5,)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_drafted_tokens_follow_the_recorded_q(dtype):
    from scipy.stats import chi2

    target = tiny_target(
        Sampling(2.0, temperature=4.0, top_k=7), network=llamagen(num_hidden_layers=1)
    )
    drafter, rows = eagle_drafter(target, TREE, dtype=dtype), 3000
    prompts = ["bb"] * rows
    with torch.no_grad():
        target.begin(prompts, drafter.nodes)
        drafter.begin(prompts)
        draft = drafter.propose(
            torch.rand(rows, drafter.uniforms, generator=torch.Generator().manual_seed(0))
        )
    assert torch.isfinite(draft.q).all()
    for node in range(TREE.nodes):
        expected, observed = (
            draft.q[:, node].sum(0),
            torch.bincount(draft.tokens[:, node], minlength=VOCAB),
        )
        variance = (draft.q[:, node] * (1 - draft.q[:, node])).sum(0)
        likely = variance > 5
        assert likely.sum() > 4 and not observed[expected == 0].any()
        deviations = ((observed - expected).square() / variance)[likely]
        assert deviations.sum() < chi2.isf(1e-5, int(likely.sum()))


@torch.no_grad()
def test_the_draft_has_the_top_k_of_the_target():
    """A drafted token outside the draft's top-k is likely outside the target's too: it would be
    proposed and never kept.
    """
    target = tiny_target(Sampling(2.0, temperature=4.0, top_k=3), network=llamagen(grid=(2, 2)))
    drafter = eagle_drafter(target, TREES["chain"])
    target.begin(PROMPTS[:1], drafter.nodes)
    drafter.begin(PROMPTS[:1])
    draft = drafter.propose(torch.full((1, drafter.uniforms), 0.5))
    assert ((draft.q > 0).sum(-1) == 3).all()


def test_drafts_at_forced_positions_are_always_accepted():
    forced = torch.full((LENGTH,), -1)
    forced[4::5] = 3
    target = tiny_target(forced=forced)
    output = decode(
        target, eagle_drafter(target, Tree.chain(3)), Exact(), RandomStreams(1, PROMPTS), PROMPTS
    )
    assert (output.tokens.view(4, *GRID)[..., -1] == 3).all()
    drafted = (
        output.trace.place.view(4, *GRID)[..., -1] <= 3
    )  # wherever a draft reached a forced place, it was kept
    assert drafted.any() and (output.trace.origin.view(4, *GRID)[..., -1][drafted] != 1).all()


def test_built_from_a_directory(tmp_path):
    target = tiny_target()
    tiny_eagle(target).save_pretrained(tmp_path / "draft")
    drafter = build_eagle(str(tmp_path / "draft"), target, Tree.chain(2))
    reference = eagle_drafter(target, Tree.chain(2))
    generate = [
        decode(target, d, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens
        for d in (drafter, reference)
    ]
    assert torch.equal(*generate)
    with pytest.raises(TemperaError, match="hidden size 16, the target 8"):
        build_eagle(
            str(tmp_path / "draft"), tiny_target(network=llamagen(hidden_size=8)), Tree.chain(2)
        )


@pytest.mark.parametrize("name", ["ar", "chain", "tree"])
def test_a_round_reads_from_the_device_once(name):
    target = tiny_target()
    drafter = NoDraft() if name == "ar" else eagle_drafter(target, TREES[name])
    check_one_read(target, drafter)


def test_the_next_batch_reuses_the_memory():
    target = tiny_target()
    drafter = eagle_drafter(target, Tree.chain(3))
    storages = []
    for _ in range(2):
        decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
        storages.append(
            (target.session.cache.entries[0].data_ptr(), drafter.model.cache.entries[0].data_ptr())
        )
    assert storages[0] == storages[1]


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_a_draft_in_half_precision_beside_a_target_in_full(fuse):
    target, roots = tiny_target(Sampling(3.0)), {}
    if fuse:
        target.fuse()
    for dtype in (None, torch.bfloat16):
        drafter = eagle_drafter(target, TREE, dtype=dtype)
        target.begin(PROMPTS, drafter.nodes)
        drafter.begin(PROMPTS)
        roots[dtype] = drafter.model.roots()
    assert roots[torch.bfloat16].dtype == torch.float32
    assert drafter.model.cache.entries[0].dtype == torch.bfloat16
    assert target.session.cache.entries[0].dtype == torch.float32
    assert 0 < (roots[torch.bfloat16] - roots[None]).abs().max() < 0.05
    target.sampling = Sampling(3.0, temperature=0)
    check_greedy(target, drafter)


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_half_precision_decodes_too(name):
    target = tiny_target(
        network=llamagen().bfloat16(), conditioner=lambda prompts: captions(prompts)
    )
    eagle = tiny_eagle(tiny_target())
    output = decode(
        target,
        eagle_drafter(target, TREES[name], eagle),
        Exact(),
        RandomStreams(0, PROMPTS),
        PROMPTS,
    )
    assert target.session.cache.entries[0].dtype == torch.bfloat16 and output.tokens.shape == (
        4,
        LENGTH,
    )
    assert torch.isfinite(output.trace.logprob).all() and eagle.fc.weight.dtype == torch.float32


def test_a_random_draft_fits_any_target_and_prints_a_warning(capsys):
    target = tiny_target(identity="in another precision")
    drafter = build_eagle("random", target, Tree.chain(2))
    assert "draft: random weights" in capsys.readouterr().out
    assert decode(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"]).tokens.shape == (
        1,
        LENGTH,
    )
