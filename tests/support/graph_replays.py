"""CUDA graphs on a CPU: what `torch.compile(mode="reduce-overhead")` asks of compiled code, and
`torch.cuda.graph` of captured code.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_reads import HostReads
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tempera.decoding import compiled

MADE_ON_A_DEVICE = (
    torch.arange,
    torch.empty,
    torch.full,
    torch.ones,
    torch.rand,
    torch.zeros,
)
LONGEST_SUM = 8192
STATIC = "_dynamo_static_input_type"


class GraphReplays:
    """Stands in for `compiled._compile`: each part is one graph that is replayed. `capture` stands
    in for `compiled.CUDAGraph`.

    - A graph reads its inputs where they were when it was made. Those that are not marked static
      are copied there at each replay; static ones must be there still.
    - Outputs live until the next step begins, and are then overwritten. A step begins at
      `begin_step`, which stands in for `torch.compiler.cudagraph_mark_step_begin`; if that is never
      called, at each call.
    - A graph neither reads on the host, nor makes tensors on the CPU, nor writes into an input that
      is not static.
    - No code is generated for a sum over more than 8,192 tokens: torch 2.11 cannot do it.

    Attributes:
        variants: how many graphs were made of each part, by its name.
        calls: the parts in the order in which their graphs run, and "step".
        copied: bytes of each input that every replay copies, by part and by the name of the input.
        captured: what was captured.
    """

    def __init__(self) -> None:
        self.variants: Counter[str] = Counter()
        self.calls: list[str] = []
        self.copied: dict[str, dict[str, int]] = {}
        self.captured: list[Capture] = []
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._outputs: list[Tensor] = []
        self._marked = False
        self._part = ""

    def __call__(self, part: Callable[..., Any], _: object = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not self._marked:
                self._overwrite()
            self._part = part.__name__
            if part not in self._compiled:
                self._compiled[part] = torch.compile(
                    part, backend=self._graph, fullgraph=True, dynamic=False
                )
            with _disable_current_modes():
                return self._compiled[part](*arguments)

        return call

    def capture(
        self, function: Callable[..., Tensor], inputs: list[Tensor], pool: object
    ) -> "Capture":
        """A call of a function, captured."""
        self.captured.append(Capture(function, inputs))
        return self.captured[-1]

    def begin_step(self) -> None:
        """A round begins."""
        self._marked = True
        self.calls.append("step")
        self._overwrite()

    def _overwrite(self) -> None:
        with _disable_current_modes():
            for output in self._outputs:
                whole = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage())
                if output.dtype == torch.bool:
                    whole.logical_not_()
                elif output.is_floating_point():
                    whole.fill_(torch.nan)
                else:
                    whole.fill_(torch.iinfo(output.dtype).max)
        self._outputs.clear()

    def _graph(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend: called once for each variant."""
        self.variants[self._part] += 1
        for node in graph.graph.nodes:
            assert node.target is not torch.tensor, f"a constant of the host: {node.stack_trace}"
            if node.target in MADE_ON_A_DEVICE:
                assert node.kwargs.get("device"), f"made on the CPU: {node.stack_trace}"
            if node.target in ("cumsum", torch.cumsum):
                length = node.meta["example_value"].shape[-1]
                assert length <= LONGEST_SUM, f"torch 2.11 cannot generate: {node.stack_trace}"
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        read = [_Input(*pair) for pair in zip(placeholders, inputs, strict=True)]
        return _Graph(self, self._part, graph, read)

    def runs(self, part: str) -> None:
        """A graph of a part runs."""
        self.calls.append(part)

    def returned(self, outputs: list[Tensor]) -> None:
        """Outputs of a graph, to be overwritten when the next step begins."""
        self._outputs += outputs


def replayed(monkeypatch: pytest.MonkeyPatch) -> GraphReplays:
    """Run the parts of compiled rounds as CUDA graphs would."""
    torch._dynamo.reset()
    made = GraphReplays()
    monkeypatch.setattr(compiled, "_compile", made)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", made.begin_step)
    monkeypatch.setattr(compiled, "CUDAGraph", made.capture)
    monkeypatch.setattr(compiled, "has_cuda_graphs", lambda device: True)
    return made


