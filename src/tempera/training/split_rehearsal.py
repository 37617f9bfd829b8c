"""FSDP in a rehearsal without data: what one process holds of a split target and its draft.

Tensors of the same sizes stand in for those that PyTorch's `fully_shard` allocates: a process's
part of every split tensor; while a module computes, the buffer that gathers its tensors, and the
tensors that are copied out of it; and the buffer in which gradients are summed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tempera.runtime.rehearsal import META, Meter
from tempera.training.trainer import TrainingRun, make_optimisers


class SplitRehearsal:
    """One process's part of a target and a draft, on the meta device.

    Args:
        meter: counts the memory.
        processes: number of processes.
    """

    def __init__(self, meter: Meter, processes: int) -> None:
        self.meter, self.processes = meter, processes
        self._parts: list[Tensor] = []

    def split_target(self, network: Any) -> None:
        """See `tempera.training.fsdp.split_target`. Forget the peak so far: the whole network is
        never on the device.
        """
        for layer in network.model.layers:
            weights = list(layer.parameters())
            self._keep_parts(weights)
            _gathers(layer, _size(weights), kept=0)
        self.meter.peak = self.meter.live

    def split_draft(self, run: TrainingRun) -> None:
        """Split the draft of a training run, with its averaged weights and its optimisers."""
        self.whole = list(run.draft.parameters())
        self.meter.ignore(self.whole)
        self.mine = [nn.Parameter(self._part(weight)) for weight in self.whole]
        self._keep_parts(run.state.average.values())
        run.state.optimisers = make_optimisers(nn.ParameterList(self.mine), run.recipe, True)
        self._gathered = _gathers(run.draft, _size(self.whole), kept=1)  # backward needs them

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for part in self.mine:
            part.grad = None

    def end_backward(self) -> None:
        """Free the draft's tensors; its gradients stay."""
        self._gathered.clear()

    def reduce(self) -> None:
        """Sum the draft's gradients over the processes; each keeps its part."""
        buffer = _blank(_size(self.whole))
        for part in self.mine:
            part.grad = torch.empty_like(part)
        for weight in self.whole:
            weight.grad = None
        del buffer

    def gather_draft(self) -> None:
        """Gather the whole draft for a moment, as to copy it for a validation."""
        _blank(_size(self.whole))

    def part_size(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of a process's part."""
        return sum(self._rows(tensor) * tensor[0].nbytes for tensor in tensors)

    def _rows(self, tensor: Tensor) -> int:
        return -(-len(tensor) // self.processes)

    def _part(self, tensor: Tensor) -> Tensor:
        return torch.empty(self._rows(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=META)

    def _keep_parts(self, tensors: Iterable[Tensor]) -> None:
        """Count a process's part of tensors in place of the whole."""
        tensors = list(tensors)
        self.meter.ignore(tensors)
        self._parts += map(self._part, tensors)


def _gathers(module: nn.Module, size: int, kept: int) -> list[Tensor]:
    """Let a module gather tensors of this size when it is called, unless they are; afterwards
    `kept` of the two copies, which are returned in a list, stay.
    """
    gathered: list[Tensor] = []

    def gather(*_: Any) -> None:
        if not gathered:
            gathered.extend((_blank(size), _blank(size)))

    def free(*_: Any) -> None:
        del gathered[kept:]

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free)
    return gathered


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _blank(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=META)
