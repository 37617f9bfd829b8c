"""The steps of a round, compiled: fewer and larger kernels (`compile_step`), and on a GPU one
launch for all of them (`cuda_graphed`).

The graphs are captured explicitly: `torch.compile(mode="reduce-overhead")` skips functions that
write into their inputs, with no more than a warning, and every step writes into its cache.
They follow PyTorch's notes on CUDA graphs (static inputs, warm-up on a side stream, capture,
replay). The part for CUDA has not been run on a GPU yet; `tests/test_compiled.py` holds its test.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tempera.errors import CannotCompile

StepFunction = Callable[..., Tensor]
"""A function of tensors and hashable constants. It may write into memory that outlives it (a
cache), provided that running it again changes nothing: a CUDA graph is warmed up before capture.
"""

WARMUP = 3
"""Calls before a capture, in which kernels are compiled and libraries initialise."""

SHAPES = 256
"""Combinations of shapes for which a step may be compiled (PyTorch's own limit is 8); decoding
meets few, and they are known.
"""


def compile_step(function: StepFunction) -> StepFunction:
    """The function, compiled by TorchInductor anew for each combination of shapes that it meets.

    Args:
        function: one graph: no branch on a value, no read from the device.

    Raises:
        TemperaError: when called, where nothing can be compiled: there is no C++ compiler, or on a
            GPU no Triton.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(SHAPES, settings.recompile_limit)
    made = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def call(*inputs: Any) -> Tensor:
        try:
            return made(*inputs)
        except torch._dynamo.exc.TorchDynamoException as problem:
            raise _told(problem) from problem

    return call


def cuda_graphed(function: StepFunction, device: torch.device) -> StepFunction:
    """The function, on CUDA as a graph for each combination of shapes that it meets; on another
    device the function itself.
    """
    return Recorded(function, device) if device.type == "cuda" else function


class Recorded:
    """A function whose kernels are recorded as CUDA graphs.

    Args:
        function: reads and writes the same memory at every call, but for its arguments.
        device: where these are.
    """

    def __init__(self, function: StepFunction, device: torch.device) -> None:
        self.function, self.device = function, device
        self._recordings: dict[Hashable, _Recording] = {}

    def __call__(self, *inputs: Any) -> Tensor:
        """What the function returns, in memory of the caller's own."""
        key = tuple(
            (part.shape, part.dtype) if isinstance(part, Tensor) else part for part in inputs
        )
        if key not in self._recordings:
            with torch.cuda.device(self.device):
                self._recordings[key] = _Recording(self.function, inputs)
        return self._recordings[key].replay(inputs)


class _Recording:
    """The kernels of one call. Inputs are copied into memory of its own, and the output out of it:
    no caller sees the next replay.
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
        """Run on other values of the same shapes; constants are the recorded ones."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self._graph.replay()
        return self._output.clone()


def _told(problem: Exception) -> Exception:
    """What to raise: for want of memory that itself, otherwise one sentence."""
    cause = getattr(problem, "inner_exception", None) or problem
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return cause
    first = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
    return CannotCompile(first)
