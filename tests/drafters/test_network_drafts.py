"""What holds for every draft with a network: its cached passes equal whole ones, images depend
neither on the batch nor on a batch that failed, and nothing is kept too long.
"""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from cases import slow_but
from host_reads import HostReads
from network_drafts import (
    CHAIN,
    DRAFTERS,
    dflash,
    eagle,
    independent,
    medusa,
    parallel,
    small_model,
)
from random_drafts import new_sequences
from tiny_networks import (
    LENGTH,
    PROMPTS,
    TREE,
    captions,
    check_q,
    full_dflash,
    full_draft,
    full_hidden,
    full_medusa,
    full_parallel,
    llamagen,
    random_rounds,
    text_target,
    tiny_dflash,
    tiny_eagle,
    tiny_medusa,
    tiny_parallel,
    tiny_target,
)

from tempera.decoding import compiled
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact, Relaxed


def decoded(target, drafter, prompts=PROMPTS, rule=None, seed=0, **options):
    return decode(
        target, drafter, rule or Exact(), RandomStreams(seed, prompts), prompts, **options
    )


@torch.no_grad()
def check_every_q(target, drafter, prompts, hidden_after, forced=None):
    """Random rounds to the end: every q of a static tree equals the one computed from scratch.

    hidden_after: image int64 [n] of a row, the row, drafted tokens behind it → the hidden state
    that the draft predicts there, [R of one prompt, H].
    """
    generator, head = torch.Generator().manual_seed(1), target.head
    if isinstance(drafter.model, IndependentDraft):
        head = drafter.model.draft.head
    for draft, images in random_rounds(target, drafter, prompts, generator):
        for row, image in enumerate(images):

            def law(path, row=row, image=image):
                states = hidden_after(image, row, path)[:, None]
                place = None if forced is None else forced[len(image) + len(path)][None, None]
                return target.sampling.distribution(head.lm_logits(states), place)[0, 0]

            check_q(draft, row, law, target.length - len(image) - 1)


KINDS = {
    "eagle": (eagle, tiny_eagle, full_draft),
    "parallel": (parallel, tiny_parallel, full_parallel),
    "dflash": (dflash, tiny_dflash, full_dflash),
    "medusa": (medusa, tiny_medusa, full_medusa),
}


def made(kind, target, prompts, tree, **sizes):
    """A drafter, and what its network predicts after a place, computed from scratch."""
    drafter, network, full = KINDS[kind]
    model = network(target, **sizes)
    return drafter(target, tree, **sizes), lambda *place: full(model, target, prompts, *place)


def after_small(draft, prompts):
    def hidden(image, row, path):
        tokens = torch.cat([image, torch.tensor(path, dtype=torch.int64)])
        return full_hidden(draft, [prompts[row]], [tokens])[0][:, -1]

    return hidden


QUICK = [
    ("eagle", TREE, 3.0, {"features": (1,)}),
    ("parallel", TREE, 3.0, {"layers": 2}),
    ("dflash", TREE, 3.0, {"features": (0,), "rank": 4}),
    ("medusa", TREE, 3.0, {}),
    ("medusa", Tree.from_paths([[0], [1], [0, 0], [1, 0]]), 3.0, {"length": 2, "columns": 4}),
]
SLOW = [
    ("eagle", CHAIN, 1.0, {}),
    ("eagle", Tree.chain(1), 3.0, {}),
    ("dflash", CHAIN, 1.0, {"layers": 1}),
    ("medusa", CHAIN, 1.0, {}),
    ("parallel", CHAIN, 3.0, {"features": (0, 1), "layers": 2}),
    ("parallel", Tree.chain(2), 3.0, {"rank": 0}),
    ("independent", CHAIN, 1.0, {}),
]


