"""Products of few rows in compiled rounds: what the kernel computes, by Triton's interpreter; which
products of a layer are its; and which way of computing them is chosen.
"""

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tempera.targets import few_rows, packed_linear
from tempera.targets.decoder_layer import DecoderLayer, LayerSizes
from tempera.targets.masks import causal_mask
from tempera.targets.packed_linear import pack
from tempera.targets.rotary import Rotary

SCRIPT = Path(__file__).parents[1] / "support" / "interpreted_few_rows.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch's CUDA"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "LlamaGen": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "Chameleon": {"head_norm": "layer"},
    "Qwen3": {"head_norm": "rms"},
    "GLM": {"four_norms": True},
}

HOOKS: list[Any] = []
"""On all modules, to be removed."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "packs", lambda weight: False)


@pytest.mark.slow
@needs_triton
def test_the_kernel_computes_what_pytorch_does() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert "passed: " in run.stdout, run.stdout + run.stderr


def layer_of(name: str = "LlamaGen", dtype: torch.dtype = torch.bfloat16) -> DecoderLayer:
    torch.manual_seed(0)
    sizes = LayerSizes(32, 40, 4, 2, 8, 1e-5, **OPTIONS[name])
    layer = DecoderLayer(sizes).eval().to(dtype).requires_grad_(False)
    for one in layer.parameters():
        one.add_(0.1 * torch.randn_like(one))
    pack(layer, 1)
    return layer


def timed(multiply: Any, weights: list[Tensor]) -> int:
    """Products are computed although a graph is being traced; those of the kernel are faster."""
    assert multiply(weights[0]).isfinite().all().item()
    return 1 if isinstance(multiply, partial) else 2


def computed(
    layer: DecoderLayer, monkeypatch: pytest.MonkeyPatch, cache: Path, tokens: int = 4
) -> tuple[Tensor, Tensor, list[str]]:
    """What the layer computes plainly and compiled, of two rows, and the compiled products."""
    dtype = next(layer.parameters()).dtype
    x = torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = causal_mask(torch.ones(2, tokens, dtype=torch.bool), tokens, dtype)
    rotation = Rotary(8, 100.0).table(tokens, 1, x.device)[:, None].to(dtype)
    monkeypatch.setattr(few_rows, "is_supported", lambda device: True)
    monkeypatch.setenv("TEMPERA_CACHE", str(cache))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "of this test")
    monkeypatch.setattr(few_rows, "TIMED_ENTRIES", 2**12)
    monkeypatch.setattr(few_rows, "nanoseconds", timed)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    expected = layer(x, mask, rotation)
    found = torch.compile(layer, backend=counter, fullgraph=True)(x, mask, rotation)
    called = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    return expected, found, [one for one in called if "few_rows" in one]


@needs_triton
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_all_products_of_a_layer_are_its(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, found, products = computed(layer_of(name), monkeypatch, tmp_path)
    assert torch.equal(found, expected) and len(products) == 4


class Doubled(nn.Module):
    """Twice what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def replaced(layer: DecoderLayer) -> None:
    layer.self_attn.o_proj = Doubled(layer.self_attn.o_proj)  # type: ignore[assignment]


def hooked_product(layer: DecoderLayer) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda module, given, out: 2 * out)


def patched(layer: DecoderLayer) -> None:
    inner = layer.mlp.down_proj.forward
    layer.mlp.down_proj.forward = lambda x: 2 * inner(x)  # type: ignore[method-assign]


def hooked_everywhere(layer: DecoderLayer) -> None:
    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        return 2 * out if module is layer.mlp.down_proj else None

    HOOKS.append(nn.modules.module.register_module_forward_hook(hook))


def hooked_part(layer: DecoderLayer) -> None:
    layer.mlp.register_forward_hook(lambda module, given, out: 2 * out)


def replaced_part(layer: DecoderLayer) -> None:
    layer.mlp = Doubled(layer.mlp)  # type: ignore[assignment]


def replaced_norm(layer: DecoderLayer) -> None:
    layer.input_layernorm = Doubled(layer.input_layernorm)


def hooked_norm(layer: DecoderLayer) -> None:
    layer.input_layernorm.register_forward_hook(lambda module, given, out: 2 * out)


@needs_triton
@pytest.mark.parametrize(
    ("change", "products"),
    [
        (replaced, 3),
        (hooked_product, 3),
        (patched, 3),
        (hooked_everywhere, 0),
        (hooked_part, 4),
        (replaced_part, 4),
        (replaced_norm, 4),
        (hooked_norm, 4),
    ],
)
@torch.no_grad()
def test_what_is_changed_in_a_layer_is_called(
    change: Any, products: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = layer_of()
    before = computed(layer, monkeypatch, tmp_path)[0]
    change(layer)
    try:
        expected, found, called = computed(layer, monkeypatch, tmp_path)
    finally:
        for hook in HOOKS:
            hook.remove()
        HOOKS.clear()
    assert not torch.equal(expected, before)
    assert torch.equal(found, expected) and len(called) == products


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 4), (torch.bfloat16, 9)])
@torch.no_grad()
def test_other_dtypes_and_more_rows_are_pytorchs(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, found, products = computed(layer_of(dtype=dtype), monkeypatch, tmp_path, tokens)
    assert torch.equal(found, expected) and not products


@needs_triton
def test_float16_is_normed_before_and_gradients_are_pytorchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = layer_of(dtype=torch.float16)
    layer.input_layernorm.weight.fill_(1e4)  # times x: more than float16 holds
    with torch.no_grad():
        expected, found, products = computed(layer, monkeypatch, tmp_path)
    assert torch.equal(found, expected) and len(products) == 4
    assert computed(layer_of(), monkeypatch, tmp_path)[2] == []


@needs_triton
def test_the_fastest_is_timed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A/B")
    timed: list[int] = []

    def times(shape: few_rows.Shape, device: torch.device) -> dict[str, int]:
        timed.append(shape[0])
        return {"0": 10, "8": 4 * shape[0], "16": 11}

    monkeypatch.setattr(few_rows, "_times", times)

    def chosen(rows: int) -> int:
        return few_rows.fastest_block(
            rows, 64, 32, True, False, torch.bfloat16, torch.device("cpu")
        )

    assert [chosen(rows) for rows in (2, 3, 4, 2)] == [8, 0, 0, 8]
    assert timed == [2, 4]


@needs_triton
def test_a_block_that_does_not_fit_the_card_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    monkeypatch.setattr(few_rows, "TIMED_ENTRIES", 2**12)
    found = iter([3, 2, OutOfResources(1, 0, "shared memory"), 1])

    def time(multiply: Any, weights: list[Tensor]) -> int:
        assert len(weights) == 2 and multiply(weights[0]).shape == (2, 32)
        one = next(found)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(few_rows, "nanoseconds", time)
    shape = 2, 64, 32, True, True, torch.bfloat16
    assert few_rows._times(shape, torch.device("cpu")) == {"0": 3, "8": 2, "32": 1}
