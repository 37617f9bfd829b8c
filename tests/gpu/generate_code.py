"""Generates the code of compiled rounds for an H100 on a machine without a GPU, and lets Triton
compile it: what cannot be generated is known before there is a card. Nothing is run.

    python tests/gpu/generate_code.py [--many] [METHOD ...]
    python tests/gpu/generate_code.py --count [METHOD ...]

`--count` says how many graphs a round of LlamaGen-XL calls, how many kernels their code launches,
by name (widths of XL, two layers, bfloat16, guidance, top-k 1000, with diagnostics), and how many
guards PyTorch checks before each part: a third layer adds what the second has. Products are those
of `few_rows_kernel`. What a library launches inside a call is not seen. Without a METHOD it counts
plain autoregression, whose kernels it compiles, a chain of two, passes with cuBLAS's products, with
attention that skips keys, which it compiles, too, and with layers' weights of four bits, and
diagnostics of a tree and of a rule that searches.

It needs a build of torch with CUDA and Triton (tried with torch 2.14.1), whose private functions it
replaces, and takes one to five minutes a method. Attention is cuDNN's, which PyTorch takes on an
H100 for bfloat16 with a mask. Methods are those of `test_compiled.py`, by default one of each kind,
of a tiny float32 model; then comes plain autoregression of XL's widths, with `few_rows_kernel` and
attention that skips keys. `--many` takes a vocabulary of 16,384, as LlamaGen has. It prints a line
for each part of a round and ends with 1 if one of them fails.
"""

import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS / "support", TESTS / "decoding", TESTS.parent / "examples"))]

import torch  # noqa: E402
import triton  # noqa: E402
from network_drafts import eagle  # noqa: E402
from random_drafts import new_sequences, random_draft  # noqa: E402
from test_compiled import METHODS, captioned, decoded, of_many_codes  # noqa: E402
from torch import Tensor, fx  # noqa: E402
from torch._dynamo import device_interface  # noqa: E402
from torch._guards import TracingContext, tracing  # noqa: E402
from torch._inductor import async_compile, compile_fx, config  # noqa: E402
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from tempera.decoding import compiled, loop, probabilities  # noqa: E402
from tempera.decoding.diagnostics import Diagnosed, look  # noqa: E402
from tempera.decoding.interfaces import Rule, Scores  # noqa: E402
from tempera.decoding.probabilities import Sampling  # noqa: E402
from tempera.decoding.random_streams import RandomStreams  # noqa: E402
from tempera.decoding.trees import Tree  # noqa: E402
from tempera.decoding.verification import verify  # noqa: E402
from tempera.rules.optimal import Priced  # noqa: E402
from tempera.rules.standard import Exact  # noqa: E402
from tempera.runtime.processor import Placement  # noqa: E402
from tempera.targets import attention, few_rows, few_rows_kernel, packed_linear  # noqa: E402, F401
from tempera.targets.conditioners import RandomFeatures  # noqa: E402
from tempera.targets.llamagen import LlamaGen, llamagen_config  # noqa: E402
from tempera.targets.transformer import TransformerTarget  # noqa: E402