@pytest.mark.parametrize(
    ("kind", "tree", "guidance", "sizes"),
    [
        *QUICK,
        ("independent", TREE, 3.0, {}),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
    ],
)
def test_q_equals_a_forward_pass_from_scratch_after_any_rounds(kind, tree, guidance, sizes):
    sampling, prompts = Sampling(guidance, temperature=5.0), PROMPTS[1:4:2]
    target = tiny_target(sampling, network=llamagen(grid=(3, 4)), granularity=4)
    if kind in KINDS:
        drafter, after = made(kind, target, prompts, tree, **sizes)
    else:
        drafter = independent(target, tree, grid=(3, 4), granularity=4)
        after = after_small(drafter.model.draft, prompts)
    check_every_q(target, drafter, prompts, after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_with_forced_positions(kind):
    target, prompts = text_target(Sampling(2.0), 2, 2, 4, line_end=19), ["xyz", "a"]
    drafter, after = made(kind, target, prompts, Tree.chain(3))
    check_every_q(target, drafter, prompts, after, target.head.forced)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_longer_caption_beside_it_does_not_change_what_is_drafted(kind):
    """It pads the other one, and nothing reads the hidden states of padding."""
    target = text_target(Sampling(2.0))
    drafter, found = made(kind, target, PROMPTS, Tree.chain(3))[0], []
    for prompts in (["a"], ["a", "xyz"]):
        images = new_sequences(len(prompts), target.length)
        target.begin(prompts, 3)
        drafter.begin(prompts, images, torch.empty(len(prompts), 0), None)
        found.append(drafter.propose(images, torch.full((len(prompts), 3), 0.5)).q[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_drafting_equals_greedy_autoregression(name):
    target = tiny_target(Sampling(3.0, temperature=0))
    plain, fast = (decoded(target, one) for one in (NoDraft(), DRAFTERS[name](target)))
    assert torch.equal(plain.tokens, fast.tokens) and len(plain.tokens.unique()) > 3
    assert (fast.trace.rounds <= plain.trace.rounds).all()


@pytest.mark.parametrize("name", ["eagle", "medusa", "parallel", "dflash"])
def test_a_draft_takes_the_sampling_of_its_image(name):
    """And not that of the image before, which was greedy."""
    target = tiny_target(Sampling(3.0, temperature=0))
    used, fresh = DRAFTERS[name](target), DRAFTERS[name](target)
    decoded(target, used)
    assert used.model.greedy
    target.sampling = Sampling(3.0, temperature=1.3)
    one, other = (decoded(target, drafter, diagnostics=True) for drafter in (used, fresh))
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.trace.tv, other.trace.tv, equal_nan=True)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_batch_generates_the_same_images_as_single_prompts_and_a_round_is_read_once(name):
    target = tiny_target(Sampling(3.0, top_k=6))
    drafter, reads, rule = DRAFTERS[name](target), HostReads(), Relaxed((1.5,))
    alone = [decoded(target, drafter, [prompt], rule) for prompt in PROMPTS]
    decoded(target, drafter, rule=rule)  # makes what is made once
    counts = []
    with reads:
        output = decoded(
            target, drafter, rule=rule, watch=[lambda _: counts.append(reads.count.total())]
        )
    assert {after - before for before, after in pairwise(counts)} == {1}
    assert len(output.trace.rounds.unique()) > 1
    for row, one in enumerate(alone):
        assert torch.equal(one.tokens[0], output.tokens[row])
        assert one.trace.rounds[0] == output.trace.rounds[row]


@pytest.mark.parametrize("name", DRAFTERS)
def test_half_precision_in_both_or_in_the_draft_alone(name):
    half = tiny_target(network=llamagen().bfloat16(), identity=tiny_target().identity)
    output = decoded(half, DRAFTERS[name](half))
    assert torch.isfinite(output.trace.logprob).all()
    target = tiny_target(Sampling(3.0, temperature=0))
    drafter = DRAFTERS[name](target, torch.bfloat16)
    cache = drafter.model.draft.runner.cache if name == "independent" else drafter.model.run.cache
    assert torch.equal(decoded(target, drafter).tokens, decoded(target, NoDraft()).tokens)
    assert (cache.dtype, target.runner.cache.dtype) == (torch.bfloat16, torch.float32)


class Sick:
    """Captions whose encoding is NaN while `now`."""

    now = False

    def __call__(self, prompts):
        condition, keep = captions(prompts)
        return (condition * torch.nan if self.now else condition), keep


def broken(function):
    return lambda *given: function(*given) * torch.nan


@pytest.mark.parametrize("where", ["encoding", "mid-image", "draft"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_failed_batch_leaves_nothing_behind(name, where, monkeypatch):
    expected = decoded(fresh := tiny_target(), DRAFTERS[name](fresh)).tokens
    conditioner = Sick()
    target = tiny_target(conditioner=conditioner)
    drafter = DRAFTERS[name](target)
    with monkeypatch.context() as patch, pytest.raises(TemperaError, match="gave NaN"):
        if where == "encoding":
            patch.setattr(conditioner, "now", True)
        elif where == "mid-image":
            patch.setattr(target.head, "embed", broken(target.head.embed))
        elif name == "independent":
            head = drafter.model.draft.head
            patch.setattr(head, "embed", broken(head.embed))
        else:
            part = "heads" if name == "medusa" else "forward"
            network = drafter.model.run.network
            patch.setattr(network, part, broken(getattr(network, part)))
        decoded(target, drafter)
    assert torch.equal(decoded(target, drafter).tokens, expected)


def used(name, ways):
    """A target and a drafter after two batches, and references to what must not outlive them."""
    target = tiny_target()
    for way in ways:
        getattr(target, way)()
    drafter = NoDraft() if name == "ar" else DRAFTERS[name](target)
    parts = [target.network, target.runner.cache]
    for _ in range(2):
        decoded(target, drafter, PROMPTS[:1])
    if name != "ar":
        model = drafter.model
        parts += [model, model.draft.network if name == "independent" else model.run.network]
    return (target, drafter), [weakref.ref(part) for part in parts]


COMPILED = ("ar", "eagle", "parallel", "dflash")


@pytest.mark.parametrize(
    ("name", "ways"),
    slow_but(
        [(name, ()) for name in DRAFTERS] + [(name, ("pack", "compile")) for name in COMPILED],
        ("eagle", ()),
        ("independent", ()),
        ("ar", ("pack", "compile")),
    ),
)
def test_of_two_targets_and_drafts_only_the_last_one_is_alive(name, ways, monkeypatch):
    """A sweep builds one after another; none waits for the garbage collector."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled.forget()
    gc.collect()
    gc.disable()
    try:
        made = []
        for _ in range(2):
            pair, parts = used(name, ways)
            made.append(parts)
        alive = [[part() is not None for part in parts] for parts in made]
    finally:
        gc.enable()
        compiled.forget()
    assert pair and alive == [[index == 1] * len(parts) for index in range(2)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(4.0, 1.3, top_k=5), Sampling(2.0, 0)], ids=str)
def test_a_draft_equal_to_the_target_is_always_accepted(sampling, depth):
    """Also if the sampling changes between images."""
    target, draft = tiny_target(Sampling(1.0)), tiny_target()
    tree = TREE if depth == 3 else Tree.chain(depth)
    drafter = StaticTreeDrafter(IndependentDraft(draft, target), tree)
    for changed in (Sampling(1.0), sampling):
        target.sampling = changed
        output = decoded(target, drafter, diagnostics=True)
        assert output.trace.rounds.tolist() == [-(-LENGTH // (depth + 1))] * len(PROMPTS)
        assert output.trace.tv.nan_to_num().max() < 1e-5


def test_two_drafts_of_different_features_need_a_target_each():
    target = tiny_target(Sampling(3.0))
    for features in ((1,), (1,), ()):
        EagleDraft(tiny_eagle(target, features=features), target)
    with pytest.raises(TemperaError, match=r"reads layers \[1\] of this target already"):
        EagleDraft(tiny_eagle(target, features=(0, 1)), target)
    with pytest.raises(TemperaError, match=r"all of the layers \[9\]: give numbers from 0"):
        tiny_eagle(target, features=(9,))
    alone = tiny_target(Sampling(3.0))  # without features, where none are captured
    one, other = (decoded(each, eagle(each, CHAIN)).tokens for each in (target, alone))
    assert torch.equal(one, other)


def test_an_independent_draft_of_another_family_and_what_does_not_fit():
    draft, target = text_target(Sampling(1.0)), tiny_target(Sampling(2.0))
    drafter = StaticTreeDrafter(IndependentDraft(draft, target), Tree.chain(2))
    assert decoded(target, drafter).trace.tau.max() > 0
    with pytest.raises(
        TemperaError, match=r"a vocabulary of 7 tokens, but the target has 11: give a"
    ):
        IndependentDraft(small_model(vocab=7), target)
    with pytest.raises(
        TemperaError, match="the draft generates 5×4 tokens, but the target generates 4×5"
    ):
        IndependentDraft(small_model(grid=(5, 4)), target)