class Capture:
    """The operations of a call, which are repeated on the tensors of this call: nothing else of the
    function runs again, the host reads nothing, and the output is overwritten by the next replay.

    Attributes:
        function: the function's name.
        shapes: of its inputs.
        replays: how often it was replayed.
        pool: stands for its memory.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        self.function = function.__name__
        self.shapes = tuple(one.shape for one in inputs)
        self.replays = 0
        self.pool = self
        self._inputs = [one.clone() for one in inputs]
        steps, reads = _Steps(), HostReads()
        with _disable_current_modes(), reads, steps:
            self._output = function(*self._inputs)
        assert not reads.count, f"captured code reads on the host: {dict(reads.count)}"
        self._steps = steps.all

    def replay(self, *inputs: Tensor) -> Tensor:
        """Repeat them with other inputs."""
        self.replays += 1
        with _disable_current_modes():
            for place, value in zip(self._inputs, inputs, strict=True):
                place.copy_(value)
            now: dict[int, Any] = {}  # what each tensor of the captured call is in this one
            for function, arguments, options, results in self._steps:
                found = function(
                    *tree_map(lambda x: now.get(id(x), x), arguments),
                    **tree_map(lambda x: now.get(id(x), x), options),
                )
                before = map(id, tree_leaves(results))
                now.update(zip(before, tree_leaves(found), strict=True))
            return self._output.copy_(now[id(self._output)])


class _Steps(TorchDispatchMode):
    """Keeps every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        results = function(*arguments, **options or {})
        self.all.append((function, arguments, options or {}, results))
        return results


class _Input:
    """Where a graph reads an input."""

    def __init__(self, node: fx.Node, example: Any) -> None:
        self.name = node.meta["grapharg"].source.name
        self.tensor = isinstance(example, Tensor)
        self.static = self.tensor and STATIC in node.meta["tensor_dict"]
        self.place: int | None = None  # of a static one
        if self.tensor and not self.static:
            strides = example.stride()
            self._copy = torch.empty_strided(example.shape, strides, dtype=example.dtype)
            self._written = self._narrow(self._copy)
            self.nbytes = self._written.nbytes

    @staticmethod
    def _narrow(x: Tensor) -> Tensor:
        """Without repetitions of expanded dimensions."""
        for dim, stride in enumerate(x.stride()):
            if stride == 0:
                x = x.narrow(dim, 0, min(1, x.shape[dim]))
        return x

    def read(self, given: Any) -> Any:
        if not self.tensor:
            return given
        if self.static:
            if not given.is_mkldnn:  # packed weights, on CPUs alone
                self.place = self.place or given.data_ptr()
                assert given.data_ptr() == self.place, f"the static {self.name} has moved"
            return given
        self._written.copy_(self._narrow(given))
        self._version = self._copy._version
        return self._copy

    def check(self) -> None:
        if self.tensor and not self.static:
            assert self._copy._version == self._version, f"written, but not static: {self.name}"


class _Graph:
    def __init__(
        self, replays: GraphReplays, part: str, graph: fx.GraphModule, inputs: list[_Input]
    ) -> None:
        self.replays = replays
        self.part = part
        self.graph = graph
        self.inputs = inputs
        copied = {one.name: one.nbytes for one in inputs if one.tensor and not one.static}
        replays.copied.setdefault(part, {}).update(copied)

    def __call__(self, *given: Any) -> Any:
        self.replays.runs(self.part)
        read = [one.read(value) for one, value in zip(self.inputs, given, strict=True)]
        reads = HostReads()
        with reads:
            outputs = self.graph.forward(*read)
        assert not reads.count, f"a graph reads on the host: {dict(reads.count)}"
        for one in self.inputs:
            one.check()
        copies = {
            _storage(copy): value
            for one, copy, value in zip(self.inputs, read, given, strict=True)
            if one.tensor and not one.static
        }
        static = {
            _storage(value)
            for one, value in zip(self.inputs, read, strict=True)
            if one.static and not value.is_mkldnn
        }
        returned, own = [], []
        for output in outputs:
            if isinstance(output, Tensor) and _storage(output) in copies:
                output = _same_view(output, copies[_storage(output)])
            elif isinstance(output, Tensor) and _storage(output) not in static:
                own.append(output)
            returned.append(output)
        self.replays.returned(own)
        return tuple(returned)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _same_view(of_copy: Tensor, original: Tensor) -> Tensor:
    """The view of an input that a graph returned of its copy."""
    offset = original.storage_offset() + of_copy.storage_offset()
    return original.as_strided(of_copy.shape, of_copy.stride(), offset)
