"""A whole round recorded and replayed emits what played rounds emit. `cuda_stand_in.Tape` stands in
for a CUDA graph: it repeats operations on the recording's memory, without the code that made them.
"""

import copy
import gc
import weakref
from functools import partial

import pytest
import static_rounds
import torch
from cases import slow_but
from cuda_stand_in import StandInRecorder
from static_rounds import (
    BATCHES,
    CASES,
    CHAIN,
    COOL,
    Counting,
    Curious,
    Forgetful,
    check_same,
    eagle,
    images,
)
from tiny_networks import (
    LENGTH,
    PROMPTS,
    tiny_eagle,
)

from tempera.decoding import round_graph
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.replay import DraftLog, RecordedDrafter
from tempera.decoding.round_graph import BatchSize, RoundGraphs
from tempera.decoding.timing import Clock, no_clock
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import NaNProbabilities
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.rules import neighbourhood
from tempera.rules.standard import Exact
from tempera.targets import session
from tempera.targets.frozen_linear import ColumnLinear


@pytest.fixture(autouse=True)
def _steps_as_they_are(monkeypatch):
    """Compiled sessions do without a compiler."""
    monkeypatch.setattr(session, "compile_step", lambda function: function)


made = partial(static_rounds.made, compiled=True)


class SizedGraphs(RoundGraphs):
    """Notes the sizes of the batches."""

    def __init__(self, recorder):
        super().__init__(recorder)
        self.sizes = []

    def play(self, one_round, read, parts, owners, size, clock):
        self.sizes.append(size)
        return super().play(one_round, read, parts, owners, size, clock)


def test_before_the_first_round_no_row_has_tokens(monkeypatch):
    target, asked = made(), []
    expect = target.expect
    monkeypatch.setattr(target, "expect", lambda longest: asked.append(longest) or expect(longest))
    images(target, eagle(target), Exact(), PROMPTS, graphs=RoundGraphs(StandInRecorder()))
    assert asked[0] == 0 < asked[1] and asked == sorted(asked)


@pytest.mark.parametrize("name", slow_but(CASES, "coolsd"))
def test_replayed_rounds_emit_what_played_ones_emit(name, monkeypatch):
    """Tokens and trace to the bit, over batches whose prompts have other padding and whose rows end
    in different rounds; and the recorded round reads nothing.
    """
    make, rule = CASES[name]
    # rounds are recorded on GPUs, where tokens that q can draw are not counted
    monkeypatch.setattr(neighbourhood, "_drafted", neighbourhood._vocabulary)
    target = made()
    drafter, recorder, spread = make(target), StandInRecorder(), set()
    graphs = SizedGraphs(recorder)
    for seed, prompts in enumerate(BATCHES):
        expected = images(target, drafter, rule, prompts, seed, diagnostics=True)
        options = {"diagnostics": True, "graphs": graphs}
        check_same(images(target, drafter, rule, prompts, seed, **options), expected)
        spread.add(int(expected.trace.rounds.max() - expected.trace.rounds.min()))
    assert graphs.sizes == [BatchSize(len(batch), LENGTH, drafter.depth + 1) for batch in BATCHES]
    assert recorder.played == len(BATCHES) + recorder.warm_up
    assert len(recorder.tapes) == 1 and recorder.replayed > 2 * LENGTH / (1 + drafter.depth)
    assert not recorder.tapes[0].count, "the recorded round reads, or makes what data decides"
    assert max(spread) > 0 or name == "ar"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coolsd", "eagle tree", "independent"])
def test_each_batch_size_has_its_recording(name):
    make, rule = CASES[name]
    target = made()
    drafter, recorder = make(target), StandInRecorder()
    graphs = RoundGraphs(recorder)
    for size in (1, 4, 2, 1):
        prompts = PROMPTS[:size]
        played = images(target, drafter, rule, prompts, size)
        check_same(images(target, drafter, rule, prompts, size, graphs=graphs), played)
    assert len(recorder.tapes) == 4, "the cache is made anew when the batch size changes"


@pytest.mark.slow
def test_prompts_without_padding_have_their_recording():
    target = made()
    drafter, recorder = eagle(target), StandInRecorder()
    graphs = RoundGraphs(recorder)
    for prompts in (["aaaaa", "bb"], ["aaaaa", "bbbbb"], ["ccccc", "d"], ["aaaaa", "ccccc"]):
        played = images(target, drafter, COOL, prompts)
        check_same(images(target, drafter, COOL, prompts, graphs=graphs), played)
    assert len(recorder.tapes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rounds_of_all_batches_are_the_same_operations_on_the_same_memory(name):
    """Two recordings of different batches have the same operations, constants, shapes and
    addresses. So a round reads and leaves static memory only.
    """
    make, rule = CASES[name]
    target = made()
    drafter, recorder = make(target), StandInRecorder()
    graphs = RoundGraphs(recorder)
    for seed, one in enumerate([rule, copy.copy(rule)]):
        images(target, drafter, one, BATCHES[seed], seed, graphs=graphs)
    first, second = recorder.tapes
    assert len(first.calls) > 50 and first.script() == second.script()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ar", "eagle", "eagle tree", "parallel"])
def test_the_number_of_keys_grows_twice_in_an_image(name):
    """Each number of keys has its recording. They are summed in another order, so log-probabilities
    are those of played rounds up to rounding.
    """
    make, rule = CASES[name]
    target = made(granularity=4)
    drafter, recorder = make(target), StandInRecorder()
    graphs = RoundGraphs(recorder)
    for seed, prompts in enumerate(BATCHES):
        expected = images(target, drafter, rule, prompts, seed)
        found = images(target, drafter, rule, prompts, seed, graphs=graphs)
        assert found.tokens.equal(expected.tokens)
        torch.testing.assert_close(found.trace.logprob, expected.trace.logprob)
    assert len(recorder.tapes) == session.THIRDS
    assert len({len(one.calls) for one in recorder.tapes}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Forgetful, Counting, Curious])
