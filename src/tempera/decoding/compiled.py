"""Compiled rounds, by PyTorch's own means: `torch.compile` makes larger kernels of a round's parts,
and on a GPU its CUDA graphs launch all kernels of a part at once (tests: `pytest -m gpu`).

What a part keeps for the next round lies in buffers of fixed addresses (`persistent`), which it
writes in place. A part neither branches on values nor reads from the device.

PyTorch's compiler takes seconds to import. `static` and `constant` set the marks that it looks for
themselves, so that a run which compiles nothing does not import it.
"""

import functools
import re
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from tempera.decoding.structure import CODE, Structure
from tempera.errors import TemperaError

Part = TypeVar("Part", bound=Callable[..., Any])
Make = TypeVar("Make", bound=Callable[..., Any])

VARIANTS = 256
"""Combinations of methods, models and shapes for which a part may be compiled (PyTorch's default is
8).
"""

OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True,
    "split_reductions": False,
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
}
"""Of PyTorch's compiler: what mode="reduce-overhead" stands for; sums over the vocabulary are not
split into kernels of their own, so that those of a draw become one; and what does not wait for each
other shares a kernel, as do the rotation of queries and the writing of keys and values.
"""
OURS = "tempera"
OUR_NAMES = rf"G\['__(import_({OURS}|torch)_dot_|builtins_dict_)"
"""How guards begin that are on names in our modules and in PyTorch's, and on Python's own."""


class Run(Protocol):
    """How a loop calls the parts of its rounds, which it binds once, before the first."""

    def __call__(self, part: Part, kind: str, /) -> Part:
        """A function that is called in place of a part: a function, or a method of a target or a
        drafter. `kind` is what timings call it: `draft`, `target`, `verify` or `commit`.
        """


def plain(part: Part, kind: str) -> Part:
    """A part as it is."""
    return part


def compiled(part: Part, kind: str) -> Part:
    """A part compiled, once for each combination of methods, models and shapes. Its first call
    compiles nothing: if no graph fits, the part runs as it is and computes what later calls find.
    What a graph computed would be overwritten.

    Raises:
        TemperaError: compilation fails.
    """
    later = graph_of(part)
    is_first = True

    def call(*arguments: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return later(*arguments)
        is_first = False
        with torch.compiler.set_stance("eager_on_recompile"):
            return later(*arguments)

    return cast(Part, call)


def graph_of(part: Part) -> Part:
    """A part that is one graph from the first call on; see `compiled`."""
    owner = getattr(part, "__self__", None)
    # one for all objects of a class whose networks are alike
    function = _compile(getattr(part, "__func__", part), Structure(owner))

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments) if owner is None else function(owner, *arguments)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode,
        ) as problem:
            raise _refusal(part, problem) from problem

    return cast(Part, call)


def _refusal(part: Callable[..., Any], problem: Exception) -> Exception:
    """What to raise where a part cannot be compiled: whose fault it is, and what to do."""
    cause = getattr(problem, "inner_exception", problem)
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return cause
    first = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
    if isinstance(problem, torch._dynamo.exc.BackendCompilerFailed):
        return TemperaError(
            f"the model cannot be compiled on this machine ({first}): install a C++ compiler, and "
            "on a GPU Triton, or give compile=false",
            option="compile",
        )
    owner = getattr(part, "__self__", None)
    named = f"`{part.__name__}`" + ("" if owner is None else f" of {type(owner).__name__}")
    for frame in list(getattr(problem, "real_stack", None) or ())[-1:]:
        first += f", in {frame.name} of {Path(frame.filename).name}, line {frame.lineno}"
    return TemperaError(
        f"{named} cannot be compiled ({first}): change it, set `compiles = False` if it is a "
        "drafter that works on the host, or give compile=false",
        option="compile",
    )


def forget() -> None:
    """Free the graphs of compiled rounds and their memory; the next rounds are compiled anew."""
    torch._dynamo.reset()
    _graphs.cache_clear()


def why_not(device: torch.device) -> str | None:
    """Why rounds cannot be compiled for a device, in one sentence; None if they can. A small
    function is compiled and called, which takes seconds.
    """
    try:
        graph_of(_twice)(torch.ones(8, device=device))
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


def _compile(part: Callable[..., Any], structure: Structure) -> Callable[..., Any]:
    made = _graphs(part, structure)
    made.modules.update(structure.modules)
    return made.function


