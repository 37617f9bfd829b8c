"""Targets whose layers have weights of eight bits."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_evaluation import tiny_options
from torch import nn

from tempera.commands import costs, evaluate
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.runtime.quantised import is_quantised, quantise, stored_bytes
from tempera.targets.packed_linear import PackedLinear

has_torchao = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not has_torchao, reason="torchao is an extra")
INT8 = "weights_dtype=int8"


def linear_layers(module: nn.Module) -> Iterator[Any]:
    return (one for one in module.modules() if isinstance(one, nn.Linear | PackedLinear))


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_rows_are_rounded_to_127_steps_and_products_are_those_of_the_rounded_weights(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(96, 40, dtype=dtype)
    weight = torch.randn(40, 96, generator=generator).to(dtype)
    weight[3] *= 1000  # its row alone is rounded more coarsely
    layer.weight.copy_(weight)
    quantise(layer)
    rounded = layer.weight.dequantize()
    steps = weight.float().abs().amax(1, keepdim=True) / 127
    far = (rounded.float() - weight.float()).abs() / steps
    assert far.max() <= (0.51 if dtype == torch.float32 else 1.1)  # and by bfloat16 itself
    assert stored_bytes(layer.weight) <= 40 * (96 + 4 + 1)
    packed = PackedLinear(layer.weight, layer.bias, least_rows=1)
    assert packed.packed is None and is_quantised(packed.weight)
    for rows in (1, 2, 33):
        x = torch.randn(2, rows, 96, generator=generator).to(dtype)
        expected = nn.functional.linear(x.double(), rounded.double(), layer.bias.double())
        sizes = x.double().abs() @ rounded.double().abs().T + 1
        assert ((packed(x) - expected).abs() <= 4 * torch.finfo(dtype).eps * sizes).all()


@needs_torchao
@pytest.mark.slow
def test_a_run_with_eight_bits_decodes_what_the_rounded_weights_do(tmp_path: Path) -> None:
    tiny = [*tiny_options(tmp_path), "method=eagle", "depth=2", "limit=2", "speed.prompts=0"]
    given = [*tiny, INT8, "device=cpu"]
    target = Parts.of(composed("eval", given)).fast_target()
    layers = [*linear_layers(target.network.model.layers)]
    assert layers and all(is_quantised(layer.weight) for layer in layers)
    evaluate.main(composed("eval", given, tmp_path / "run"))
    rounded = Parts.of(composed("eval", given)).discrete_target()
    for layer in linear_layers(rounded.network.model.layers):
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    parts = Parts.of(composed("eval", given))
    prompts = [Prompt("0", "a red ring"), Prompt("1", "a large blue star")]
    eight = parts.pipeline(target, parts.rule()).tokens(prompts).tokens
    whole = parts.pipeline(rounded, parts.rule()).tokens(prompts).tokens
    assert eight.equal(whole)


@needs_torchao
def test_runs_of_other_weights_are_others_and_take_less_memory(
    tmp_path: Path,
) -> None:
    tiny = [*tiny_options(tmp_path), "method=eagle", "depth=2", "limit=2", "speed.prompts=0"]
    evaluate.main(composed("eval", tiny, tmp_path / "run"))
    with pytest.raises(TemperaError, match="weights_dtype"):
        evaluate.main(composed("eval", [*tiny, INT8], tmp_path / "run"))
    sizes = {}
    for name in ("weights_dtype=null", INT8):
        dry = ["model=llamagen_b_c2i", "method=ar", "prompt='1'", "device=cpu", "dtype=float32"]
        cfg = composed("eval", [*dry, "weights=random", name, "tracking=none"])
        with Parts.of(cfg).sized() as (sized, _):
            target = sized.fast_target()
        layers = target.network.model.layers
        sizes[name] = costs.size_of(layers), target.weight_bytes
    (whole, read), (eight, read_eight) = sizes.values()
    assert 0.25 < eight / whole < 0.26 and read - read_eight == whole - eight


def test_eight_bits_without_torchao_or_for_continuous_tokens_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec("torch")
    monkeypatch.setattr("tempera.runtime.quantised.find_spec", lambda name: found)
    with pytest.raises(TemperaError, match="weights_dtype=int8 is for models of discrete tokens"):
        Parts.of(composed("eval", ["model=shapes_mar", "method=ar", INT8]))
    monkeypatch.setattr("tempera.runtime.quantised.find_spec", lambda name: None)
    with pytest.raises(TemperaError, match=r"pip install \"tempera-decoding\[torchao\]\"$"):
        Parts.of(composed("eval", [INT8]))
    with pytest.raises(TemperaError, match="weights_dtype"):
        Parts.of(composed("eval", ["weights_dtype=int3"]))
