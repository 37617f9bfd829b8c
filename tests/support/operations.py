"""Which operations run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes the names of all operations, in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))
