import pytest
import torch

from tempera.config.build import parse_dtype
from tempera.runtime.processor import arithmetic, computes_bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_is_fast_where_the_processor_supports_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert computes_bfloat16(torch.device("cpu")) is supported
    assert computes_bfloat16(torch.device("meta"))


@pytest.mark.parametrize("units", [True, False])
def test_a_gpu_that_emulates_bfloat16_does_not_compute_it(
    monkeypatch: pytest.MonkeyPatch, units: bool
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or units,
    )
    assert computes_bfloat16(torch.device("cuda")) is units
    assert parse_dtype("auto", torch.device("cuda")) == (torch.bfloat16 if units else torch.float32)


def test_float16_on_a_cpu_is_computed_with_in_float32() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert arithmetic(torch.float16, cpu) == torch.float32
    assert arithmetic(torch.float16, other) == torch.float16
    assert arithmetic(torch.bfloat16, cpu) == torch.bfloat16
