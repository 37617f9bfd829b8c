"""A tape calls other functions than the recorded ones, with the same results to the bit."""

import pytest
import torch
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.tape import TapeRecorder
from tempera.decoding.tape_calling import _INSTEAD, _NUMBERS, bound
from tempera.decoding.timing import no_clock


def test_an_operation_is_called_by_a_name_that_chooses_the_same_one():
    """Where Python would choose another overload, or has no such function, the operation itself is
    called.
    """
    x, one = torch.arange(3), torch.tensor(1)
    calls = [
        (torch.ops.aten.mul.out, [x, x], {"out": torch.empty_like(x)}, True),
        (torch.ops.aten.add_.Tensor, [x, one], {}, True),
        (torch.ops.aten.clamp.Tensor_out, [x, None, one], {"out": torch.empty_like(x)}, True),
        (torch.ops.aten.clamp.out, [x, None, 1], {"out": torch.empty_like(x)}, True),
        (torch.ops.aten.index.Tensor_out, [x, [one]], {"out": torch.empty(())}, False),
        (torch.ops.aten.mul.Scalar_out, [x, 2], {"out": torch.empty_like(x)}, False),
    ]
    for function, args, kwargs, has_name in calls:
        call = bound(function, args, kwargs)
        assert (call.func is not function._op) == has_name, function
    assert x.tolist() == [0, 1, 2], "finding the name runs nothing"


X, COUNTS = torch.tensor([[1.5, -2.0, torch.nan], [0.0, 4.0, 9.0]]), torch.tensor([3, 0, -7])
FLAGS = X > 0
STEPS = {
    "where.self_out": [
        lambda: X.masked_fill(FLAGS, 2.5),
        lambda: COUNTS.masked_fill(FLAGS[0], -1),
        lambda: torch.where(FLAGS, X, 7),
        lambda: torch.where(FLAGS, 7, X),
        lambda: torch.where(FLAGS, 1, 0),
        lambda: torch.where(FLAGS[0], COUNTS, 0.5),
        lambda: torch.where(FLAGS[0], 2, COUNTS.to(torch.int8)),
    ],
    "copy_.default": [
        lambda: FLAGS.float(),
        lambda: X.double(),
        lambda: X.to(torch.bfloat16),
        lambda: X.t().clone(),
    ],
    "sub.out": [lambda: 10 - COUNTS, lambda: torch.rsub(X, 1.5)],
    "ne.Tensor_out": [lambda: X.isnan()],
    "sum.IntList_out": [lambda: COUNTS.sum(), lambda: X[1].sum(), lambda: FLAGS.sum()],
    "index_select.out": [
        lambda: embedding(COUNTS[:2].view(1, 2), X.repeat(2, 1)),
        lambda: embedding(COUNTS[1], X),
    ],
    "bitwise_and.Tensor_out": [lambda: FLAGS & FLAGS.flip(0)],
    "bitwise_or.Tensor_out": [lambda: FLAGS.__or__(FLAGS.flip(0))],
    "bitwise_xor.Tensor_out": [lambda: FLAGS ^ FLAGS.flip(0)],
    "fill_.Scalar": [
        lambda: torch.zeros(3).add_(X[0]),
        lambda: torch.ones(3).add_(X[0]),
        lambda: torch.full((3,), 2.5).add_(X[0]),
        lambda: X.new_zeros(3).add_(X[0]),
        lambda: X.new_ones(3).add_(X[0]),
        lambda: X.new_full((3,), -torch.inf).add_(X[0]),
        lambda: torch.zeros_like(X).add_(X),
        lambda: torch.ones_like(COUNTS).add_(COUNTS),
        lambda: torch.full_like(X, 3).add_(X),
    ],
    **{
        f"{called}.Tensor_out": [
            lambda name=name, x=x, other=other: getattr(x, name)(other)
            for name in names
            for x, other in ((X, 0), (X, 1.5), (X, 0.1), (COUNTS, 3), (X, X.flip(1)))
        ]
        for called, names in (
            ("eq", ["eq"]),
            ("ne", ["ne"]),
            ("lt", ["lt", "gt"]),
            ("le", ["le", "ge"]),
        )
    },
    **{
        f"{name}.out": [
            lambda name=name, x=x, number=number: getattr(x, name)(number)
            for x, number in ((X, 0), (X, 1.5), (X, 0.1), (X, 1e30), (COUNTS, 3))
        ]
        for name in ("add", "sub", "mul", "div")
    },
}
"""Steps by the operation that their tapes call."""

AS_THEY_ARE = [
    lambda: torch.rsub(COUNTS, 10, alpha=3),
    lambda: embedding((COUNTS % 2)[::2], X),
    lambda: COUNTS & 1,
    *[
        lambda name=name, number=number: getattr(COUNTS, name)(number)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "div")
        for number in (2.0, 0.5)
    ],
    lambda: torch.sub(1, X),
    lambda: torch.mul(2.0, X),
    lambda: torch.div(1, COUNTS),
    lambda: X.to(torch.bfloat16) * 0.1,
    lambda: torch.add(COUNTS, 2, alpha=3),
    lambda: COUNTS.roll(1) * 2,
    lambda: X.sort(stable=True).values + 1,
]
"""Steps with operations, or with numbers, that nothing stands for."""


class Ran(TorchDispatchMode):
    """Notes which operations run, and which of them are given a number as the second argument."""

    def __init__(self):
        super().__init__()
        self.names, self.numbers = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).removeprefix("aten."))
        if len(args) > 1 and isinstance(args[1], int | float):
            self.numbers.append(self.names[-1])
        return function(*args, **(kwargs or {}))


def check_repeated(step, mode):
    """Check that a tape repeats a step to the bit -> what ran."""
    expected = step()
    kept = torch.empty(2, *expected.shape, dtype=expected.dtype)
    with mode():  # a part of a storage, so that nothing is made there
        tape = TapeRecorder().record(
            lambda clock: kept[1].copy_(step().contiguous()), None, [X, COUNTS, FLAGS]
        )
    tape.replay(no_clock)
    kept.zero_()
    with Ran() as ran:
        tape.replay(no_clock)
    assert kept.dtype == expected.dtype
    torch.testing.assert_close(kept[1], expected, rtol=0, atol=0, equal_nan=True)
    return ran


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "steps"), STEPS.items(), ids=[*STEPS])
def test_what_is_called_instead_gives_the_same(name, steps, mode):
    for step in steps:
        ran = check_repeated(step, mode)
        assert name in ran.names[:-1], ran.names  # the last one is the test's own copy
        assert not {str(one).removeprefix("aten.") for one in _INSTEAD}.intersection(ran.names)
        assert not _NUMBERS.intersection(one.split(".")[0] for one in ran.numbers), ran.numbers


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("step", AS_THEY_ARE)
def test_what_nothing_stands_for_is_called_as_it_is(step, mode):
    check_repeated(step, mode)
