"""Count the bytes of the tensors that live."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tempera.runtime.quantised import is_quantised


class LiveBytes(TorchDispatchMode):
    """`live`: bytes of the storages that operations made inside the `with` block and that are not
    freed.
    """

    def __init__(self):
        super().__init__()
        self.live, self._known = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not is_quantised(value):  # its parts are counted
                self._count(value.untyped_storage())
        return result

    def _count(self, storage):
        number, size = storage._cdata, storage.nbytes()
        if number not in self._known:
            self._known.add(number)
            self.live += size
            weakref.finalize(storage, self._freed, number, size)

    def _freed(self, number, size):
        self._known.remove(number)
        self.live -= size
