import pytest
import torch

from tempera.runtime.processor import computes_bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_is_fast_where_the_processor_supports_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert computes_bfloat16(torch.device("cpu")) is supported
    assert computes_bfloat16(torch.device("meta"))


def test_bfloat16_is_slow_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not computes_bfloat16(torch.device("cpu"))