KINDS = "ar", "eagle", "tree", "sjd"
GPU = torch.device("cuda:0")
H100 = SimpleNamespace(
    name="NVIDIA H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
)
SKIPPING = "ar, keys skipped"
COUNTED = "ar", "chain"
CHAIN = partial(eagle, tree=Tree.chain(2))
CODES = 16384
LOOKS: dict[str, tuple[Tree, Rule, bool]] = {
    "eagle2": (Tree((torch.arange(12) // 3 - 1).unsqueeze(0), 3, 3), Exact(), False),
    "priced": (Tree.chain(2), Priced(0.5), True),
}
"""Rounds whose diagnostics are counted: the draft's tree, the rule, and whether drafts are drawn.
"""


@dataclass
class Graph:
    """A part of a round, traced on the CPU.

    Attributes:
        graph: its operations.
        inputs: what describes each tensor, and other inputs.
        guards: how many PyTorch checks at each call.
        calls: how often it was called.
    """

    graph: fx.GraphModule
    inputs: list[Any]
    guards: int = 0
    calls: int = 0


def graphs_of(
    decode: Callable[[], object], block: int = 16, only: str | None = None, skips: bool = False
) -> dict[str, Graph]:
    """The graph of each part of the rounds that a function decodes, or of one part alone, where
    `few_rows` chooses `block`, and attention skips keys that rows have not reached, or not.
    """
    found: dict[str, Graph] = {}
    inner = torch.compile

    def compiling(part: Callable[..., Any], *, options: dict[str, Any], **_: bool) -> Any:
        if only not in (None, part.__name__):
            return part

        def keep(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            like = [_on_gpu(x) if isinstance(x, Tensor) else x for x in inputs]
            kept = found.setdefault(part.__name__, Graph(graph, like))

            def run(*given: Any) -> Any:
                kept.calls += 1
                return graph.forward(*given)

            return run

        def wanted(guards: Any) -> Any:
            flags = options["guard_filter_fn"](guards)
            if part.__name__ in found:
                found[part.__name__].guards = sum(flags)
            return flags

        filtered: Any = {"guard_filter_fn": wanted}
        return inner(part, backend=keep, fullgraph=True, dynamic=False, options=filtered)

    compiled.forget()
    torch.compile = compiling  # type: ignore[assignment]
    probabilities.one_kernel = lambda logits: torch.compiler.is_compiling()
    packed_linear.packs = lambda weight: False
    few_rows.is_supported = lambda device: True
    few_rows.fastest_block = lambda *_: block
    attention.skipping_is_faster = compiled.constant(lambda *_: skips)
    try:
        decode()
    finally:
        torch.compile = inner
    return found


def small(method: str, many: bool) -> Callable[[], object]:
    """Decodes images of a tiny model."""

    def decode() -> object:
        target = of_many_codes() if many else captioned()
        target.compile()
        return decoded(method, False, target)

    return decode


@cache
def xl(weights: str | None) -> LlamaGen:
    """A model with the widths of LlamaGen-XL, two layers and short captions."""
    placement = Placement(torch.device("cpu"), torch.bfloat16, weights)
    config = llamagen_config("XL", 256, caption_dim=2048, caption_tokens=8)
    network = LlamaGen(replace(config, num_hidden_layers=2))
    return placement.frozen(network, network.model.layers)


def wide(method: str, weights: str | None = None, top_k: int = 1000) -> Callable[[], object]:
    """Decodes two rounds of `xl`, with diagnostics: the first is as it is written, and the second
    calls each graph as often as every later one.
    """

    def decode() -> None:
        encode = RandomFeatures(8, 2048).to(torch.bfloat16).encode
        sampling, rule = Sampling(7.5, top_k=top_k), Exact()
        target = TransformerTarget(
            xl(weights), encode, sampling, granularity=256, identity="random"
        )
        target.pack()
        target.compile()
        drafter = CHAIN(target) if method == "chain" else METHODS[method](target)
        rounds = loop.rounds(target, drafter, rule, RandomStreams(0, ["0"]), ["0"])
        diagnosed = Diagnosed(rule, compiles=True)
        diagnosed(next(rounds))
        diagnosed(next(rounds))
        rounds.close()

    return decode


def looked(tree: Tree, rule: Rule, drawn: bool) -> Callable[[], object]:
    """Looks at a round of a tree with random distributions."""

    def decode() -> object:
        draft, p, uniforms = random_draft(1, tree, CODES)
        draft = draft if drawn else replace(draft, q=None)
        verdict = verify(draft, Scores(p, p), rule, new_sequences(1), uniforms)
        return compiled.graph_of(look)(draft, verdict, Scores(p, p), rule, None)

    return decode


def _on_gpu(x: Tensor) -> dict[str, Any]:
    """What describes a tensor like x on the GPU."""
    return {"size": x.shape, "stride": x.stride(), "dtype": x.dtype, "device": GPU}


class Driver:
    """Triton's, of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


def pretend() -> list[str]:
    """Make PyTorch and Triton believe in an H100; returns what code is generated from now on."""
    cuda: Any = torch.cuda
    facts = {"is_available": True, "is_initialized": False, "is_bf16_supported": True}
    facts |= {"device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    facts |= {"get_device_properties": H100, "_exchange_device": 0, "_maybe_exchange_device": 0}
    facts |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    for name, fact in facts.items():
        setattr(cuda, name, lambda *_, fact=fact, **__: fact)
    interface: Any = device_interface.CudaInterface
    for name in ("get_device_properties", "current_device", "device_count"):
        setattr(interface, name, staticmethod(getattr(cuda, name)))
    interface.exchange_device = interface.maybe_exchange_device = staticmethod(lambda index: 0)
    device_interface.caching_worker_device_properties["cuda"] = [H100]
    device_interface.caching_worker_current_devices["cuda"] = 0
    for cached in vars(_triton).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    # these patterns are traced on the GPU itself; without them attention is generated as written
    for passes, name in (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (misc_patterns, "_misc_patterns_init"),
    ):
        setattr(passes, name, lambda *_: None)
    codes: list[str] = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    return codes


def compile_kernels(wanted: bool) -> list[str]:
    """Whether Triton compiles the kernels of code that is generated from now on; returns their
    names.
    """
    kernels: list[str] = []
    inductor: Any = async_compile

    def compile_kernel(_: Any, name: str, source: str, **__: Any) -> Any:
        kernel = inductor._load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)  # compiles for the driver's target, loads nothing
        kernels.append(name)
        return kernel

    inductor.AsyncCompile.triton = compile_kernel if wanted else lambda *_, **__: None
    return kernels


def passed(kernels: list[str]) -> str:
    """What to say of the kernels that were compiled."""
    ours = f"{kernels.count('few_rows_product')} of them of few_rows_product"
    return f"passed: {len(kernels)} kernels compiled for {H100.name}, {ours}"


def generate(graph: fx.GraphModule, inputs: list[Any]) -> None:
    """Generate and compile the code of a graph for the GPU."""
    described = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.graph.nodes:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            node.target = _attention
        if node.target is torch.ops.aten._weight_int4pack_mm_for_cpu:
            node.target = torch.ops.aten._weight_int4pack_mm
            _pack_for_gpu(described[node.args[1]], node.args[2])
        node.args = fx.node.map_aggregate(node.args, _moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _moved)
    graph.recompile()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty_strided(**x) if isinstance(x, dict) else x for x in inputs]
        for name, constant in graph.named_buffers():
            setattr(graph, name, torch.empty_strided(**_on_gpu(constant)))
    settings: dict[str, Any] = {"compile_threads": 1, "force_disable_caches": True}
    settings |= compiled.OPTIONS
    settings["joint_graph_constant_folding"] = False  # it computes on the GPU
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(settings):
        compile_fx.compile_fx(graph, fakes)


def _pack_for_gpu(like: dict[str, Any], group: int) -> None:
    """Make what describes the CPU's weights of four bits describe a GPU's (`Int4Linear`)."""
    if like["dtype"] == torch.uint8:  # else done, for another product
        outputs, pairs = like["size"]
        size = outputs // 8, 2 * pairs // group, 32, group // 32
        stride = torch.empty(size, device="meta").stride()
        like |= {"size": size, "stride": stride, "dtype": torch.int32}


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: float | None = None
) -> Tensor:
    fused = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = fused(q, k, v, attn_mask, False, 0.0, False, False, scale=scale)[0]
    return out


def launches(code: str) -> Counter[str]:
    """How often generated code launches each kernel, or calls a library."""
    body = code[code.rfind("def call(") :]
    own = re.findall(r"(\w+?)(?:_\d+)?\.run\(", body)
    calls = re.findall(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(", body)
    return Counter(own + calls)


def count(methods: list[str]) -> None:
    """Print how many graphs a round calls, and how many launches and guards each of them has."""
    parts = {method: graphs_of(wide(method)) for method in methods or COUNTED}
    for method, graphs in parts.items():
        calls = sum(traced.calls for traced in graphs.values())
        print(f"{method}: {calls} graphs a round, {graphs['record'].calls} of them for diagnostics")
    if not methods:
        # without a search of top-k, which takes half of the time
        parts["ar by cuBLAS"] = graphs_of(wide("ar", top_k=0), block=0, only="score")
        parts[SKIPPING] = graphs_of(wide("ar", top_k=0), block=0, only="score", skips=True)
        parts["ar with int4"] = graphs_of(wide("ar", "int4", top_k=0), only="score")
        parts |= {name: graphs_of(looked(*given)) for name, given in LOOKS.items()}
    codes = pretend()
    for method, graphs in parts.items():
        kernels = compile_kernels(method in ("ar", SKIPPING))
        for part, traced in graphs.items():
            codes.clear()
            generate(traced.graph, traced.inputs)
            found = sum(map(launches, codes), Counter[str]())
            print(f"{method}, {part}: {found.total()} launches, {traced.guards} guards")
            for name, number in found.most_common():
                print(f"    {number:4} {name[:90]}", flush=True)
        if kernels:
            print(passed(kernels))


def _moved(x: Any) -> Any:
    return GPU if isinstance(x, torch.device) else x


def main(arguments: list[str]) -> int:
    methods = [one for one in arguments if not one.startswith("--")]
    if "--count" in arguments:
        count(methods)
        return 0
    many = "--many" in arguments
    graphs = {method: graphs_of(small(method, many)) for method in methods or KINDS}
    graphs["ar of XL's widths"] = graphs_of(wide("ar"), skips=True)
    pretend()
    kernels = compile_kernels(True)
    failed = 0
    for method, parts in graphs.items():
        for part, traced in parts.items():
            begun, before = time.monotonic(), len(kernels)
            try:
                generate(traced.graph, traced.inputs)
            except Exception:
                traceback.print_exc()
                failed += 1
                print(f"{method}, {part}: failed", flush=True)
                continue
            seconds = time.monotonic() - begun
            number = len(kernels) - before
            print(f"{method}, {part}: {number} kernels in {seconds:.0f} s", flush=True)
    print("failed" if failed else passed(kernels))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