def test_the_checks_find_a_round_that_is_not_static(kind):
    target, recorder = made(), StandInRecorder()
    drafter = StaticTreeDrafter(kind(tiny_eagle(target), target), CHAIN)
    graphs, differ = RoundGraphs(recorder), False
    for seed, (prompts, one) in enumerate(
        zip(BATCHES, (Exact(), copy.copy(Exact())), strict=False)
    ):
        found = images(target, drafter, one, prompts, seed, graphs=graphs)
        drafter.model.turn = 0
        differ |= not found.tokens.equal(images(target, drafter, one, prompts, seed).tokens)
        drafter.model.turn = 0
    first, second = recorder.tapes
    if kind is Forgetful:
        assert first.script() != second.script()
    assert differ == (kind is not Curious)
    assert first.count == ({"_local_scalar_dense": 1} if kind is Curious else {})


def test_what_was_decoded_stays_and_the_streams_go_on():
    target = made()
    drafter, graphs = eagle(target), RoundGraphs(StandInRecorder())
    streams = [RandomStreams(0, PROMPTS[:2]) for _ in range(2)]
    outputs = [
        decode(target, drafter, Exact(), one, PROMPTS[:2], graphs=given)
        for one, given in zip(streams, (None, graphs), strict=True)
    ]
    images(target, drafter, Exact(), PROMPTS[2:], graphs=graphs)
    check_same(outputs[1], outputs[0])
    assert streams[0].next(5).equal(streams[1].next(5))


@pytest.mark.slow
def test_progress_is_that_of_played_rounds():
    target, seen = made(), ([], [])
    drafter, graphs = eagle(target), RoundGraphs(StandInRecorder())
    for told, given in zip(seen, (None, graphs), strict=True):
        images(
            target,
            drafter,
            Exact(),
            PROMPTS[:2],
            graphs=given,
            progress=lambda *now, told=told: told.append(now),
        )
    assert seen[0] == seen[1] and seen[0][-1][1] == 2 * LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_in_a_replayed_round_is_reported_with_its_prompt(who):
    """The host learns of it when the next round is under way."""
    target = made()
    drafter, graphs = eagle(target), RoundGraphs(StandInRecorder())
    network = target.network.model if who == "target" else drafter.model.model
    linears = [module for module in network.modules() if isinstance(module, ColumnLinear)]
    images(target, drafter, Exact(), PROMPTS, graphs=graphs)
    rounds = []

    def spoil(number, written):
        rounds.append(number)
        if number == 5:
            linears[0].weight.fill_(torch.nan)

    with pytest.raises(NaNProbabilities, match=f"the {who} gave NaN .* prompt 'a'"):
        images(target, drafter, Exact(), PROMPTS, graphs=graphs, progress=spoil)
    assert rounds[-1] in (5, 6)


@pytest.mark.slow
def test_rounds_that_are_timed_watched_or_of_other_shapes_are_played():
    target, recorder = made(), StandInRecorder()
    drafter, graphs = eagle(target), RoundGraphs(recorder)
    images(target, drafter, Exact(), PROMPTS, graphs=graphs, clock=Clock())
    images(target, RecordedDrafter(drafter, DraftLog()), Exact(), PROMPTS, graphs=graphs)
    tables = TableTarget()
    images(tables, StaticTreeDrafter(TableDraft(tables), CHAIN), Exact(), PROMPTS, graphs=graphs)
    assert recorder.played == recorder.replayed == 0


@pytest.mark.slow
def test_the_oldest_kind_of_round_is_forgotten(monkeypatch):
    monkeypatch.setattr(round_graph, "KINDS", 1)
    target, recorder = made(), StandInRecorder()
    graphs, rules = RoundGraphs(recorder), [Exact(), Exact(), Exact()]
    for rule in (rules[0], rules[1], rules[0]):
        images(target, NoDraft(), rule, ["a"], graphs=graphs)
    assert len(recorder.tapes) == 3


def test_a_kind_of_round_that_is_never_recorded_is_forgotten_too(monkeypatch):
    monkeypatch.setattr(round_graph, "KINDS", 1)
    monkeypatch.setattr(StandInRecorder, "warm_up", 1000)
    target, graphs = made(), RoundGraphs(StandInRecorder())
    rules = [Exact(), Exact()]
    first = weakref.ref(rules[0])
    while rules:
        images(target, NoDraft(), rules.pop(0), ["a"], graphs=graphs)
    gc.collect()
    assert first() is None


def test_the_stand_in_replays_on_its_memory():
    x, recorder, made_in = torch.zeros(3), StandInRecorder(), []

    def step(clock):
        made_in.append(x + 1)
        x.copy_(made_in[0].view(3))

    recording = recorder.record(step, None, [])
    assert x.tolist() == [1, 1, 1] and len(made_in) == 1
    recording.replay(no_clock)
    recording.replay(no_clock)
    assert x.tolist() == [3, 3, 3] and len(made_in) == 1
    assert [memory.data_ptr() for memory in recorder.tapes[0].outside().values()] == [x.data_ptr()]
