"""Linear layers for decoding, against PyTorch's own."""

import pytest
import torch
from torch import nn

from tempera.decoding.compiled import graph_of
from tempera.targets import packed_linear
from tempera.targets.packed_linear import PackedLinear, packs


def case(dtype: torch.dtype, bias: bool, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (24, 40), (24,), (rows, 40)
    weight, b, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, b if bias else None, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pack", "bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("plain_rows", "least_packed"), [(0, 0), (2, 0), (0, 4), (1, 4)])
@torch.no_grad()
def test_products_are_those_of_a_linear_layer(
    plain_rows, least_packed, pack, bias, dtype, monkeypatch
):
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    monkeypatch.setattr(packed_linear, "faster_rows", lambda *_: (plain_rows, least_packed))
    for rows in (1, 2, 3, 4, 17):
        weight, b, x = case(dtype, bias, rows)
        if pack and not packs(weight):
            pytest.skip("oneDNN does not multiply this type here")
        layer = PackedLinear(weight, b, least_rows=1 if pack else None)
        assert (layer.packed is not None) is pack
        assert (layer.plain is not None) is (not pack or plain_rows > 0)
        expected = nn.functional.linear(x, weight, b)
        close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0}
        torch.testing.assert_close(layer(x), expected, **close)
        torch.testing.assert_close(layer(x.unsqueeze(0))[0], expected, **close)
        torch.testing.assert_close(layer(x[:, None])[:, 0], expected, **close)
        torch.testing.assert_close(layer(x[0]), expected[0], **close)


