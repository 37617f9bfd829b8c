"""CUDA graphs on a CPU: what they do to compiled rounds."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from host_reads import HostReads
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class GraphReplays:
    """Stands in for code that is generated, and for CUDA graphs of it: operations on the tensors of
    the call that was captured, whatever later calls pass, with outputs where they were then.

    - A graph neither reads on the host, nor makes tensors on the CPU.
    - No code is generated for a sum over more than 8,192 tokens: torch 2.11 cannot do it.

    Attributes:
        variants: how many graphs were made of each part, by its name.
        captures: how many of them were captured for CUDA graphs, as often as they were.
        calls: the parts in the order in which their graphs run.
        replays: those of them that are replayed without a look at guards and inputs.
    """

    def __init__(self) -> None:
        self.variants: Counter[str] = Counter()
        self.captures: Counter[str] = Counter()
        self.calls: list[str] = []
        self.replays: Counter[str] = Counter()
        self._compile = torch.compile
        self._part = ""
        self._looks = False

    def compile(self, part: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Stands in for `torch.compile`."""
        function = self._compile(part, **options)

        def call(*arguments: Any) -> Any:
            self._part, self._looks = part.__name__, True
            try:
                with _disable_current_modes():
                    return function(*arguments)
            finally:
                self._looks = False

        return call

    def generated(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Stands in for `compiled.generated`: called once for each variant."""
        self.variants[self._part] += 1
        for node in graph.graph.nodes:
            assert node.target is not torch.tensor, f"a constant of the host: {node.stack_trace}"
            if node.target in MADE_ON_A_DEVICE:
                assert node.kwargs.get("device"), f"made on the CPU: {node.stack_trace}"
            if node.target in ("cumsum", torch.cumsum):
                length = node.meta["example_value"].shape[-1]
                assert length <= LONGEST_SUM, f"torch 2.11 cannot generate: {node.stack_trace}"
        return _Code(self, self._part, graph)

    def captured(self, run: Any, inputs: Sequence[Any], pool: object = None) -> compiled.Graph:
        """Stands in for `compiled.captured`."""
        code = isinstance(run, _Code)
        part, function = (run.part, run.graph.forward) if code else (run.__name__, run)
        self.captures[part] += 1
        tape, reads = _Tape(), HostReads()
        with _disable_current_modes(), reads, tape:
            outputs = function(*inputs)
        assert not reads.count, f"a graph reads on the host: {dict(reads.count)}"
        with _disable_current_modes():
            tape.undo()

        def replay() -> None:
            if code:
                self.calls.append(part)
            self.replays[part] += not self._looks
            with _disable_current_modes():
                tape.replay()

        return compiled.Graph(replay, outputs, None)


def replayed(monkeypatch: pytest.MonkeyPatch) -> GraphReplays:
    """Run the parts of compiled rounds as CUDA graphs would."""
    compiled.forget()
    made = GraphReplays()
    monkeypatch.setattr(torch, "compile", made.compile)
    monkeypatch.setattr(compiled, "generated", made.generated)
    monkeypatch.setattr(compiled, "captured", made.captured)
    monkeypatch.setattr(compiled, "is_replayed", lambda inputs: True)
    monkeypatch.setattr(compiled, "_place", _place)
    return made


def _place(x: object) -> object:
    if isinstance(x, Tensor):
        return id(x) if x.is_mkldnn else x.data_ptr()  # of packed weights, on CPUs alone
    return x


class _Code:
    """Of a graph that runs without being captured."""

    def __init__(self, replays: GraphReplays, part: str, graph: fx.GraphModule) -> None:
        self.replays = replays
        self.part = part
        self.graph = graph

    def __call__(self, *inputs: Any) -> Any:
        self.replays.calls.append(self.part)
        reads = HostReads()
        with reads:
            outputs = self.graph.forward(*inputs)
        assert not reads.count, f"a graph reads on the host: {dict(reads.count)}"
        return outputs


class _Tape(TorchDispatchMode):
    """Operations with the very tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        returns = [one.alias_info for one in function._schema.returns]
        for one, value in zip(function._schema.arguments, arguments, strict=False):
            if one.alias_info is not None and one.alias_info.is_write:
                self._before.append((value, value.clone()))
        outputs = function(*arguments, **options)
        if all(alias is not None and not alias.is_write for alias in returns):
            return outputs  # views
        new = [
            output
            for output in (outputs if isinstance(outputs, tuple | list) else [outputs])
            if isinstance(output, Tensor)
        ]
        written = any(alias is not None for alias in returns)
        self._steps.append((function, arguments, options, [] if written else new))
        return outputs

    def undo(self) -> None:
        """What is captured is not carried out."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Carry it out."""
        for function, arguments, options, outputs in self._steps:
            found = function(*arguments, **options)
            found = [
                one
                for one in (found if isinstance(found, tuple | list) else [found])
                if isinstance(one, Tensor)
            ]
            for output, value in zip(outputs, found, strict=False):
                output.copy_(value)
