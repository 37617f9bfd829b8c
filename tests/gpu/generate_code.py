"""Generates the code of compiled rounds for an H100 on a machine without a GPU, and lets Triton
compile it: what cannot be generated is known before there is a card. Nothing is run.

    python tests/gpu/generate_code.py [--many] [METHOD ...]

It needs a build of torch with CUDA and Triton (tried with torch 2.14.1), whose private functions it
replaces, and takes one to five minutes a method. Methods are those of `test_compiled.py`, by
default one of each kind; `--many` takes a vocabulary of 16,384, as LlamaGen has. It prints a line
for each part of a round and ends with 1 if one of them fails.
"""

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS / "support", TESTS / "decoding", TESTS.parent / "examples"))]

import torch  # noqa: E402
import triton  # noqa: E402
from test_compiled import captioned, decoded, of_many_codes  # noqa: E402
from torch import Tensor, fx  # noqa: E402
from torch._dynamo import device_interface  # noqa: E402
from torch._guards import TracingContext, tracing  # noqa: E402
from torch._inductor import async_compile, compile_fx, config  # noqa: E402
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from tempera.decoding import compiled  # noqa: E402

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
Graphs = dict[str, tuple[fx.GraphModule, list[Any]]]


def graphs_of(method: str, many: bool) -> Graphs:
    """The graph and the inputs of each part of a method's rounds, traced on the CPU."""
    found: Graphs = {}
    made: dict[Any, Callable[..., Any]] = {}

    def run(part: Callable[..., Any], _: object) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            like = [_on_gpu(x) if isinstance(x, Tensor) else x for x in inputs]
            found.setdefault(part.__name__, (graph, like))
            return graph.forward

        if part not in made:
            made[part] = torch.compile(part, backend=keep, fullgraph=True, dynamic=False)
        return made[part]

    torch._dynamo.reset()
    compiled._compile = run  # type: ignore[assignment]
    target = of_many_codes() if many else captioned()
    target.compile()
    decoded(method, False, target)
    return found


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
    """Make PyTorch and Triton believe in an H100; returns the names of the kernels that Triton
    compiles from now on.
    """
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
    kernels: list[str] = []
    inductor: Any = async_compile

    def compiled(_: Any, name: str, source: str, **__: Any) -> Any:
        kernel = inductor._load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)  # compiles for the driver's target, loads nothing
        kernels.append(name)
        return kernel

    inductor.AsyncCompile.triton = compiled
    return kernels


def generate(graph: fx.GraphModule, inputs: list[Any]) -> None:
    """Generate and compile the code of a graph for the GPU."""
    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _moved)
    graph.recompile()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty_strided(**x) if isinstance(x, dict) else x for x in inputs]
    settings = {"compile_threads": 1, "force_disable_caches": True}
    settings["joint_graph_constant_folding"] = False  # it computes on the GPU
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(settings):
        compile_fx.compile_fx(graph, fakes)


def _moved(x: Any) -> Any:
    return GPU if isinstance(x, torch.device) else x


def main(arguments: list[str]) -> int:
    many = "--many" in arguments
    methods = [one for one in arguments if one != "--many"] or list(KINDS)
    graphs = {method: graphs_of(method, many) for method in methods}
    kernels = pretend()
    failed = 0
    for method, parts in graphs.items():
        for part, (graph, inputs) in parts.items():
            begun, before = time.monotonic(), len(kernels)
            try:
                generate(graph, inputs)
            except Exception:
                traceback.print_exc()
                failed += 1
                print(f"{method}, {part}: failed", flush=True)
                continue
            seconds = time.monotonic() - begun
            count = len(kernels) - before
            print(f"{method}, {part}: {count} kernels in {seconds:.0f} s", flush=True)
    print("failed" if failed else f"passed: {len(kernels)} kernels compiled for {H100.name}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
