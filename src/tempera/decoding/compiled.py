"""Compiled rounds, by PyTorch's own means: `torch.compile` makes larger kernels of a round's parts,
and on a GPU a CUDA graph of each part launches all its kernels at once (tests: `pytest -m gpu`).

A CUDA graph reads and writes where it did when it was captured. So what a part keeps for the next
round lies in buffers of fixed addresses (`persistent`), which it writes in place. PyTorch's own
graphs (`mode="reduce-overhead"`) copy all other inputs, and look at guards, addresses and outputs
at every call: for a round of many small kernels the host would take longer than the device. Here
all of it is looked at until rounds have settled (`Settling`), and again when rows begin; from then
on a part that gets the same arguments is replayed. A part neither branches on values nor reads from
the device.

PyTorch's compiler takes seconds to import. `constant` sets the mark that it looks for itself, so
that a run which compiles nothing does not import it.
"""

import functools
import gc
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from tempera.decoding.structure import CODE, Structure
from tempera.errors import TemperaError

Part = TypeVar("Part", bound=Callable[..., Any])
Make = TypeVar("Make", bound=Callable[..., Any])

VARIANTS = 256
"""Combinations of methods, models and shapes for which a part may be compiled (PyTorch's default is
8).
"""

GRAPHS = 2
"""Most CUDA graphs of a part's code, each for inputs elsewhere in memory."""

OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "split_reductions": False,
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
}
"""Of PyTorch's compiler: CUDA graphs are our own; sums over the vocabulary are not split into
kernels of their own, so that those of a draw become one; and what does not wait for each other
shares a kernel, as do the rotation of queries and the writing of keys and values.
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


class Settling:
    """Whether rounds have settled: all parts of one have replayed the CUDA graphs of the round
    before, which read and write the same addresses, and nothing else has touched these since.
    """

    def __init__(self) -> None:
        self.is_settled = False
        self.is_new = True
        self._seen: list[object] = []

    def begin_rows(self) -> None:
        """Rows begin: what belongs to them may have moved."""
        self.is_new = True

    def begin_round(self, *others: object) -> None:
        """A round begins. `others` are objects whose attributes anyone may replace between rounds,
        such as a rule that a watcher adapts.
        """
        seen = [it for other in others for it in getattr(other, "__dict__", {}).values()]
        is_same = len(seen) == len(self._seen) and all(map(is_, seen, self._seen))
        self.is_settled = is_same and not self.is_new
        self.is_new = False
        self._seen = seen


def compiled(part: Part, kind: str, rounds: Settling | None = None) -> Part:
    """A part compiled, once for each combination of methods, models and shapes. Its first call
    compiles nothing: if no graph fits, the part runs as it is and computes what later calls find.
    What it returns is overwritten by its next call.

    Args:
        part, kind: see `Run`.
        rounds: that it is a part of. When they have settled, it replays its CUDA graph as long as
            it gets the same arguments, without a look at anything else.

    Raises:
        TemperaError: compilation fails.
    """
    return cast(Part, _Compiled(part, rounds))


def graph_of(part: Part) -> Part:
    """A part that is one graph from the first call on; see `compiled`."""
    return cast(Part, _Compiled(part, None, is_first=False))


class _Compiled:
    """See `compiled`."""

    def __init__(
        self, part: Callable[..., Any], rounds: Settling | None, is_first: bool = True
    ) -> None:
        self._part = part
        self._owner = getattr(part, "__self__", None)
        # one for all objects of a class whose networks are alike
        self._function = _compile(getattr(part, "__func__", part), Structure(self._owner))
        self._rounds = Settling() if rounds is None else rounds
        self._is_first = is_first
        self._given: tuple[object, ...] = ()
        self._returned: Any = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, *arguments: Any) -> Any:
        is_same = all(map(is_, arguments, self._given))
        if self._replay is not None and self._rounds.is_settled and is_same:
            self._replay()
            return self._returned
        self._returned = self._look_and_call(arguments)
        self._given = arguments
        replay = _last.replay
        if replay is None or replay is not self._replay:
            self._rounds.is_new = True
        self._replay = replay
        return self._returned

    def _look_and_call(self, arguments: tuple[Any, ...]) -> Any:
        _last.replay = None
        if self._owner is not None:
            arguments = self._owner, *arguments
        try:
            if not self._is_first:
                return self._function(*arguments)
            self._is_first = False
            with torch.compiler.set_stance("eager_on_recompile"):
                return self._function(*arguments)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode,
        ) as problem:
            raise _refusal(self._part, problem) from problem


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
    gc.collect()  # what is compiled and its guards know each other


def why_not(device: torch.device) -> str | None:
    """Why rounds cannot be compiled for a device, in one sentence; None if they can. A small
    function is compiled and called, which takes seconds.
    """
    try:
        call, x = graph_of(_twice), torch.ones(8, device=device)
        call(x), call(x)  # the second one is captured
    except TemperaError as problem:
        return str(problem)
    return None


def _twice(x: Tensor) -> Tensor:
    return 2 * x


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
        self.function: Callable[..., Any] = torch.compile(
            _copied(part),
            backend=_backend,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": self._wanted},
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


_last = threading.local()
"""Of each thread, `replay`: what its last call of a compiled function replayed, if it did."""


def _backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    run = generated(graph, inputs)
    return _Replays(run) if is_replayed(inputs) else run


class _Replays:
    """The code of a graph, and CUDA graphs of it: one for inputs that have been at the same
    addresses in two calls one after the other.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._places: tuple[object, ...] = ()
        self._captured: dict[tuple[object, ...], Graph] = {}

    def __call__(self, *inputs: Any) -> Any:
        places = tuple(map(_place, inputs))
        if places not in self._captured:
            if places != self._places:
                self._places = places
                return self._run(*inputs)
            if len(self._captured) == GRAPHS:
                del self._captured[next(iter(self._captured))]  # the oldest
            self._captured[places] = captured(self._run, inputs)
        graph = self._captured[places]
        graph.replay()
        _last.replay = graph.replay
        return graph.outputs


