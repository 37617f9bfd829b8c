import gc
import inspect
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from random_drafts import new_sequences
from tiny_networks import tiny_dflash, tiny_medusa, tiny_parallel
from tiny_training import tiny_codes, tiny_draft, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import total_variation
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.draft_files import draft_to_train
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.medusa import MedusaModel
from tempera.drafters.parallel_network import ParallelModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.training.teacher_forcing import add_noise, null_conditioned, teach
from tempera.training.validation import accepted_length, decoded, imitation, metrics_of


@pytest.mark.parametrize(("guidance", "features"), [(1.0, ()), (2.0, (0, 1))])
def test_training_inputs_equal_drafting_inputs(guidance: float, features: tuple[int, ...]) -> None:
    target = tiny_target(guidance)
    draft = tiny_draft(target, features).requires_grad_(False)
    images = tiny_codes().holdout([0, 1])
    rows = target.sampling.rows
    captions, tokens, drop = images.captions * rows, images.tokens, torch.arange(2 * rows) >= 2
    lesson = teach(target, captions, tokens.repeat(rows, 1), drop, features)
    predicted = draft(lesson.embeds, lesson.previous, lesson.mask, lesson.rotation)
    taught = target.sampling.distribution(target.head.lm_logits(predicted[:, lesson.start]))
    drafter = EagleDraft(draft, target)
    empty = new_sequences(len(images.captions), target.length)
    target.begin(images.captions, 1)
    drafter.begin(images.captions, 1, empty)
    torch.testing.assert_close(drafter.roots(empty)[0], taught)
    assert lesson.hidden.shape[1] == lesson.start + target.length


@pytest.mark.parametrize(("steps", "features"), [(1, ()), (2, (0, 1))])
def test_unrolled_training_inputs_equal_later_drafting_inputs(
    steps: int, features: tuple[int, ...]
) -> None:
    """The last copy at each place is the draft run on the true past, but for its own predictions in
    the last `steps` places.
    """
    target = tiny_target(1.0)
    draft = tiny_draft(target, features).requires_grad_(False)
    images = tiny_codes().holdout([0, 1])
    lesson = teach(target, images.captions, images.tokens, torch.tensor([False, True]), features)
    length, states = lesson.hidden.shape[1], [lesson.previous]
    for _ in range(steps):
        states.append(
            lesson.before(draft(*lesson.unrolled(states, draft.visible(len(states))))[:, -length:])
        )
    last = draft(*lesson.unrolled(states, draft.visible(len(states))))[:, -length:]
    for place in range(lesson.start + steps, length, 3):
        previous = lesson.previous.clone()
        for back in range(steps - 1, -1, -1):
            here = place - back
            drafted = draft(lesson.embeds, previous, lesson.mask, lesson.rotation)
            previous[:, here] = lesson.before(drafted)[:, here]
        walked = draft(lesson.embeds, previous, lesson.mask, lesson.rotation)[:, place]
        torch.testing.assert_close(last[:, place], walked)


@pytest.mark.parametrize("make", [tiny_parallel, tiny_dflash])
@pytest.mark.parametrize(("rank", "features"), [(0, ()), (4, (0, 1))])
def test_slots_learn_from_what_they_draft_from(
    rank: int, features: tuple[int, ...], make: Any
) -> None:
    """Copy k at the k-th place behind a root is slot k of the first round, after true tokens."""
    target = tiny_target(2.0)
    draft = make(target, features=features, rank=rank, layers=2, length=3)
    images = tiny_codes().holdout([0, 1])
    drop = torch.arange(4) >= 2
    lesson = teach(target, images.captions * 2, images.tokens.repeat(2, 1), drop, features)
    with torch.no_grad():
        predicted = draft(*lesson.unrolled([lesson.previous], draft.visible(3)))
    places = [copy * lesson.mask.shape[-1] + lesson.start + copy for copy in range(3)]
    taught = target.sampling.distribution(target.head.lm_logits(predicted[:, places]))
    drafter = draft.draft_model(draft, target)
    empty = new_sequences(len(images.captions), target.length)
    target.begin(images.captions, 3)
    drafter.begin(images.captions, 3, empty)
    root, above = drafter.roots(empty)
    found = [root[:, None]]
    for level in Tree.chain(3).levels[:2]:
        after, above = drafter.expand(above, images.tokens[:, level.depth - 1, None], level)
        found.append(after)
    torch.testing.assert_close(torch.cat(found, 1), taught)
    assert taught[:, 1].equal(taught[:, 2]) is False


