"""Targets and drafts whose layers have weights of four bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from graph_replays import replayed
from live_bytes import LiveBytes
from network_drafts import CHAIN, dflash, eagle, eagle2, eagle3, medusa, parallel
from tiny_networks import PROMPTS, TREE, WIDE, llamagen, tiny_eagle, tiny_target
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.commands import costs, evaluate
from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.decoding.loop import decode, rounds
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.runtime.int4 import Int4Linear, in_pairs, rounded
from tempera.runtime.processor import Placement
from tempera.runtime.quantised import check_quantises, quantise
from tempera.targets import packed_linear

pytestmark = pytest.mark.usefixtures("no_figures")
CPU = torch.device("cpu")
INT4 = "weights_dtype=int4"
SIZES = [(48, 96, 32), (80, 192, 64), (16, 256, 128)]
DRAFTERS = {
    "eagle": lambda target: eagle(target, CHAIN, (), torch.int4),
    "eagle, features": lambda target: eagle(target, TREE, (0, 1), torch.int4),
    "eagle2": lambda target: eagle2(target, torch.int4),
    "eagle3": lambda target: eagle3(target, TREE, torch.int4, (0, 1)),
    "parallel": lambda target: parallel(target, CHAIN, torch.int4, features=(0, 1)),
    "dflash": lambda target: dflash(target, CHAIN, torch.int4, features=(0, 1)),
    "medusa": lambda target: medusa(target, TREE, torch.int4),
}


def wide_target(sampling: Sampling) -> Any:
    return tiny_target(sampling, llamagen(num_hidden_layers=2, **WIDE))


def layers_of(module: nn.Module) -> Iterator[Int4Linear]:
    return (one for one in module.modules() if isinstance(one, Int4Linear))


def whole(codes: Tensor, scales: Tensor) -> Tensor:
    """The rounded weights, float64 [O, I]."""
    scale, zero = scales.double().transpose(0, 1).unbind(-1)
    groups = codes.double().unflatten(1, (scale.shape[1], -1))
    return ((groups - 8) * scale[..., None] + zero[..., None]).flatten(1)


def random_layer(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    for tensor in (layer.weight, layer.bias):
        tensor.data = torch.randn(tensor.shape, generator=generator)
    layer.weight.data[3] *= 1000  # its groups alone are rounded more coarsely
    layer.weight.data[4] += 7  # not centred on 0
    layer.weight.data[5] = 0
    return layer.to(dtype).requires_grad_(False)


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_a_group_has_sixteen_even_levels(outputs: int, inputs: int, group: int) -> None:
    weight = random_layer(outputs, inputs).weight
    codes, scales = rounded(weight, group)
    groups = weight.double().unflatten(1, (-1, group))
    step = ((groups.amax(-1) - groups.amin(-1)) / 15)[..., None]
    far = (whole(codes, scales) - weight.double()).abs().unflatten(1, (-1, group))
    middle = (groups.amax(-1) + groups.amin(-1)).abs()[..., None] / 2 + step
    assert codes.min() == 0 and codes.max() == 15
    assert (far <= 0.5 * step + 2**-8 * (8 * step + middle) + 1e-5).all()  # scale, zero: bfloat16
    assert whole(codes, scales)[5].abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
@torch.no_grad()
def test_products_are_those_of_the_rounded_weights(
    outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    """Up to one rounding to bfloat16 and the sums of float32; a row alone is as among others."""
    layer = random_layer(outputs, inputs, dtype)
    four = Int4Linear.of(layer, CPU, "layer").to(dtype)
    assert four.group == group and four.scales.dtype == torch.bfloat16
    weight = whole(*rounded(layer.weight, group))
    x = torch.randn(2, 33, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    read = x.bfloat16().double()
    products = read @ weight.T
    rounding = 2**-8 + (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    near = rounding * (products.abs() + layer.bias.abs()) + 1e-5 * (read.abs() @ weight.abs().T)
    found = four(x)
    assert found.dtype == dtype
    assert ((found - (products + layer.bias)).abs() <= near).all()
    for rows in (1, 2, 5, 33):
        assert four(x[:1, :rows]).equal(found[:1, :rows])
    apart = torch.cat([x[:1], 1000 * x[1:]])
    assert four(apart)[0].equal(found[0])
    assert four(x.transpose(0, 1)).equal(found.transpose(0, 1))
    assert four(x[0, ::2]).equal(found[0, ::2])
    assert four(x[:, :0]).shape == (2, 0, outputs)


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_a_gpu_gets_what_its_operators_document(outputs: int, inputs: int, group: int) -> None:
    """Nothing runs on one: tensors without data tell what each operator gets."""
    layer, gpu = random_layer(outputs, inputs), torch.device("cuda:0")
    layer.bias = None  # it moves with the network
    calls: dict[str, list[Any]] = {}

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            calls[function.overloadpacket.__name__] = [*arguments]
            return function(*arguments, **options or {})

    with FakeTensorMode(allow_non_fake_inputs=True), Operators():
        four = Int4Linear.of(layer, gpu, "layer")
        x = torch.empty(3, 2, inputs, device=gpu, dtype=torch.float32).transpose(0, 1)
        out = four(x)
    pairs, tiles = calls["_convert_weight_to_int4pack"]
    assert pairs.dtype == torch.uint8 and pairs.device == gpu and pairs.is_contiguous()
    assert pairs.shape == (outputs, inputs // 2) and tiles in (2, 4, 8)
    assert inputs % (16 * tiles) == 0
    rows, packed, size, scales = calls["_weight_int4pack_mm"]
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert packed.shape == (outputs // 8, inputs // (16 * tiles), 32, tiles // 2)
    assert rows.dtype == torch.bfloat16 and rows.is_contiguous() and rows.shape == (6, inputs)
    assert size == group and scales.dtype == torch.bfloat16 and scales.is_contiguous()
    assert scales.shape == (inputs // group, outputs, 2)
    assert {one.device for one in (rows, packed, scales, out)} == {gpu}
    assert out.shape == (2, 3, outputs) and out.dtype == torch.float32
    codes, _ = rounded(layer.weight, group)
    assert (in_pairs(codes) >> 4).equal(codes[:, ::2].byte())
    assert (in_pairs(codes) & 15).equal(codes[:, 1::2].byte())


def test_rounding_is_the_same_every_time_and_sizes_are_known_without_weights() -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(random_layer(256, 256), nn.Sequential(random_layer(64, 256)))

    first, second = network(), network()
    with torch.device("meta"):
        sized = nn.Sequential(nn.Linear(256, 256), nn.Sequential(nn.Linear(256, 64)))
    for one, device in ((first, CPU), (second, CPU), (sized, torch.device("meta"))):
        quantise(one, one, "int4", device)
    assert len([*layers_of(first)]) == 2
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    weights = 256 * 256 + 64 * 256
    assert costs.size_of(first) == weights // 2 + weights // 128 * 4 + 4 * (256 + 64)
    assert costs.size_of(sized) == costs.size_of(first)


def test_a_layer_alone_is_quantised_and_others_stay() -> None:
    network = nn.Sequential(random_layer(16, 32), random_layer(32, 16))
    quantise(network, network[0], "int4", CPU)
    assert isinstance(network[0], Int4Linear) and isinstance(network[1], nn.Linear)
    with pytest.raises(TemperaError, match="32 inputs and of 16 outputs, but 1 has 16 and 32: "):
        quantise(network, network, "int4", CPU)
    network = nn.Sequential(random_layer(24, 32))
    with pytest.raises(TemperaError, match="but 0 has 32 and 24: choose int8"):
        quantise(network, network, "int4", CPU)


def laws(kind: str) -> Tensor:
    """The first tokens' distributions, of plain weights, rounded ones, or those of four bits."""
    network = llamagen(num_hidden_layers=2, **WIDE)
    linear = [one for one in network.model.layers.modules() if isinstance(one, nn.Linear)]
    for one in linear if kind == "rounded" else ():
        group = 64 if one.in_features % 64 == 0 else 32
        one.weight.data = whole(*rounded(one.weight, group)).float()
    placement = Placement(CPU, torch.float32, "int4" if kind == "int4" else None)
    target = tiny_target(Sampling(3.0), placement.frozen(network, network.model.layers))
    assert len([*layers_of(target.network)]) == (len(linear) if kind == "int4" else 0)
    target.pack()
    every = rounds(target, NoDraft(), Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    return next(iter(every)).scores.p[:, 0].clone()


def test_a_target_of_four_bits_has_the_law_of_its_rounded_weights() -> None:
    """Up to what bfloat16 rounds; that of the weights before they were rounded is farther."""
    four = laws("int4")
    near, far = ((four - laws(kind)).abs().sum(-1).max() for kind in ("rounded", "plain"))
    assert near < 0.05 < far


@pytest.mark.parametrize("kind", slow_but(DRAFTERS, "eagle, features", "medusa"))
def test_exact_methods_keep_greedy_tokens_whatever_a_draft_of_four_bits_drafts(kind: str) -> None:
    target = wide_target(Sampling(3.0, temperature=0))
    drafter = DRAFTERS[kind](target)
    assert [*layers_of(drafter.model.run.network)] and not [*layers_of(target.network)]

    def decoded(drafter: Any) -> Any:
        return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)

    assert decoded(drafter).tokens.equal(decoded(NoDraft()).tokens)


