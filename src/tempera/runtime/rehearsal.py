"""Rehearse a program on tensors that have sizes but no data, and measure the memory that it would
need.

The program's own code runs on PyTorch's meta device, so nothing is allocated and the estimate
cannot drift from the code.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

META = torch.device("meta")


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations create on a device.

    Buffers inside kernels, the allocator's rounding and the CUDA context are not tensors and are
    not counted.

    Args:
        device: the type of device whose tensors are counted.

    Attributes:
        live: current number of bytes.
        peak: largest number so far.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.live, self.peak = device, 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == self.device:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number not in self._known:
            self._known[number] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, number)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors no longer, although they live on."""
        for tensor in tensors:
            number = tensor.untyped_storage()._cdata
            self.live -= self._known.get(number, 0)
            self._known[number] = 0

    def _freed(self, number: int) -> None:
        self.live -= self._known.pop(number, 0)


class Rehearsal(TorchFunctionMode):
    """Lets a program read values from tensors that have no data: every truth value is True, and
    every number is `answer`. Attention is that of a fused kernel, which stores no scores.

    Args:
        answer: for instance the number of tokens that ends decoding after one round.
    """

    def __init__(self, answer: int = 1) -> None:
        super().__init__()
        self.answers: Mapping[Any, Any] = {
            Tensor.__bool__: True,
            Tensor.__int__: answer,
            Tensor.__float__: float(answer),
            Tensor.item: answer,
        }

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self.answers and args[0].device == META:
            return self.answers[function]
        if function is Tensor.tolist and args[0].device == META:
            return torch.full(args[0].shape, self.answers[Tensor.item]).tolist()
        if function is torch.nn.functional.scaled_dot_product_attention and args[0].device == META:
            return _FusedAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """The sizes of fused attention, which stores its inputs, its output and a number per query."""

    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(torch.empty_like(part) for part in ctx.saved_tensors[:3])