def test_a_null_conditioned_row_does_not_depend_on_its_words() -> None:
    target = tiny_target()
    codes = tiny_codes().holdout([0, 0]).tokens
    for drop in (True, False):
        lesson = teach(target, ["a red ring", "a blue ring"], codes, torch.tensor([drop, drop]))
        assert torch.allclose(*lesson.hidden, atol=1e-5) == drop


def test_noise_and_dropout_belong_to_the_image_not_to_its_batch() -> None:
    hidden = torch.zeros(3, 4, 5)
    noise = add_noise(hidden, 0, [7, 8, 9], 0.2)
    assert torch.equal(noise[1:2], add_noise(hidden[:1], 0, [8], 0.2))
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise, add_noise(hidden, 1, [7, 8, 9], 0.2))
    assert 0.15 < noise.abs().max() <= 0.2
    assert torch.equal(add_noise(hidden, 0, [7, 8, 9], 0.0), hidden)
    spread = add_noise(torch.zeros(2, 500, 5), 0, [7, 8], 0.2)
    assert (spread.mean(), spread.std()) == pytest.approx((0, 0.2 / 3**0.5), abs=0.01)
    pairs = add_noise(torch.zeros(4, 4, 5), 0, [7, 8], 0.2)
    assert torch.equal(pairs[:2], noise[:2])
    assert not torch.equal(pairs[2:], noise[:2])
    many = null_conditioned(0, list(range(5000)), 0.1)
    assert many.float().mean() == pytest.approx(0.1, abs=0.015)
    assert torch.equal(many[100:110], null_conditioned(0, list(range(100, 110)), 0.1))


def test_a_perfect_draft_has_no_distance_and_a_real_decode_is_measured() -> None:
    target = tiny_target()
    images = tiny_codes().train(list(range(9)))

    class Oracle:
        """Returns the target's own hidden states."""

        features, slots = (), 1

        def visible(self, count: int) -> torch.Tensor:
            return torch.ones(count, count, dtype=torch.bool)

        def __call__(self, embeds: Any, previous: Any, mask: Any, rotation: Any) -> torch.Tensor:
            out: torch.Tensor = target.network.model(embeds, mask, rotation)
            return out

    metrics = metrics_of(imitation(Oracle(), target, images, batch_size=2))  # type: ignore[arg-type]
    assert metrics == pytest.approx({"top1": 1, "top3": 1, "tv": 0}, abs=1e-5)
    draft = tiny_draft(target)
    worse = metrics_of(imitation(draft, target, images))
    lesson = teach(target, images.captions * 2, images.tokens.repeat(2, 1), torch.arange(18) >= 9)
    with torch.no_grad():
        predicted = draft(lesson.embeds, lesson.previous, lesson.mask, lesson.rotation)
    p, q = (target.sampling.distribution(target.head.lm_logits(states[:, lesson.start :]))
            for states in (lesson.hidden, predicted))  # fmt: skip
    place = (q > q.gather(-1, p.argmax(-1, keepdim=True))).sum(-1)
    expected = [
        (place < 1).float().mean(),
        (place < 3).float().mean(),
        total_variation(p, q).mean(),
    ]
    assert [*worse.values()] == pytest.approx([float(one) for one in expected])
    drafter = StaticTreeDrafter(EagleDraft(draft, target), Tree.chain(2))
    streams = RandomStreams(0, [f"validation-{number}" for number in range(9)])
    rounds = decode(target, drafter, Exact(), streams, images.captions).trace.rounds.tolist()
    assert len(set(rounds)) > 1  # or their mean would be their largest
    assert accepted_length(decoded(draft, target, images.captions, 2)) == 9 * target.length / sum(
        rounds
    )
    assert all(parameter.requires_grad for parameter in draft.parameters())


