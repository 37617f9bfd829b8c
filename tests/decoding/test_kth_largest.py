import pytest
import torch

from tempera.decoding.kth_largest import FEW, kth_largest
from tempera.decoding.probabilities import Sampling
from tempera.decoding.tape import TapeRecorder
from tempera.decoding.timing import no_clock

LARGE, SMALL = (2, FEW // 2), (3, 40)


def by_sorting(x, k):
    return x.sort(-1, descending=True).values[..., k - 1 : k]


def rounded(*shape):
    """Numbers of which many are equal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("k", [1, 2, 17, 40])
def test_it_is_what_sorting_finds(shape, k):
    x = rounded(*shape)
    assert kth_largest(x, k).equal(by_sorting(x, k))
    assert kth_largest(x.unsqueeze(1), k).equal(by_sorting(x, k).unsqueeze(1))
    assert kth_largest(x.t().contiguous().t(), k).equal(by_sorting(x, k))
    assert kth_largest(x, shape[1]).equal(x.amin(-1, keepdim=True))


@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_minus_infinity_is_smallest(shape):
    x = rounded(*shape)
    x[1, 5:] = -torch.inf
    assert kth_largest(x, 5)[1].equal(x[1, :5].amin(-1, keepdim=True))
    assert kth_largest(x, 6)[1].equal(torch.tensor([-torch.inf]))


@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_top_k_passes_gradients_to_what_it_keeps(shape):
    logits = rounded(*shape).requires_grad_()
    p = Sampling(1.0, top_k=3).distribution(logits)
    p.square().sum().backward()
    kept = logits >= by_sorting(logits, 3)
    assert (p > 0).equal(kept)
    assert (logits.grad[~kept] == 0).all()
    assert (logits.grad[kept] != 0).any()


@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_top_k_is_the_softmax_of_what_it_keeps(shape):
    logits = rounded(*shape) * 1e4
    logits[0, ::2] = -torch.inf
    logits[1, ::3] = torch.finfo(torch.float32).min
    kth = by_sorting(logits, 9)
    expected = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
    assert Sampling(1.0, top_k=9).distribution(logits).equal(expected)


def test_a_row_with_nan_is_nan_under_top_k():
    for shape in (LARGE, SMALL):
        logits = rounded(*shape)
        logits[0, 1] = torch.nan
        p = Sampling(1.0, top_k=4).distribution(logits)
        assert p[0].isnan().all()
        assert not p[1].isnan().any()


def test_a_tape_repeats_it():
    x, found = rounded(*LARGE), torch.zeros(2, 1)

    def step(clock):
        found.copy_(kth_largest(x * 2, 7))

    recorder = TapeRecorder()
    tape = recorder.record(step, recorder.record(step, None, [x]), [x])
    assert tape.confirmed
    x.neg_()
    tape.replay(no_clock)
    assert "kth_largest" in [call.name for call in tape._calls]
    assert found.equal(by_sorting(x * 2, 7))


def test_the_compiler_takes_it_as_one_operation():
    x = rounded(*LARGE)
    compiled = torch.compile(lambda x: kth_largest(x, 5) + 1, backend="eager", fullgraph=True)
    assert compiled(x).equal(by_sorting(x, 5) + 1)
