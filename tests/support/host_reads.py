"""Count the reads of device tensors by the host."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique_dim",
    "_unique2",
    "repeat_interleave",
}


class HostReads(TorchDispatchMode):
    """Counts every operation whose result the host must know before the program can go on."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in READS or (
            name in ("index", "index_put", "index_put_")
            and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            self.count[name] += 1
        if name == "_to_copy" and (kwargs or {}).get("device") is not None:
            self.count["device copy"] += 1
        return function(*args, **(kwargs or {}))
