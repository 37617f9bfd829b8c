"""Rounds that a tape replays on a CPU emit what played rounds emit, to the bit."""

import numpy as np
import pytest
import torch
from cases import slow_but
from static_rounds import (
    BATCHES,
    CASES,
    Counting,
    Curious,
    Forgetful,
    check_same,
    eagle,
    images,
    made,
)
from tiny_networks import LENGTH, PROMPTS, TREE, llamagen, tiny_eagle, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.round_graph import RoundGraphs
from tempera.decoding.tape import TapeRecorder
from tempera.decoding.timing import Clock, no_clock
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules import neighbourhood
from tempera.rules.standard import Exact
from tempera.runtime.processor import computes_bfloat16
from tempera.targets import frozen_linear
from tempera.targets.frozen_linear import PackedLinear
from tempera.targets.kv_cache import RowCache


class Spoilt(TapeRecorder):
    """A recorder every replay of whose tapes finds their memory spoilt."""

    warm_up = 2

    def __init__(self):
        super().__init__()
        self.tapes, self.replayed = [], 0

    def record(self, step, before, carried):
        tape = super().record(step, before, carried)
        self.tapes.append(tape)
        if tape is not None:
            replay = tape.replay
            tape.replay = lambda clock: self.spoil() or replay(clock)
        return tape

    def spoil(self):
        self.replayed += 1
        self._memory.fill_(0xFF)


