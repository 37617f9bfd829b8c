"""Short tapes do what the recorded steps do, to the bit."""

import random

import numpy as np
import pytest
import torch
from operations import Operations

from tempera.decoding.tape import TapeRecorder
from tempera.decoding.timing import no_clock


def recorded(step, *carried):
    return TapeRecorder().record(step, None, carried)


def replayed(tape):
    """The names of the operations of a replay; the first one makes constants as well."""
    with Operations() as ran:
        tape.replay(no_clock)
    return ran.names


def test_constants_are_made_once_and_what_is_written_to_in_every_replay():
    x, seen = torch.ones(3), torch.zeros(3)

    def step(clock):
        odd = torch.arange(3) * 2 + torch.ones_like(x)
        own = torch.full((3,), 10.0)
        own.scatter_add_(0, torch.arange(3), x)
        seen.copy_(odd + own)
        x.add_(1)

    tape = recorded(step, x)
    for turn in range(2, 5):
        names = replayed(tape)
        assert seen.tolist() == [11 + turn, 13 + turn, 15 + turn]
        assert turn == 2 or names == ["fill_", "scatter_add_", "add", "add_"]


def test_random_numbers_are_no_constants():
    seen, replays = torch.zeros(4), []
    with torch.inference_mode():  # elsewhere PyTorch takes `rand` apart
        tape = recorded(lambda clock: seen.copy_(torch.rand(4)))
    for _ in range(2):
        tape.replay(no_clock)
        replays.append(seen.tolist())
    assert replays[0] != replays[1]


@pytest.mark.parametrize("carried", [True, False])
def test_memory_that_is_not_carried_holds_constants(carried):
    x, table, seen = torch.ones(3), torch.arange(3.0), torch.zeros(3)
    tape = recorded(lambda clock: seen.copy_(x * (table + 1)), x, *[table] * carried)
    replayed(tape)
    table += 10
    assert replayed(tape) == (["add"] if carried else []) + ["mul"]
    assert seen.tolist() == ([11, 12, 13] if carried else [1, 2, 3])


def test_what_a_step_writes_to_is_no_constant():
    count, seen = torch.zeros(2), torch.zeros(2)

    def step(clock):
        seen.copy_(count * 2)
        count.add_(1)

    tape = recorded(step)
    for turn in range(1, 4):
        tape.replay(no_clock)
        assert seen.tolist() == [2 * turn] * 2


def test_an_operation_that_repeats_another_is_left_out():
    x, seen = torch.arange(4.0), torch.zeros(2, 4)

    def step(clock):
        first, second = x.sin() + 1, x.sin() + 1
        seen.copy_(torch.stack([first, second * 2]))

    tape = recorded(step, x)
    replayed(tape)
    x += 1
    assert replayed(tape).count("sin") == 1
    assert seen.equal(torch.stack([x.sin() + 1, (x.sin() + 1) * 2]))


def test_what_is_written_to_is_not_shared():
    """Neither memory that the step made nor other memory; nor are random numbers."""
    x, seen = torch.ones(3), torch.zeros(6, 3)

    def step(clock):
        first, second = torch.zeros(3), torch.zeros(3)
        first.add_(x)
        before = first * 2
        first.add_(1)
        one = x * 3
        x.add_(1)
        seen.copy_(torch.stack([first, second, before, first * 2, one, x * 3]))

    tape = recorded(step, x)
    tape.replay(no_clock)
    assert seen[:, 0].tolist() == [3, 0, 4, 6, 6, 9]
    with torch.inference_mode():
        tape = recorded(lambda clock: seen[:2].copy_(torch.stack([torch.rand(3), torch.rand(3)])))
    tape.replay(no_clock)
    assert not seen[0].equal(seen[1])


def test_what_nothing_reads_is_left_out():
    x, seen = torch.ones(3), torch.zeros(3)

    def step(clock):
        _ = (x + 1).exp().cumsum(0)
        torch.zeros(3).add_(x)
        own = x * 2
        own.add_(5)
        seen.copy_(own.neg())

    tape = recorded(step, x)
    replayed(tape)
    x += 1
    assert replayed(tape) == ["mul", "add_", "neg"] and seen.tolist() == [-9, -9, -9]


def test_what_is_copied_to_other_memory_is_made_there():
    """Unless that is still read, or a part of the result is copied."""
    x, y, part, whole = torch.arange(4.0), torch.zeros(4), torch.zeros(2), torch.zeros(4)

    def step(clock):
        result = x + 1
        y.copy_(result)
        half = (x * 2)[:2]
        part.copy_(half)
        fresh = y * 3
        x.copy_(fresh + x)  # reads what it is written to
        whole.copy_(fresh)

    tape = recorded(step, x, y)
    replayed(tape)
    before = x.clone()
    names = replayed(tape)
    assert names.count("copy_") == 2 and names.index("mul") > names.index("add")
    assert y.equal(before + 1) and part.equal(before[:2] * 2)
    assert whole.equal(3 * y) and x.equal(3 * y + before)


