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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pack", "bias"), [(True, True), (True, False), (False, True)])
@torch.no_grad()
def test_products_are_those_of_a_linear_layer(pack, bias, dtype, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", 1)
    for rows in (1, 2, 17):
        weight, b, x = case(dtype, bias, rows)
        if pack and not packs(weight):
            pytest.skip("oneDNN does not multiply this type here")
        layer = PackedLinear(weight, b, pack)
        assert layer.packed is pack
        expected = nn.functional.linear(x, weight, b)
        close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0}
        torch.testing.assert_close(layer(x), expected, **close)
        torch.testing.assert_close(layer(x.unsqueeze(0))[0], expected, **close)


@pytest.mark.parametrize("small", [1, 2**18])
@torch.no_grad()
def test_a_copy_in_another_dtype_has_the_weights_rounded(small, monkeypatch):
    monkeypatch.setattr(packed_linear, "SMALL", small)
    weight, b, x = case(torch.float32, True, 3)
    half = nn.functional.linear(x.double(), weight.half().double(), b.half().double())
    copy = PackedLinear(weight, b).to_dtype(torch.float16).to_dtype(torch.float64)
    torch.testing.assert_close(copy(x.double()), half)


def test_what_onednn_does_not_multiply_faster_is_not_packed():
    assert packs(torch.zeros(512, 512)) == torch.backends.mkldnn.is_available()
    assert not packs(torch.zeros(512, 511))
    assert not packs(torch.zeros(512, 512, dtype=torch.float64))
    assert not packs(torch.zeros(512, 512, device="meta"))
