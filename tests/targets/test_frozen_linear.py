"""Linear layers for decoding, against PyTorch's own."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tempera.targets import frozen_linear
from tempera.targets.frozen_linear import (
    HAS_FBGEMM,
    SMALL,
    ColumnLinear,
    HalfLinear,
    PackedLinear,
    bytes_read,
    freeze,
    is_half,
    packs,
    unpack,
)

KINDS = [torch.float32, torch.bfloat16]
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="FBGEMM runs on x86 processors")


def case(dtype: torch.dtype, bias: bool, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (24, 40), (24,), (rows, 40), (rows, 24)
    weight, b, x, base = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, b if bias else None, x, base


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("make", [PackedLinear, ColumnLinear])
@torch.no_grad()
def test_products_are_those_of_a_linear_layer(make, rows, bias, dtype):
    weight, b, x, base = case(dtype, bias, rows)
    if make is PackedLinear and not packs(weight.new_empty(SMALL, 1)):
        pytest.skip("oneDNN does not multiply this type here")
    layer = make(weight, b)
    expected = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(layer(x).double(), expected, **close)
    torch.testing.assert_close(layer.added_to(base, x).double(), base.double() + expected, **close)
    torch.testing.assert_close(layer(x.unflatten(0, (rows, 1))).flatten(0, 1), layer(x))


@needs_fbgemm
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_weights_of_float16_are_multiplied_in_float32(rows, bias):
    weight, b, x, base = case(torch.float32, bias, rows)
    layer = HalfLinear(weight.half().float(), b)
    expected = nn.functional.linear(x, weight.half().float(), b)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.added_to(base, x), base + expected)
    if rows:
        torch.testing.assert_close(layer(x.unflatten(0, (rows, 1))).flatten(0, 1), layer(x))
    columns = layer.as_columns()
    assert torch.equal(columns.weight.t(), weight.half().float())
    assert columns.bias is None if b is None else torch.equal(columns.bias, b)
    assert columns.as_columns() is columns


@needs_fbgemm
def test_float16_products_are_those_of_the_other_interface_to_the_bit():
    """`torch.ops.quantized` runs the same kernels."""
    weight, b, x, _ = case(torch.float32, True, 12)
    weight = weight.half().float()
    packed = torch.ops.quantized.linear_prepack_fp16(weight, b)
    assert torch.equal(HalfLinear(weight, b)(x), torch.ops.quantized.linear_dynamic_fp16(x, packed))


@needs_fbgemm
def test_nothing_is_announced_to_users():
    code = (
        "import torch\n"
        "from tempera.targets.frozen_linear import HalfLinear\n"
        "HalfLinear(torch.ones(4, 4))(torch.ones(1, 4))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout and not done.stderr


@needs_fbgemm
def test_weights_that_float16_has_are_stored_in_it():
    weight = torch.randn(64, 32).half().float()
    assert is_half(weight) and isinstance(freeze(weight), HalfLinear)
    assert bytes_read(weight) == 2 * 64 * 32
    for place in 0, -1:
        other = weight.clone()
        other[place, -1] += 2.0**-20
        assert not is_half(other) and not isinstance(freeze(other), HalfLinear)
        assert bytes_read(other) == 4 * 64 * 32
    assert not is_half(weight.bfloat16()) and not is_half(weight.to("meta"))
    assert not is_half(weight[0])  # a norm's weights stay as they are


def test_unpacked_weights_are_the_same_numbers(monkeypatch):
    monkeypatch.setattr(frozen_linear, "SMALL", 1)
    weight, b, *_ = case(torch.float32, True, 2)
    network = nn.Sequential(freeze(weight, b), nn.Sequential(freeze(weight)))
    assert isinstance(network[0], PackedLinear)
    unpack(network)
    assert network[0](torch.ones(1, 40)).shape == (1, 24)
    for layer in network[0], network[1][0]:
        assert isinstance(layer, ColumnLinear)
        assert torch.equal(layer.weight.t(), weight)
    assert torch.equal(network[0].bias, b)


def test_only_large_weights_are_packed():
    large = torch.full((SMALL // 64, 64), 0.1)
    assert isinstance(freeze(large[1:]), ColumnLinear)
    assert isinstance(freeze(large), PackedLinear if packs(large) else ColumnLinear)


def test_later_changes_of_the_weight_are_not_followed():
    weight, _, x, _ = case(torch.float32, False, 2)
    for layer in PackedLinear(weight.clone()), ColumnLinear(weight):
        before = layer(x)
        weight.zero_()
        torch.testing.assert_close(layer(x), before)
        weight = torch.randn(24, 40)


def test_other_types_and_devices_are_not_packed():
    assert not packs(torch.zeros(2, 2, dtype=torch.float64))
    assert not packs(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make", [PackedLinear, ColumnLinear, pytest.param(HalfLinear, marks=needs_fbgemm)]
)
def test_a_copy_in_another_dtype_has_the_weights_rounded(make, bias):
    weight, b, x, _ = case(torch.float32, bias, 3)
    copy = make(weight, b).in_dtype(torch.bfloat16)
    half = nn.functional.linear(
        x.bfloat16(), weight.bfloat16(), None if b is None else b.bfloat16()
    )
    assert copy(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(copy(x.bfloat16()), half, rtol=0.02, atol=0.1)