def test_memory_that_is_read_before_its_copy_keeps_its_numbers_until_then():
    x, old, seen = torch.ones(2), torch.zeros(2), torch.zeros(2)

    def step(clock):
        new = x * 2
        seen.copy_(old + new)
        old.copy_(new)
        x.add_(1)

    tape = recorded(step, x, old, seen)
    found = []
    for _ in range(2):
        tape.replay(no_clock)
        found.append(seen.tolist())
    assert found == [[6, 6], [10, 10]]


def test_memory_that_is_written_to_after_a_copy_does_not_hold_what_was_copied():
    x, kept, seen = torch.ones(2), torch.zeros(2), torch.zeros(2)

    def step(clock):
        result = x * 2
        kept.copy_(result)
        kept.add_(1)
        seen.copy_(result + kept)

    tape = recorded(step, x, kept, seen)
    tape.replay(no_clock)
    assert seen.tolist() == [5, 5]


def test_what_was_copied_may_change_afterwards():
    x, kept, seen = torch.ones(2), torch.zeros(2), torch.zeros(2)

    def step(clock):
        result = x * 2
        kept.copy_(result)
        result.add_(1)
        seen.copy_(result)

    tape = recorded(step, x, kept, seen)
    tape.replay(no_clock)
    assert kept.tolist() == [2, 2] and seen.tolist() == [3, 3]


def test_what_is_copied_to_two_memories_is_in_both():
    x, first, second = torch.ones(2), torch.zeros(2), torch.zeros(2)

    def step(clock):
        result = x * 2
        first.copy_(result)
        second.copy_(result)

    tape = recorded(step, x, first, second)
    x += 1
    tape.replay(no_clock)
    assert first.tolist() == second.tolist() == [4, 4]


def test_a_copy_that_converts_or_transposes_stays():
    x, whole, turned = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)

    def step(clock):
        whole.copy_(x * 9)
        turned.copy_((x + 1).t())

    tape = recorded(step, x, whole, turned)
    x += 1
    tape.replay(no_clock)
    assert whole.equal((x * 9).int()) and turned.equal((x + 1).t())


def test_a_part_of_other_memory_is_not_made_in_place():
    x, whole = torch.ones(2), torch.zeros(4)
    tape = recorded(lambda clock: whole[1:3].copy_(x * 2), x, whole)
    x += 1
    tape.replay(no_clock)
    assert whole.tolist() == [0, 4, 4, 0]


def test_tensors_of_the_same_memory_are_seen_to_share_it():
    numbers = np.zeros(2, dtype=np.float32)
    x, kept = torch.ones(2), torch.zeros(2)
    first, second = torch.from_numpy(numbers), torch.from_numpy(numbers)

    def step(clock):
        result = x * 2
        kept.copy_(first)
        second.copy_(result)
        kept.add_(first)

    tape = recorded(step, x, kept)
    numbers[:] = 5
    tape.replay(no_clock)
    assert kept.tolist() == [7, 7]


OPERATIONS = {
    "add": lambda x, y, kept: x + y,
    "double": lambda x, y, kept: x * 2,
    "roll": lambda x, y, kept: x.roll(1),
    "where": lambda x, y, kept: torch.where(x > 0, x, y),
    "fill": lambda x, y, kept: x.masked_fill(y > 0.5, 0.25),
    "stack": lambda x, y, kept: torch.stack([x, y])[1],
    "cat": lambda x, y, kept: torch.cat([x[:2], y[2:]]),
    "zeros": lambda x, y, kept: torch.zeros(4),
    "transpose": lambda x, y, kept: x.view(2, 2).t().reshape(4).tanh(),
    "in place": lambda x, y, kept: x.add_(y.clamp(-1, 1)),
    "keep": lambda x, y, kept: kept.copy_(x),
    "read": lambda x, y, kept: kept,
}


@pytest.mark.parametrize("seed", range(100))
def test_random_steps_are_repeated_to_the_bit(seed):
    """Steps that make, change and keep tensors in any order; the tape's own memory is spoilt before
    each replay.
    """
    chance = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    given = [torch.randn(4, generator=numbers) for _ in range(2)]
    kept = [torch.randn(4, generator=numbers) for _ in range(3)]
    table = torch.arange(4.0) / 3
    plan = [
        (chance.choice([*OPERATIONS]), chance.random(), chance.random(), chance.choice(kept))
        for _ in range(chance.randint(5, 25))
    ]

    def step(clock):
        values = [*given, table.clone() if seed % 3 else table]
        for name, left, right, memory in plan:
            x, y = (values[int(place * len(values))] for place in (left, right))
            values.append(OPERATIONS[name](x, y, memory))
        for memory, value in zip(kept[:2], values[-2:], strict=True):
            memory.copy_(value.clamp(-3, 3))
        values[len(values) // 2].add_(0.5)
        for memory in (*given, kept[2]):
            memory.clamp_(-3, 3)

    recorder, carried = TapeRecorder(), [*given, *kept]
    start = [memory.clone() for memory in [*carried, table]]
    with torch.inference_mode(seed % 2 == 0):
        tape = recorder.record(step, None, carried)
        ends = []
        for play in (lambda: step(no_clock), lambda: tape.replay(no_clock)):
            for memory, number in zip([*carried, table], start, strict=True):
                memory.copy_(number)
            for _ in range(3):
                recorder._memory.fill_(0xFF)
                play()
            ends.append([memory.clone() for memory in carried])
    assert all(map(torch.equal, *ends))
