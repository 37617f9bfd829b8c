"""Linear layers for decoding, against PyTorch's own."""

import pytest
import torch
from torch import nn

from tempera.targets import packed_linear
from tempera.targets.packed_linear import PackedLinear, packs


def case(dtype: torch.dtype, bias: bool, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (24, 40), (24,), (rows, 40)
    weight, b, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, b if bias else None, x


def faster_up_to(rows, monkeypatch):
    """Let plain products seem faster at up to so many rows; returns the sizes that are timed."""
    sizes = []

    def times(x, weight, packed):
        sizes.append(len(x))
        return (1.0, 2.0) if len(x) <= rows else (2.0, 1.0)

    packed_linear.faster_plain_rows.cache_clear()
    monkeypatch.setattr(packed_linear, "_times", times)
    return sizes


@pytest.fixture(autouse=True)
def _times_anew():
    packed_linear.faster_plain_rows.cache_clear()
    yield
    packed_linear.faster_plain_rows.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pack", "bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("plain_rows", [0, 2])
@torch.no_grad()
def test_products_are_those_of_a_linear_layer(plain_rows, pack, bias, dtype, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    faster_up_to(plain_rows, monkeypatch)
    for rows in (1, 2, 17):
        weight, b, x = case(dtype, bias, rows)
        if pack and not packs(weight):
            pytest.skip("oneDNN does not multiply this type here")
        layer = PackedLinear(weight, b, pack)
        assert (layer.packed is not None) is pack
        assert (layer.plain is not None) is (not pack or plain_rows > 0)
        expected = nn.functional.linear(x, weight, b)
        close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0}
        torch.testing.assert_close(layer(x), expected, **close)
        torch.testing.assert_close(layer(x.unsqueeze(0))[0], expected, **close)


@pytest.mark.parametrize(("small", "plain_rows"), [(1, 0), (1, 1), (2**18, 0)])
@torch.no_grad()
def test_a_copy_in_another_dtype_has_the_weights_rounded(small, plain_rows, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", small)
    faster_up_to(plain_rows, monkeypatch)
    weight, b, x = case(torch.float32, True, 3)
    half = nn.functional.linear(x.double(), weight.half().double(), b.half().double())
    copy = PackedLinear(weight, b).to_dtype(torch.float16).to_dtype(torch.float64)
    torch.testing.assert_close(copy(x.double()), half)


def test_what_onednn_does_not_multiply_faster_is_not_packed():
    assert packs(torch.zeros(512, 512)) == torch.backends.mkldnn.is_available()
    assert not packs(torch.zeros(512, 511))
    assert not packs(torch.zeros(512, 512, dtype=torch.float64))
    assert not packs(torch.zeros(512, 512, device="meta"))


@pytest.mark.parametrize(
    ("faster", "least_rows", "plain_rows", "timed"),
    [(0, 2, 0, [2]), (1, 2, 0, [2]), (1, 1, 1, [1, 2]), (9, 2, 8, [2, 4, 8, 16])],
)
@torch.no_grad()
def test_the_plain_product_is_kept_where_it_is_faster(
    faster, least_rows, plain_rows, timed, monkeypatch
):
    if not packs(torch.zeros(512, 512)):
        pytest.skip("oneDNN is not there")
    sizes = faster_up_to(faster, monkeypatch)
    layers = [PackedLinear(torch.zeros(512, 512), least_rows=least_rows) for _ in range(2)]
    assert sizes == timed  # once for both
    for layer in layers:
        assert (layer.plain_rows, layer.plain is not None) == (plain_rows, plain_rows > 0)
    packed_products = []
    monkeypatch.setattr(
        packed_linear, "_multiply_packed", lambda x, *_: packed_products.append(len(x))
    )
    for rows in (1, 2, 8, 9):
        layers[0](torch.zeros(rows, 512))
    assert packed_products == [rows for rows in (1, 2, 8, 9) if rows > plain_rows]


@torch.no_grad()
def test_a_small_gain_is_not_worth_a_second_copy(monkeypatch):
    faster_up_to(0, monkeypatch)
    monkeypatch.setattr(packed_linear, "_times", lambda *_: (1.0, 1.05))
    assert packed_linear.faster_plain_rows(8, 4, torch.float32, 1) == 0
