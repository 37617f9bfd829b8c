"""Compiled rounds, by PyTorch's own means: `torch.compile` makes larger kernels of a round's parts,
and on a GPU its CUDA graphs launch all kernels of a part at once (tests: `pytest -m gpu`).

What a part keeps for the next round lies in buffers of fixed addresses (`kept`), which it writes in
place. A part neither branches on values nor reads from the device.

PyTorch's compiler takes seconds to import. `static` and `constant` set the marks that it looks for
themselves, so that a run which compiles nothing does not import it.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tempera.errors import TemperaError

Result = TypeVar("Result")
Make = TypeVar("Make", bound=Callable[..., Any])

VARIANTS = 256
"""Combinations of methods, models and shapes for which a part may be compiled (PyTorch's default is
8).
"""


def plain(part: Callable[..., Result], *arguments: Any) -> Result:
    """Call a part of a round as it is."""
    return part(*arguments)


def compiled(part: Callable[..., Result], *arguments: Any) -> Result:
    """Call a part of a round compiled: once for each combination of methods, models and shapes.

    Args:
        part: a function of the module's top level; it becomes one graph.
        arguments: of the function.

    Raises:
        TemperaError: compilation fails, for example without a C++ compiler or, on a GPU, without
            Triton.
    """
    try:
        result: Result = _compile(part)(*arguments)
        return result
    except torch._dynamo.exc.TorchDynamoException as problem:
        cause = getattr(problem, "inner_exception", problem)
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            raise cause from problem
        first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise TemperaError(
            f"the model cannot be compiled on this machine ({first.rstrip('.')}): install a C++ "
            "compiler, and on a GPU Triton, or give compile=false",
            option="compile",
        ) from problem


def forget() -> None:
    """Free the graphs of compiled rounds and their memory; the next rounds are compiled anew."""
    torch._dynamo.reset()


def why_not(device: torch.device) -> str | None:
    """Why rounds cannot be compiled for a device, in one sentence; None if they can. A small
    function is compiled and called, which takes seconds.
    """
    try:
        compiled(_twice, torch.ones(8, device=device))
    except TemperaError as problem:
        return str(problem)
    return None


def _twice(x: Tensor) -> Tensor:
    return 2 * x


def begin_step() -> None:
    """Say that a round begins. Outputs of compiled parts live until then; without it, each call on
    a GPU would give up the outputs of the call before, which it is to read.
    """
    torch.compiler.cudagraph_mark_step_begin()


@functools.lru_cache(maxsize=8)  # a round has four parts
def _compile(part: Callable[..., Result]) -> Callable[..., Result]:
    settings = torch._dynamo.config
    settings.recompile_limit = max(VARIANTS, settings.recompile_limit)
    made: Callable[..., Result] = torch.compile(
        part, fullgraph=True, dynamic=False, mode="reduce-overhead"
    )
    return made


def kept(buffer: Tensor, value: Tensor) -> Tensor:
    """A value in a buffer that keeps its address from batch to batch, as CUDA graphs need: in
    `buffer` if that has its shape, dtype and device, else in a new one.
    """
    like = buffer.shape, buffer.dtype, buffer.device
    if like == (value.shape, value.dtype, value.device):
        return buffer.copy_(value)
    return static(value.clone(memory_format=torch.contiguous_format))


def static(tensor: Tensor) -> Tensor:
    """The same tensor, which compiled rounds read and write where it lies: on a GPU, each replay of
    a graph copies all other inputs to where the graph reads them.
    """
    vars(tensor)["_dynamo_static_input_type"] = "unguarded"  # as torch._dynamo.mark_static_address
    return tensor


def constant(function: Make) -> Make:
    """Compiled rounds call this function when they are traced, and take what it returns for a
    constant.
    """
    vars(function)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result
    return function
