"""Targets and drafts whose layers have weights of eight bits."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import needs_torchao, slow_but
from live_bytes import LiveBytes
from network_drafts import DRAFTERS, write_smaller
from tiny_evaluation import tiny_options
from tiny_networks import PROMPTS, tiny_target
from torch import nn

from tempera.commands import costs, evaluate
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.data.prompts import Prompt
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.independent import build_independent
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.runtime.quantised import is_quantised, quantise, stored_bytes
from tempera.shapes.networks import load_smaller
from tempera.targets import packed_linear
from tempera.targets.packed_linear import PackedLinear

pytestmark = pytest.mark.usefixtures("no_figures")
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
    quantise(layer, layer, "int8", torch.device("cpu"))
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
    tiny = [*tiny_options(tmp_path), "method=eagle", "depth=2", "data.limit=2", "speed.prompts=0"]
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
    tiny = [*tiny_options(tmp_path), "method=eagle", "depth=2", "data.limit=2", "speed.prompts=0"]
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


def quantised_drafter(kind: str, target: Any, directory: Path) -> tuple[Any, Any]:
    """A drafter of eight bits, and its network."""
    if kind == "independent":
        write_smaller(directory)
        drafter = build_independent(load_smaller(directory), target, Tree.chain(3), "int8")
        return drafter, drafter.model.draft.network.model.layers  # type: ignore[attr-defined]
    drafter = DRAFTERS[kind](target, torch.int8)
    return drafter, drafter.model.run.network


@needs_torchao
@pytest.mark.parametrize("kind", slow_but(DRAFTERS, "eagle", "eagle tree", "medusa", "independent"))
def test_a_draft_of_eight_bits_drafts_what_its_rounded_weights_do(
    kind: str, tmp_path: Path
) -> None:
    target = tiny_target(Sampling(3.0, temperature=0))
    drafter, network = quantised_drafter(kind, target, tmp_path)
    layers = [one for one in linear_layers(network) if is_quantised(one.weight)]
    assert layers and not any(map(is_quantised, target.network.parameters()))

    def decoded(drafter: Any) -> Any:
        return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)

    assert decoded(drafter).tokens.equal(decoded(NoDraft()).tokens)  # greedy
    target.sampling = Sampling(3.0, temperature=1.3)
    eight = decoded(drafter)
    for layer in layers:
        whole = layer.weight.dequantize()
        if isinstance(layer, PackedLinear):
            layer.plain = whole
        else:
            layer.weight = nn.Parameter(whole, requires_grad=False)
    rounded = decoded(drafter)
    assert eight.tokens.equal(rounded.tokens)
    assert eight.trace.rounds.equal(rounded.trace.rounds)


@needs_torchao
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
def test_a_dry_run_weighs_a_draft_of_eight_bits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "packs", lambda weight: False)  # as on a GPU
    sizes = {}
    for draft in ("null", "int8"):
        given = ["method=eagle", f"drafter.dtype={draft}", f"dtype={dtype}", "device=cpu"]
        cfg = composed("eval", [*given, "tracking=none"])
        with Parts.of(cfg).sized() as (sized, _):
            target = sized.fast_target()
            told = costs.decoding_memory(target, sized, ["a red ring"])
            drafter: Any = sized.drafter(target)
            sizes[draft] = costs.size_of(drafter.model.run.network)
    parts = Parts.of(cfg)
    with LiveBytes() as held:
        pipeline = parts.pipeline(parts.fast_target(), parts.rule())
        assert told["weights"] == pytest.approx(held.live, rel=0.03)
    run = pipeline.method.drafter.model.run  # type: ignore[attr-defined]
    assert run.dtype == getattr(torch, dtype)
    share = {"float32": 0.25, "bfloat16": 0.5}[dtype]
    assert share < sizes["int8"] / sizes["null"] < share + 0.02


@needs_torchao
@pytest.mark.slow
def test_a_run_whose_draft_has_eight_bits_is_another(tmp_path: Path) -> None:
    tiny = [*tiny_options(tmp_path), "method=eagle", "depth=2", "data.limit=2", "speed.prompts=0"]
    evaluate.main(composed("eval", [*tiny, "drafter.dtype=int8"], tmp_path / "run"))
    with pytest.raises(TemperaError, match=r"drafter\.dtype"):
        evaluate.main(composed("eval", tiny, tmp_path / "run"))


def test_eight_bits_without_torchao_or_for_continuous_tokens_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec("torch")
    monkeypatch.setattr("tempera.runtime.quantised.find_spec", lambda name: found)
    with pytest.raises(
        TemperaError, match="weights_dtype=int8 is only for models with discrete tokens"
    ):
        Parts.of(composed("eval", ["model=shapes_mar", "method=ar", INT8]))
    monkeypatch.setattr("tempera.runtime.quantised.find_spec", lambda name: None)
    with pytest.raises(TemperaError, match=r"pip install \"tempera-decoding\[torchao\]\"$"):
        Parts.of(composed("eval", [INT8]))
    with pytest.raises(TemperaError, match="weights_dtype"):
        Parts.of(composed("eval", ["weights_dtype=int3"]))
    with pytest.raises(TemperaError, match=r"^drafter\.dtype=int8 .*decoding\[torchao\]\"$"):
        Parts.of(composed("eval", ["method=eagle", "drafter.dtype=int8"]))
    with pytest.raises(TemperaError, match=r"^`drafter\.dtype=int3` is not valid: "):
        Parts.of(composed("eval", ["method=eagle", "drafter.dtype=int3"]))