def test_drafted_tokens_have_no_features_in_four_bits_either() -> None:
    target = wide_target(Sampling(3.0))
    model = tiny_eagle(target, features=(0, 1))
    network = model.for_decoding(Placement(CPU, torch.float32, "int4"), 2)
    embeds, hidden = torch.randn(2, 1, 3, 32, generator=torch.Generator().manual_seed(0))
    padded = nn.functional.pad(hidden, (0, 64))
    assert network.project(embeds, hidden).equal(network.project(embeds, padded))
    assert not network.project(embeds, hidden).equal(network.project(embeds, 2 * padded))


def test_compiled_rounds_of_four_bits_emit_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed(monkeypatch)

    def tokens(compiled: bool) -> Tensor:
        network = llamagen(num_hidden_layers=1, **WIDE)
        placement = Placement(CPU, torch.float32, "int4")
        target = tiny_target(Sampling(3.0), placement.frozen(network, network.model.layers))
        if compiled:
            target.pack()
            target.compile()
        drafter = eagle(target, TREE, (), torch.int4)
        return decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS).tokens

    assert tokens(True).equal(tokens(False))


@pytest.mark.parametrize("backend", slow_but(["aot_eager", "inductor"], "aot_eager"))
def test_the_operators_are_compiled_without_a_break(backend: str) -> None:
    torch._dynamo.reset()
    four = Int4Linear.of(random_layer(48, 96), CPU, "layer")
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(four, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert compiled(x).equal(four(x))


def test_a_dry_run_weighs_a_target_and_a_draft_of_four_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "packs", lambda weight: False)  # as on a GPU
    given = ["method=eagle", INT4, "drafter.dtype=int4", "device=cpu", "tracking=none"]
    cfg = composed("eval", given)
    with Parts.of(cfg).sized() as (sized, _):
        told = costs.decoding_memory(sized.fast_target(), sized, ["a red ring"])
    parts = Parts.of(cfg)
    with LiveBytes() as held:
        parts.pipeline(parts.fast_target(), parts.rule())
        assert told["weights"] == pytest.approx(held.live, rel=0.03)
    read = {}
    for kind in ("null", "int4"):
        options = ["model=llamagen_b_c2i", "method=ar", "prompt='1'", "weights=random"]
        given = [*options, f"weights_dtype={kind}", "device=cpu", "tracking=none"]
        with Parts.of(composed("eval", given)).sized() as (sized, _):
            target: Any = sized.fast_target()
        read[kind] = costs.size_of(target.network.model.layers), target.weight_bytes
    (plain, all_plain), (four, all_four) = read.values()
    assert 0.125 < four / plain < 0.135 and all_plain - all_four == plain - four


def test_a_run_of_four_bits_is_another(tmp_path: Path) -> None:
    given = ["method=ar", "data.limit=1", "speed.prompts=0", "metrics=none", "tracking=none"]
    evaluate.main(composed("eval", [*given, INT4], tmp_path / "run"))
    for other in ("null", "int8"):
        with pytest.raises(TemperaError, match="weights_dtype"):
            evaluate.main(composed("eval", [*given, f"weights_dtype={other}"], tmp_path / "run"))


def test_four_bits_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemperaError, match="weights_dtype=int4 is only for models with discrete"):
        Parts.of(composed("eval", ["model=shapes_mar", "method=ar", INT4]))
    with pytest.raises(TemperaError, match=r"^drafter\.dtype=int4 needs a CPU or .* is on mps: "):
        check_quantises("drafter.dtype", "int4", torch.device("mps"))
    check_quantises("weights_dtype", "int4", torch.device("cuda"))  # of a dry run
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(TemperaError, match="Ampere generation or later, but this run is on cuda"):
        check_quantises("weights_dtype", "int4", torch.device("cuda"))