@pytest.mark.parametrize("granularity", [64, 4])
@pytest.mark.parametrize("name", slow_but(CASES, "coolsd"))
def test_tapes_emit_what_played_rounds_emit(name, granularity, monkeypatch):
    """Tokens and trace to the bit, over batches whose prompts have other padding and whose rows end
    in different rounds, while the number of keys grows.
    """
    make, rule = CASES[name]
    monkeypatch.setattr(neighbourhood, "_drafted", neighbourhood._vocabulary)
    target = made(granularity)
    drafter, recorder = make(target), Spoilt()
    graphs = RoundGraphs(recorder)
    for seed, prompts in enumerate([*BATCHES, *BATCHES]):
        options = {"diagnostics": True}
        expected = images(target, drafter, rule, prompts, seed, **options)
        check_same(images(target, drafter, rule, prompts, seed, graphs=graphs, **options), expected)
    assert recorder.tapes and None not in recorder.tapes
    assert recorder.replayed > LENGTH / (1 + drafter.depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounds_with_packed_weights_are_recorded(dtype, monkeypatch):
    if dtype == torch.bfloat16 and not computes_bfloat16(torch.device("cpu")):
        pytest.skip("this processor does not multiply bfloat16 numbers")
    monkeypatch.setattr(frozen_linear, "SMALL", 1)
    target = tiny_target(Sampling(3.0), network=llamagen().to(dtype))
    target.fuse()
    assert any(isinstance(one, PackedLinear) for one in target.network.modules())
    drafter, recorder = eagle(target), Spoilt()
    graphs = RoundGraphs(recorder)
    for seed, prompts in enumerate(BATCHES):
        expected = images(target, drafter, Exact(), prompts, seed)
        check_same(images(target, drafter, Exact(), prompts, seed, graphs=graphs), expected)
    assert recorder.replayed


def test_a_round_that_reads_is_played():
    target, recorder = made(), Spoilt()
    drafter = StaticTreeDrafter(Curious(tiny_eagle(target), target), Tree.chain(3))
    graphs = RoundGraphs(recorder)
    for seed, prompts in enumerate(BATCHES):
        expected = images(target, drafter, Exact(), prompts, seed)
        check_same(images(target, drafter, Exact(), prompts, seed, graphs=graphs), expected)
    assert set(recorder.tapes) == {None} and not recorder.replayed


@pytest.mark.parametrize("name", ["ar", "jacobi"])
def test_progress_and_streams_are_those_of_played_rounds(name):
    """No round runs after the last one, and the first may take more draws than the others."""
    make, rule = CASES[name]
    target, seen, streams = made(), ([], []), [RandomStreams(0, PROMPTS) for _ in range(2)]
    drafter = make(target)
    for told, one, given in zip(seen, streams, (None, RoundGraphs(Spoilt())), strict=True):
        for _ in range(2):
            note = lambda *now, told=told: told.append(now)  # noqa: E731
            decode(target, drafter, rule, one, PROMPTS, progress=note, graphs=given)
    assert seen[0] == seen[1] and streams[0].next(5).equal(streams[1].next(5))


def test_plain_decoding_and_a_method_take_turns_without_recording_anew():
    target, recorder, counts = made(granularity=4), Spoilt(), []
    graphs, methods = RoundGraphs(recorder), [(NoDraft(), Exact()), (eagle(target, TREE), Exact())]
    for _ in range(8):
        for drafter, rule in methods:
            images(target, drafter, rule, PROMPTS, graphs=graphs)
        counts.append(len(recorder.tapes))
    assert counts[0] > 2 and counts[-1] == counts[-2] == counts[-3]


def test_parts_of_replayed_rounds_are_timed():
    target, recorder = made(), Spoilt()
    drafter = eagle(target)
    graphs, clock = RoundGraphs(recorder), Clock()
    images(target, drafter, Exact(), PROMPTS, graphs=graphs)
    before = recorder.replayed
    played = images(target, drafter, Exact(), PROMPTS)
    check_same(images(target, drafter, Exact(), PROMPTS, graphs=graphs, clock=clock), played)
    assert recorder.replayed > before
    assert clock.seconds.keys() == {"draft", "target", "verify", "commit"}


def taped(step, *carried):
    """A tape of a step, which runs once before and twice while it is recorded."""
    recorder = TapeRecorder()
    recorder.run(step, no_clock)
    tape = recorder.record(step, None, carried)
    assert tape is None or not tape.confirmed
    tape = tape and recorder.record(step, tape, carried)
    assert tape is None or tape.confirmed
    return tape


def test_results_lie_where_the_recorded_ones_lay_and_views_follow():
    x, y = torch.arange(6.0), torch.zeros(3, 2)

    def step(clock):
        square = x * x
        first, second = square.view(2, 3).unbind()
        y.copy_(torch.stack([first, second + 1], 1))

    tape = taped(step, x)
    x += 1
    tape.replay(no_clock)
    assert y.tolist() == [[1, 17], [4, 26], [9, 37]]


def test_memory_is_shared_by_tensors_that_do_not_live_at_the_same_time():
    x = torch.ones(1000)

    def step(clock):
        y = x
        for _ in range(10):
            y = y + 1
        x.copy_(y)

    recorder = TapeRecorder()
    recorder.record(step, None, [x]).replay(no_clock)
    assert x.eq(21).all() and recorder._memory.nbytes() == 2 * 4032  # 4000 in steps of 64


def test_operations_on_the_same_memory_keep_their_order():
    """Blank memory, in-place operations, results without a variant that writes, and constants."""
    x, seen = torch.arange(4.0), torch.zeros(4)

    def step(clock):
        blank = torch.empty(4)
        blank.fill_(2.0)
        blank.add_(x).mul_(torch.full((4,), 3.0))
        seen.copy_(blank.roll(1) + torch.arange(4))

    recorder = Spoilt()
    tape = recorder.record(step, None, [x])
    x.zero_()
    tape.replay(no_clock)
    assert seen.tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("kind", [Forgetful, Counting])
def test_a_round_that_is_not_static_is_played(kind):
    """Its two recordings differ."""
    target, recorder = made(), Spoilt()
    drafter = StaticTreeDrafter(kind(tiny_eagle(target), target), Tree.chain(3))
    graphs = RoundGraphs(recorder)
    for seed, prompts in enumerate(BATCHES):
        expected = images(target, drafter, Exact(), prompts, seed)
        drafter.model.turn = 0
        check_same(images(target, drafter, Exact(), prompts, seed, graphs=graphs), expected)
        drafter.model.turn = 0
    assert recorder.tapes[-1] is None and not recorder.replayed


@pytest.mark.parametrize(
    "change",
    [
        lambda x, turn: x.add_(turn),
        lambda x, turn: x.add_(torch.full((3,), float(turn))),
        lambda x, turn: x.add_(torch.tensor([float(turn)] * 3)),
        lambda x, turn: x.copy_(x.roll(turn)),
        lambda x, turn: x[: turn % 3].add_(1),
    ],
)
def test_a_step_with_a_python_value_that_changes_has_no_tape(change):
    turns, x = [], torch.arange(3.0)
    assert taped(lambda clock: turns.append(0) or change(x, len(turns))) is None


@pytest.mark.parametrize(
    "reading",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: x.numpy().sum(),
        lambda x: np.asarray(x),
    ],
)
def test_a_step_that_reads_numbers_has_no_tape(reading):
    x = torch.arange(4.0)
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            assert taped(lambda clock: reading(x)) is None
    places = torch.tensor([1, 2])
    assert taped(lambda clock: x[places] + torch.nan) is not None


def test_a_released_cache_is_freed_although_a_tape_refers_to_it():
    cache = RowCache(1, 1, 2, 4, 16, dtype=torch.float32, device=torch.device("cpu"))
    storage = cache.storage.untyped_storage()
    tape = taped(lambda clock: cache.storage.add_(1))
    cache.release()
    assert tape is not None and storage.nbytes() == 0