@functools.lru_cache
def _graphs(part: Callable[..., Any], structure: Structure) -> "_Graphs":
    return _Graphs(part)


class _Graphs:
    """The graphs of a part for one structure of its owner's networks. They do not look at these
    networks any more, see `Structure`.

    Args:
        part: a function.

    Attributes:
        function: the part compiled.
        modules: of the networks of all owners.
    """

    def __init__(self, part: Callable[..., Any]) -> None:
        settings = torch._dynamo.config
        settings.recompile_limit = max(VARIANTS, settings.recompile_limit)
        self.modules = weakref.WeakSet[nn.Module]()
        own = r"|G\['(?!__)" if part.__module__.startswith(f"{OURS}.") else ""
        self._names = re.compile(OUR_NAMES + own)
        options = {**OPTIONS, "guard_filter_fn": self._wanted}
        self.function: Callable[..., Any] = torch.compile(
            _copied(part), fullgraph=True, dynamic=False, options=options
        )

    def _wanted(self, guards: Sequence[Any]) -> list[bool]:
        """Which of the guards of a graph are checked at each call: all but those on our own code
        and on modules; these are, too, if it looks at a module whose structure nobody knows.
        """
        read = [guard.value for guard in guards if isinstance(guard.value, nn.Module)]
        known = all(module in self.modules for module in read)
        return [
            not (self._is_on_our_code(guard) or (known and _is_on_module(guard)))
            for guard in guards
        ]

    def _is_on_our_code(self, guard: Any) -> bool:
        """Whether a name in our modules, PyTorch's or Python's, or a method of our classes, is to
        mean what it did. Nobody changes these while images are decoded, but what others' modules
        and objects mean by a name may change.
        """
        name, value = guard.name, guard.value
        if isinstance(value, types.FunctionType) and name.startswith(("type(", "dict(type(")):
            return value.__module__.partition(".")[0] == OURS
        is_code = isinstance(value, (*CODE, type, torch._ops.OpOverload))
        return is_code and self._names.match(name) is not None


def _is_on_module(guard: Any) -> bool:
    return bool(guard.orig_guard.source.is_unspecialized_nn_module())


def _copied(part: Callable[..., Any]) -> Callable[..., Any]:
    """A function like this one, for which PyTorch keeps other graphs."""
    function = cast(types.FunctionType, part)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    vars(copy).update(vars(function))
    return copy


class Captured:
    """CUDA graphs of a function that is not compiled: capturing one takes as long as two calls,
    where compiling it for one shape takes half a minute. Inputs of the same shapes share a graph,
    which is captured when they come a second time; on a CPU the function runs as it is.

    What the function reads and writes beside its inputs must keep its address.
    """

    def __init__(self) -> None:
        self._seen = set[tuple[torch.Size, ...]]()
        self._graphs: dict[tuple[torch.Size, ...], CUDAGraph] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What a function returns for its inputs; the next call may overwrite it."""
        shapes = tuple(one.shape for one in inputs)
        if shapes not in self._seen or not has_cuda_graphs(inputs[0].device):
            self._seen.add(shapes)
            return function(*inputs)
        if shapes not in self._graphs:
            pools = [graph.pool for graph in self._graphs.values()]
            self._graphs[shapes] = CUDAGraph(function, inputs, pools[0] if pools else None)
        return self._graphs[shapes].replay(*inputs)


class CUDAGraph:
    """A call of a function, which can be replayed with other inputs of the same shapes.

    Args:
        function: has run with inputs of these shapes.
        inputs: what it is called with.
        pool: of graphs whose memory this one may use, too.
    """

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], pool: Any
    ) -> None:
        self._inputs = [one.clone() for one in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(inputs[0].device)
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self._output = function(*self._inputs)
        self.pool = self._graph.pool()

    def replay(self, *inputs: Tensor) -> Tensor:
        """What the function returns for these inputs, until the next replay."""
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value)
        self._graph.replay()
        return self._output


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether work on a device can be captured."""
    return device.type == "cuda"


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs, because cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


def persistent(buffer: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
    """A value in a buffer that keeps its address from batch to batch, as CUDA graphs need: in
    `buffer` if that has its shape, dtype and device, else in a new one. With `rows`, int64 [M], it
    is the value of these rows of `buffer`, which keeps the others.
    """
    if rows is not None:
        return buffer.index_copy_(0, rows, value.to(buffer))
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
