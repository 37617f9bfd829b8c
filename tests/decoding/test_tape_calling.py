"""A tape calls other functions than the recorded ones, with the same results to the bit."""

import pytest
import torch
from operations import Operations
from torch.nn.functional import embedding

from tempera.decoding.tape import TapeRecorder
from tempera.decoding.tape_calling import bound
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


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (lambda: X.masked_fill(FLAGS, 2.5), {"where"}),
        (lambda: COUNTS.masked_fill(FLAGS[0], -1), {"where"}),
        (lambda: torch.where(FLAGS, X, 7), {"where"}),
        (lambda: torch.where(FLAGS, 7, X), {"where"}),
        (lambda: torch.where(FLAGS, 1, 0), {"where"}),
        (lambda: torch.where(FLAGS[0], COUNTS, 0.5), {"where"}),
        (lambda: torch.where(FLAGS[0], 2, COUNTS.to(torch.int8)), {"where"}),
        (lambda: FLAGS.float(), {"copy_"}),
        (lambda: X.double(), {"copy_"}),
        (lambda: X.to(torch.bfloat16), {"copy_"}),
        (lambda: X.t().clone(), {"copy_"}),
        (lambda: 10 - COUNTS, {"sub"}),
        (lambda: torch.rsub(X, 1.5), {"sub"}),
        (lambda: torch.rsub(COUNTS, 10, alpha=3), {"rsub"}),
        (lambda: X.isnan(), {"ne"}),
        (lambda: COUNTS.isnan(), {"ne"}),
        (lambda: COUNTS.sum(), {"sum"}),
        (lambda: X[1].sum(), {"sum"}),
        (lambda: FLAGS.sum(), {"sum"}),
        (lambda: embedding(COUNTS[:2].view(1, 2), X.repeat(2, 1)), {"index_select"}),
        (lambda: embedding((COUNTS % 2)[::2], X), {"embedding"}),
        (lambda: FLAGS & FLAGS.flip(0), {"bitwise_and"}),
        (lambda: FLAGS.__or__(FLAGS.flip(0)), {"bitwise_or"}),
        (lambda: FLAGS ^ FLAGS.flip(0), {"bitwise_xor"}),
        (lambda: COUNTS & 1, set()),
        *[
            (lambda name=name, x=x, number=number: getattr(x, name)(number), {name})
            for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "div")
            for x, number in ((X, 0), (X, 1.5), (X, 0.1), (COUNTS, 3), (COUNTS, 2.0), (COUNTS, 0.5))
        ],
        (lambda: X.to(torch.bfloat16) * 0.1, {"mul"}),
        (lambda: X + 1e30, {"add"}),
        (lambda: torch.add(COUNTS, 2, alpha=3), {"add"}),
        (lambda: torch.zeros(3).add_(X[0]), {"fill_", "add_"}),
        (lambda: torch.ones(3).add_(X[0]), {"fill_", "add_"}),
        (lambda: torch.full((3,), 2.5).add_(X[0]), {"fill_", "add_"}),
        (lambda: X.new_zeros(3).add_(X[0]), {"fill_", "add_"}),
        (lambda: X.new_ones(3).add_(X[0]), {"fill_", "add_"}),
        (lambda: X.new_full((3,), -torch.inf).add_(X[0]), {"fill_", "add_"}),
        (lambda: torch.zeros_like(X).add_(X), {"fill_", "add_"}),
        (lambda: torch.ones_like(COUNTS).add_(COUNTS), {"fill_", "add_"}),
        (lambda: torch.full_like(X, 3).add_(X), {"fill_", "add_"}),
        (lambda: COUNTS.roll(1) * 2, {"roll", "copy_", "mul"}),
        (lambda: X.sort(stable=True).values + 1, {"sort", "add"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_called_instead_gives_the_same(step, names, mode):
    expected = step()
    kept = torch.empty(2, *expected.shape, dtype=expected.dtype)
    with mode():  # a part of a storage, so that nothing is made there
        tape = TapeRecorder().record(
            lambda clock: kept[0].copy_(step().contiguous()), None, [X, COUNTS, FLAGS]
        )
    tape.replay(no_clock)
    kept.zero_()
    with Operations() as ran:
        tape.replay(no_clock)
    assert kept.dtype == expected.dtype
    torch.testing.assert_close(kept[0], expected, rtol=0, atol=0, equal_nan=True)
    assert names <= set(ran.names), ran.names