def _place(x: object) -> object:
    """Where the numbers of a tensor are; of a quantised one, those of its parts."""
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "__tensor_flatten__"):
        return tuple(_place(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.data_ptr()


def generated(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The code that PyTorch's compiler generates for a graph."""
    run: Callable[..., Any] = torch._inductor.compile(graph, inputs, options=OPTIONS)
    return run


def is_replayed(inputs: Sequence[Any]) -> bool:
    """Whether code with these inputs is replayed as a CUDA graph: they are on one GPU."""
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    return len(devices) == 1 and devices.pop().type == "cuda"


class Graph(NamedTuple):
    """A CUDA graph of a call.

    Attributes:
        replay: carries the call out.
        outputs: what it returns, which each replay overwrites.
        pool: of its memory.
    """

    replay: Callable[[], None]
    outputs: Any
    pool: Any


def captured(run: Callable[..., Any], inputs: Sequence[Any], pool: Any = None) -> Graph:
    """A CUDA graph of a call, which is not carried out.

    Args:
        run: a function that has been called with such inputs.
        inputs: where they will lie, too.
        pool: of graphs that live as long. Each overwrites the outputs of those captured after it.

    Raises:
        TemperaError: something in it cannot be part of a CUDA graph.
    """
    device = next(x.device for x in inputs if isinstance(x, Tensor))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # cuBLAS's workspace would be that of another graph, which may be freed before this one
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.stream(torch.cuda.current_stream(device)),  # also where a capture fails
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            outputs = run(*inputs)
    except RuntimeError as problem:
        context = problem.__context__  # a capture that ends after an error raises one of its own
        cause = context if isinstance(context, RuntimeError) else problem
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        first = str(cause).strip().partition("\n")[0].rstrip(".")
        raise TemperaError(
            f"a round cannot be captured as a CUDA graph ({first}): give compile=false",
            option="compile",
        ) from cause
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return Graph(graph.replay, outputs, graph.pool())


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
        self._graphs: dict[tuple[torch.Size, ...], tuple[list[Tensor], Graph]] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What a function returns for its inputs; the next call may overwrite it."""
        shapes = tuple(one.shape for one in inputs)
        if shapes not in self._seen or not is_replayed(inputs):
            self._seen.add(shapes)
            return function(*inputs)
        if shapes not in self._graphs:
            copies = [one.clone() for one in inputs]
            pools = [graph.pool for _, graph in self._graphs.values()]
            self._graphs[shapes] = copies, captured(function, copies, *pools[:1])
        copies, graph = self._graphs[shapes]
        for copy, value in zip(copies, inputs, strict=True):
            copy.copy_(value)
        graph.replay()
        return cast(Tensor, graph.outputs)


def persistent(buffer: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
    """A value in a buffer that keeps its address from batch to batch, and so keeps the CUDA graphs
    that read it: in `buffer` if that has its shape, dtype and device, else in a new
    one. With `rows`, int64 [M], it is the value of these rows of `buffer`, which keeps the others.
    """
    if rows is not None:
        return buffer.index_copy_(0, rows, value.to(buffer))
    like = buffer.shape, buffer.dtype, buffer.device
    if like == (value.shape, value.dtype, value.device):
        return buffer.copy_(value)
    return value.clone(memory_format=torch.contiguous_format)


class Buffers:
    """Tensors that keep their addresses from batch to batch, by name and shape.

    Attributes:
        tables: tensors that are made while rounds run, by the shape that they have, and name.
    """

    def __init__(self) -> None:
        self.tables: dict[tuple[int, ...], dict[str, Tensor]] = {}
        self._kept: dict[object, Tensor] = {}

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """A tensor of zeros."""
        return self._buffer(name, shape, dtype, device).zero_()

    def copy(self, name: str, value: Tensor) -> Tensor:
        """A copy of a tensor."""
        return self._buffer(name, value.shape, value.dtype, value.device).copy_(value)

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        key = name, *shape, dtype, torch.device(device)
        if key not in self._kept:
            with torch.inference_mode(False):  # others write into it, too
                self._kept[key] = torch.zeros(*shape, dtype=dtype, device=device)
        return self._kept[key]


def constant(function: Make) -> Make:
    """Compiled rounds call this function when they are traced, and take what it returns for a
    constant.
    """
    vars(function)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result
    return function
