"""Compiled steps of a round, by PyTorch's own means: `torch.compile` makes larger kernels, and on a
GPU its CUDA graphs launch all kernels of a step at once. The CUDA path has not run on a GPU yet;
its tests have the marker `gpu`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tempera.errors import TemperaError

StepFunction = Callable[..., Tensor]
"""A function of tensors and constants. It may write into buffers with a static address (a cache)
but must be idempotent, because it runs before its graph is captured.
"""

SHAPES = 256
"""Combinations of shapes and models for which a step may be compiled (PyTorch's default is 8)."""


def compile_step(function: StepFunction) -> StepFunction:
    """Compile a function, once for each combination of shapes. What it returns is a copy: later
    replays of its CUDA graph do not overwrite what a caller holds.

    Args:
        function: a single graph: it must not branch on values or read from the device.

    Raises:
        TemperaError: on the first call, if compilation fails, for example without a C++ compiler
            or, on a GPU, without Triton.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(SHAPES, settings.recompile_limit)
    made = torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead")

    @functools.wraps(function)
    def call(*inputs: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # views of different strides would be compiled again
        given = (part.contiguous() if isinstance(part, Tensor) else part for part in inputs)
        try:
            return made(*given).clone()
        except torch._dynamo.exc.TorchDynamoException as problem:
            cause = getattr(problem, "inner_exception", problem)
            if isinstance(cause, torch.OutOfMemoryError | MemoryError):
                raise cause from problem
            first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            raise TemperaError(
                f"the model cannot be compiled on this machine ({first.rstrip('.')}): install a "
                "C++ compiler, and on a GPU Triton, or leave compile=true out",
                option="compile",
            ) from problem

    return call
