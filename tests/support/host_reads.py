"""Count the reads of device tensors by the host."""

from collections import Counter

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "unique_dim_consecutive",
    "unique_consecutive",
    "_unique2",
    "allclose",
    "bincount",
    "repeat_interleave",
}


class _Lists(TorchFunctionMode):
    """Counts copies to Python, which are no operations."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (Tensor.tolist, Tensor.numpy):
            self.count[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """Counts every operation whose result the host must know before the program can go on."""

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self._lists = _Lists(self.count)

    def __enter__(self):
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        known = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        if (name in READS and not known) or (
            name in ("index", "index_put", "index_put_")
            and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            self.count[name] += 1
        if name == "_to_copy" and (kwargs or {}).get("device") is not None:
            self.count["device copy"] += 1
        return function(*args, **(kwargs or {}))
