"""On a GPU: the kernel of products of few rows, against float64, also in CUDA graphs."""

from pathlib import Path

import pytest
import torch

from tempera.targets import few_rows
from tempera.targets.products import by_torch

pytestmark = pytest.mark.gpu
SIZES = {
    "qkv of XL": (3840, 1280, True, False),
    "o_proj of XL": (1280, 1280, False, False),
    "gate_up of XL": (7168, 1280, True, True),
    "down_proj of XL": (1280, 3584, False, False),
    "gate_up of 7B": (22016, 4096, True, True),
    "odd": (70, 1000, True, True),
}
"""Outputs, inputs, whether there is a norm, and whether gated."""


@pytest.mark.parametrize("block", few_rows.BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_computes_what_pytorch_does(size: str, block: int) -> None:
    import tempera.targets.few_rows_kernel  # noqa: F401 # makes the operator

    outputs, inputs, normed, gated = SIZES[size]
    made = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = scale * torch.randn(shape, generator=made, device="cuda")
        return drawn.to(torch.bfloat16)

    weight = random(outputs, inputs, scale=inputs**-0.5)
    norm = random(inputs) if normed else None
    for rows in (1, 2, 12, 16):
        x = random(rows, inputs, scale=3.0)
        residual = random(rows, outputs // 2 if gated else outputs)
        given = x, weight, random(outputs), norm, 1e-5, residual
        found = torch.ops.tempera.few_rows(*given, gated, block)
        doubles = [one.double() if isinstance(one, torch.Tensor) else one for one in given]
        torch.testing.assert_close(found.double(), by_torch(*doubles, gated), atol=0.1, rtol=0.02)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = torch.ops.tempera.few_rows(*given, gated, block)
        for _ in range(100):
            graph.replay()
        assert torch.equal(again, found)


def test_products_are_timed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The times are in the cache: those of PyTorch are named 0."""
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    shape = 2, 3840, 1280, True, False, torch.bfloat16, torch.device("cuda:0")
    block = few_rows.fastest_block(*shape)
    assert block in (0, *few_rows.BLOCKS) and len(list(tmp_path.rglob("*.json"))) == 1
    monkeypatch.setattr(few_rows, "_times", None)
    assert few_rows.fastest_block(*shape) == block
