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
@pytest.mark.parametrize("plain_rows", [0, 2])
@torch.no_grad()
def test_products_are_those_of_a_linear_layer(plain_rows, pack, bias, dtype, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    monkeypatch.setattr(packed_linear, "faster_plain_rows", lambda *_: plain_rows)
    for rows in (1, 2, 17):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_compiled_rounds_multiply_packed_weights(dtype, monkeypatch):
    """Which product runs is timed, so that this was seen on some machines only."""
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    monkeypatch.setattr(packed_linear, "faster_plain_rows", lambda *_: 0)
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
    monkeypatch.setattr(packed_linear, "faster_plain_rows", lambda *_: plain_rows)
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
    packed_linear.faster_plain_rows.cache_clear()
    yield
    packed_linear.faster_plain_rows.cache_clear()


@pytest.mark.parametrize(
    ("faster", "least_rows", "plain_rows", "timed"),
    [(0, 2, 0, [2]), (1, 2, 0, [2]), (1, 1, 1, [1, 2]), (9, 2, 8, [2, 4, 8, 16])],
)
@torch.no_grad()
def test_plain_products_are_kept_where_they_are_faster(
    faster, least_rows, plain_rows, timed, untimed, monkeypatch
):
    sizes = []

    def times(rows, weight, packed):
        sizes.append((rows, *weight.shape))
        return (5.0, 10.0) if rows <= faster and len(weight) == 512 else (10.0, 5.0)

    monkeypatch.setattr(packed_linear, "_times", times)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1024), nn.Linear(512, 8))
    packed_linear.pack(module, least_rows)
    packed_linear.pack(nn.Sequential(nn.Linear(512, 1024), nn.Linear(512, 512)), least_rows)
    assert sizes == [*((rows, 512, 512) for rows in timed), (least_rows, 1024, 512)]
    assert (module[0].plain is not None) == (plain_rows > 0)
    assert module[1].plain is None and module[2].packed is None
    packed_products = []
    monkeypatch.setattr(
        packed_linear, "_multiply_packed", lambda x, *_: packed_products.append(len(x))
    )
    for rows in (1, 2, 8, 9):
        module[0](torch.zeros(rows, 512))
    assert packed_products == [rows for rows in (1, 2, 8, 9) if rows > plain_rows]


@pytest.mark.parametrize("writable", [True, False])
def test_a_later_process_decides_as_the_first_did(writable, untimed, monkeypatch, tmp_path):
    """Whatever it would have timed; without a cache it times anew."""
    if not writable:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "file"))
    found = []
    for times in ((5.0, 10.0), (10.0, 5.0)):
        packed_linear.faster_plain_rows.cache_clear()  # as in a new process
        monkeypatch.setattr(packed_linear, "_times", lambda *_, times=times: times)
        found.append(packed_linear.faster_plain_rows(512, 512, torch.float32, 1, 1))
    assert found == ([32, 32] if writable else [32, 0])


def test_a_small_gain_is_not_worth_a_second_copy(untimed, monkeypatch):
    monkeypatch.setattr(packed_linear, "_times", lambda *_: (1.0, 1.05))
    assert packed_linear.faster_plain_rows(512, 512, torch.float32, 1, 1) == 0


@torch.no_grad()
def test_both_products_are_timed_with_as_many_outputs_of_the_largest_weights(untimed, monkeypatch):
    monkeypatch.setattr(packed_linear, "TIMED_ENTRIES", 512 * 100)
    shapes, times = [], packed_linear._times

    def seen(rows, weight, packed):
        shapes.append(weight.shape)
        both = times(rows, weight, packed)
        assert min(both) > 0
        return both

    monkeypatch.setattr(packed_linear, "_times", seen)
    packed_linear.faster_plain_rows(512, 512, torch.float32, 32, 1)
    assert shapes == [(100, 512)]