@pytest.mark.parametrize("least_packed", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_compiled_rounds_multiply_packed_weights(dtype, least_packed, monkeypatch):
    """Which product runs is timed, so that this was seen on some machines only."""
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    monkeypatch.setattr(packed_linear, "faster_rows", lambda *_: (0, least_packed))
    weight, b, x = case(dtype, True, 3)
    if not packs(weight):
        pytest.skip("oneDNN does not multiply this type here")
    layer = PackedLinear(weight, b, least_rows=1)
    assert layer.plain is None
    assert graph_of(layer.forward)(x).equal(layer(x))


@pytest.mark.parametrize(("small", "plain_rows"), [(1, 0), (1, 1), (2**18, 0)])
@torch.no_grad()
def test_a_copy_in_another_dtype_has_the_weights_rounded(small, plain_rows, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", small)
    monkeypatch.setattr(packed_linear, "faster_rows", lambda *_: (plain_rows, 0))
    weight, b, x = case(torch.float32, True, 3)
    half = nn.functional.linear(x.double(), weight.half().double(), b.half().double())
    layer = PackedLinear(weight, b, least_rows=1)
    copy = layer.to_dtype(torch.float16, 1).to_dtype(torch.float64, 1)
    torch.testing.assert_close(copy(x.double()), half)


def test_what_onednn_does_not_multiply_faster_is_not_packed():
    assert packs(torch.zeros(512, 512)) == torch.backends.mkldnn.is_available()
    assert not packs(torch.zeros(512, 511))
    assert not packs(torch.zeros(512, 512, dtype=torch.float64))
    assert not packs(torch.zeros(512, 512, device="meta"))


@pytest.fixture
def untimed(monkeypatch, tmp_path):
    """Nothing is known of any shape, before and after."""
    if not packs(torch.zeros(512, 512)):
        pytest.skip("oneDNN is not there")
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    packed_linear.faster_rows.cache_clear()
    yield
    packed_linear.faster_rows.cache_clear()


def clock(monkeypatch, plain, packed, filled=100.0):
    """Each kind of products takes so long, in seconds or by its number of rows; returns the rows
    of what is timed.
    """
    seconds = {
        nn.functional.linear: plain,
        packed_linear._multiply_packed: packed,
        packed_linear._multiply_filled: filled,
    }
    timed = []

    def times(x, *kinds):
        timed.append(len(x))
        found = [seconds[multiply] for multiply, _ in kinds]
        return [time(len(x)) if callable(time) else time for time in found]

    monkeypatch.setattr(packed_linear, "_times", times)
    return timed


@pytest.mark.parametrize(
    ("faster", "least_rows", "plain_rows", "timed"),
    [(0, 2, 0, [2, 2]), (1, 2, 0, [2, 2]), (1, 1, 1, [1, 1, 2]), (9, 2, 8, [2, 2, 4, 8, 16])],
)
@torch.no_grad()
def test_plain_products_are_kept_where_they_are_faster(
    faster, least_rows, plain_rows, timed, untimed, monkeypatch
):
    seen = clock(monkeypatch, lambda rows: 5.0 if rows <= faster else 20.0, 10.0)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    packed_linear.pack(module, least_rows)
    packed_linear.pack(nn.Sequential(nn.Linear(512, 512)), least_rows)
    assert seen == timed
    assert (module[0].plain is not None) == (plain_rows > 0)
    assert module[0].plain_rows == plain_rows and module[2].packed is None
    packed_products = []
    monkeypatch.setattr(
        packed_linear, "_multiply_packed", lambda x, *_: packed_products.append(len(x))
    )
    for rows in (1, 2, 8, 9):
        module[0](torch.zeros(rows, 512))
    assert packed_products == [rows for rows in (1, 2, 8, 9) if rows > plain_rows]


@pytest.mark.parametrize(
    ("filled", "plain", "least_rows", "decided"),
    [
        (5.0, 8.0, 1, (0, 4)),  # plain ones are faster than packed ones, not than filled ones
        (9.5, 20.0, 1, (0, 0)),  # a small gain
        (5.0, 8.0, 2, (0, 4)),
        (5.0, 2.0, 2, (32, 4)),
        (5.0, 20.0, 4, (0, 0)),  # there are no fewer rows
    ],
)
@torch.no_grad()
def test_packed_products_of_few_rows_are_filled_where_that_is_faster(
    filled, plain, least_rows, decided, untimed, monkeypatch
):
    clock(monkeypatch, plain, 10.0, filled)
    assert packed_linear.faster_rows(512, 512, torch.float32, least_rows, 1) == decided
    layer = PackedLinear(torch.zeros(512, 512), None, least_rows)
    rows = []
    monkeypatch.setattr(
        packed_linear,
        "_multiply_packed",
        lambda x, *_: (rows.append(len(x)), torch.zeros(len(x), 512))[1],
    )
    for count in (1, 3, 4, 40):
        assert layer(torch.zeros(count, 512)).shape == (count, 512)
    multiplied = [max(count, decided[1]) for count in (1, 3, 4, 40) if count > decided[0]]
    assert rows == multiplied


@pytest.mark.parametrize("writable", [True, False])
def test_a_later_process_decides_as_the_first_did(writable, untimed, monkeypatch, tmp_path):
    """Whatever it would have timed; without a cache it times anew."""
    if not writable:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "file"))
    found = []
    for times in ((5.0, 10.0, 8.0), (20.0, 10.0, 10.0)):
        packed_linear.faster_rows.cache_clear()  # as in a new process
        clock(monkeypatch, *times)
        found.append(packed_linear.faster_rows(512, 512, torch.float32, 1, 1))
    assert found == ([(32, 4)] * 2 if writable else [(32, 4), (0, 0)])


def test_a_small_gain_is_not_worth_a_second_copy(untimed, monkeypatch):
    clock(monkeypatch, 1.0, 1.05)
    assert packed_linear.faster_rows(512, 512, torch.float32, 1, 1) == (0, 0)


@pytest.mark.parametrize(
    ("entries", "count", "outputs"), [(512 * 100, 1, 100), (512 * 512 * 3, 3, 512), (2**30, 5, 512)]
)
@torch.no_grad()
def test_products_are_timed_with_as_many_weights_as_memory_is_read_for(
    entries, count, outputs, untimed, monkeypatch
):
    """Of the largest weights, with as many outputs."""
    monkeypatch.setattr(packed_linear, "TIMED_ENTRIES", entries)
    monkeypatch.setattr(packed_linear, "LAYERS", 5)
    shapes, times = [], packed_linear._times

    def seen(x, *kinds):
        shapes.extend((len(weights), *weights[0].shape) for _, weights in kinds)
        found = times(x, *kinds)
        assert min(found) > 0
        return found

    monkeypatch.setattr(packed_linear, "_times", seen)
    packed_linear.faster_rows(512, 512, torch.float32, 32, 1)
    assert shapes == [(count, outputs, 512)] * 2