@torch.no_grad()
@pytest.mark.parametrize("make", [tiny_draft, tiny_parallel])
def test_rows_share_the_mask_of_unrolled_copies(make: Any) -> None:
    """Which is as large for many rows as for one, and hides each row's own padding."""
    target = tiny_target(2.0)
    draft, images = make(target), tiny_codes().holdout([0, 1])
    drop = torch.arange(4) >= 2
    lesson = teach(target, images.captions * 2, images.tokens.repeat(2, 1), drop)
    assert not lesson.real.all()
    copies, length = 3, lesson.mask.shape[-1]
    embeds, states, mask, rotation = lesson.unrolled(
        [lesson.previous] * copies, draft.visible(copies)
    )
    assert mask is not None and mask.visible.shape == (copies * length, copies * length)
    each = lesson.mask.repeat(1, 1, copies, copies)
    each = each.masked_fill(~mask.visible, torch.finfo(each.dtype).min)
    found, expected = (draft(embeds, states, one, rotation) for one in (mask, each))
    real = torch.ones(4, length, dtype=torch.bool)
    real[:, : lesson.real.shape[1]] = lesson.real
    real = real.repeat(1, copies)
    torch.testing.assert_close(found[real], expected[real])


def test_heads_that_do_not_attend_get_neither_mask_nor_copies() -> None:
    target = tiny_target()
    images = tiny_codes().holdout([0, 1])
    lesson = teach(target, images.captions, images.tokens, torch.tensor([False, False]))
    heads, read = tiny_medusa(target), []
    heads.register_forward_pre_hook(lambda _, given: read.append(given))
    imitation(heads, target, images)
    assert [given is None for given in read[0]] == [True, False, True, True]
    assert read[0][1].shape[1] == lesson.hidden.shape[1]


@pytest.mark.parametrize(
    ("kind", "make"), [(ParallelModel, tiny_parallel), (MedusaModel, tiny_medusa)]
)
def test_a_draft_network_of_ones_own_is_decoded_by_the_draft_model_that_it_names(
    kind: Any, make: Any
) -> None:
    """The same weights in a class that nobody knows."""
    target = tiny_target()
    captions = tiny_codes().holdout([0, 1, 2]).captions
    names = dict(vars(inspect.getmodule(kind)))
    exec(inspect.getsource(kind).replace(f"class {kind.__name__}", "class Mine"), names)
    draft = make(target)
    own = names["Mine"](draft.config)
    own.load_state_dict(draft.state_dict())
    found, expected = (decoded(one, target, captions, 3) for one in (own, draft))
    assert found.tokens.equal(expected.tokens)
    assert found.trace.rounds.equal(expected.trace.rounds)


def test_a_draft_network_without_a_draft_model_is_refused_before_training() -> None:
    class Nameless(DraftNetwork):
        layers = ()

    with pytest.raises(TemperaError, match="Nameless does not say how to draft with it"):
        draft_to_train(Nameless, tiny_target(), "tiny", None, ())


def test_decodes_of_a_validation_leave_nothing_to_the_garbage_collector() -> None:
    target = tiny_target()
    draft, captions = tiny_parallel(target), tiny_codes().holdout([0, 1]).captions
    gc.disable()
    try:
        with LiveBytes() as meter:
            accepted_length(decoded(draft, target, captions, 2))
            kept = meter.live  # the target keeps its cache
            accepted_length(decoded(draft, target, captions, 2))
            assert meter.live == kept
    finally:
        gc.enable()
