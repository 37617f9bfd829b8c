"""Compiled steps of a round: fewer, larger kernels (`compile_step`), and on a GPU a single launch
for all kernels of a pass (`cuda_graphed`) or of a whole round (`CudaRecorder`).

Graphs are captured explicitly: `torch.compile(mode="reduce-overhead")` skips functions that write
into their inputs, with only a warning, and every step writes into its cache. Capture follows
PyTorch's notes on CUDA graphs: static inputs, warm-up on a side stream, capture, replay. The CUDA
path has not run on a GPU yet; its tests have the marker `gpu`.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.round_graph import Recording, RoundGraphs
from tempera.decoding.tape import TapeRecorder
from tempera.decoding.timing import PartTimer, no_clock
from tempera.errors import CannotCompile

StepFunction = Callable[..., Tensor]
"""A function of tensors and hashable constants. It may write into memory that outlives the call (a
cache) but must be idempotent, because a CUDA graph is warmed up before capture.
"""

WARMUP = 3
"""Calls before a capture, in which kernels are compiled and libraries are initialised."""

SHAPES = 256
"""Combinations of shapes for which a step may be compiled (PyTorch's default is 8). Decoding uses
few.
"""

_WHOLE = ContextVar("whole round", default=False)
"""Whether a whole round runs as one graph, so that its passes need none of their own."""


def compile_step(function: StepFunction) -> StepFunction:
    """Compile a function with TorchInductor, once for each combination of shapes.

    Args:
        function: a single graph: it must not branch on values or read from the device.

    Raises:
        CannotCompile: on the first call, if compilation fails, for example without a C++ compiler
            or, on a GPU, without Triton.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(SHAPES, settings.recompile_limit)
    made = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def call(*inputs: Any) -> Tensor:
        try:
            return made(*inputs)
        except torch._dynamo.exc.TorchDynamoException as problem:
            raise _cause(problem) from problem

    return call


def cuda_graphed(function: StepFunction, device: torch.device) -> StepFunction:
    """On CUDA, the function as CUDA graphs, one for each combination of shapes; on other devices
    the function itself.
    """
    return GraphedFunction(function, device) if device.type == "cuda" else function


class GraphedFunction:
    """A function that runs as a CUDA graph.

    Args:
        function: apart from its arguments, it reads and writes the same memory in every call.
        device: the device of that memory.
    """

    def __init__(self, function: StepFunction, device: torch.device) -> None:
        self.function, self.device = function, device
        self._graphs: dict[Hashable, _CapturedGraph] = {}

    def __call__(self, *inputs: Any) -> Tensor:
        """Capture on the first call with these shapes and constants, then replay; returns a copy
        of the function's output. As a part of a whole round's graph, only run the function.
        """
        if _WHOLE.get():
            return self.function(*inputs)
        key = tuple(
            (part.shape, part.dtype) if isinstance(part, Tensor) else part for part in inputs
        )
        if key not in self._graphs:
            with torch.cuda.device(self.device):
                self._graphs[key] = _CapturedGraph(self.function, inputs)
        return self._graphs[key].replay(inputs)


class _CapturedGraph:
    """The CUDA graph of one call. Inputs are copied into its static memory and the output is copied
    out, so a later replay does not overwrite what a caller holds.
    """

    def __init__(self, function: StepFunction, inputs: tuple[Any, ...]) -> None:
        self._inputs = [part.clone() if isinstance(part, Tensor) else part for part in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._output = function(*self._inputs)

    def replay(self, inputs: tuple[Any, ...]) -> Tensor:
        """Run on new tensors of the same shapes; constants are those of the capture."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self._graph.replay()
        return self._output.clone()


@dataclass
class _CudaRound:
    """The CUDA graph of a round; what it holds cannot be compared."""

    graph: torch.cuda.CUDAGraph
    confirmed: bool = True

    def replay(self, clock: PartTimer) -> None:
        """Launch all its kernels at once; nothing is timed."""
        self.graph.replay()


class CudaRecorder:
    """Records rounds as CUDA graphs, which share one pool of memory: they never run at the same
    time, and leave their results outside of it. Implements `round_graph.GraphRecorder`.
    """

    warm_up = 2
    runs_ahead = True
    times_parts = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def run(self, step: Callable[[PartTimer], None], clock: PartTimer) -> None:
        """Run a step on the stream that rounds are recorded on."""
        with self._whole_round():
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                step(no_clock)
            here.wait_stream(self._stream)

    def record(
        self,
        step: Callable[[PartTimer], None],
        before: Recording | None,
        carried: Sequence[Tensor],
    ) -> Recording:
        """Run a step and record it."""
        graph = torch.cuda.CUDAGraph()
        with self._whole_round(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step(no_clock)
        graph.replay()
        return _CudaRound(graph)

    def send(self, numbers: Tensor) -> Callable[[], list[list[float]]]:
        """Start to copy numbers to the host; the function returned waits for them."""
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        with torch.cuda.device(self.device):
            host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> list[list[float]]:
            copied.synchronize()
            return host.tolist()

        return wait

    @contextmanager
    def _whole_round(self) -> Iterator[None]:
        """On the device, and without graphs of single passes."""
        before = _WHOLE.set(True)
        try:
            with torch.cuda.device(self.device):
                yield
        finally:
            _WHOLE.reset(before)


def round_graphs(device: torch.device, compiled: bool) -> RoundGraphs | None:
    """Graphs for whole rounds: of compiled steps on CUDA, of plain ones on a CPU; else None."""
    if device.type == "cpu" and not compiled:
        return RoundGraphs(TapeRecorder())
    return RoundGraphs(CudaRecorder(device)) if device.type == "cuda" and compiled else None


def _cause(problem: Exception) -> Exception:
    """The exception to raise for a failed compilation: the original one if memory ran out,
    otherwise `CannotCompile` with its first line.
    """
    cause = problem
    if isinstance(problem, torch._dynamo.exc.BackendCompilerFailed):
        cause = problem.inner_exception
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return cause
    first = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
    return CannotCompile(first)
