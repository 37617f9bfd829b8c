"""The modes that PyTorch keeps for a thread or for the whole process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch

_LOCK = Lock()
_callers = 0
_callers_dtype = torch.float32


@contextmanager
def usual_modes(grad: bool = False) -> Iterator[None]:
    """Inside the `with` block PyTorch's modes are those of a fresh process, whatever the caller has
    set: no inference mode, whose tensors cannot be written outside it; no autocast; float32 as the
    default dtype, for all threads; and the CPU as the default device. Then the caller's are back.

    Modes that choose between computations of the same result stay: deterministic algorithms,
    anomaly detection, precision of products, and number of threads.

    Args:
        grad: whether gradients are recorded.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(_float32())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _float32() -> Iterator[None]:
    """float32 is the default dtype. There is one for all threads: the first of several callers sets
    it, and the last one sets back what was before.
    """
    global _callers, _callers_dtype
    with _LOCK:
        if _callers == 0:
            _callers_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
        _callers += 1
    try:
        yield
    finally:
        with _LOCK:
            _callers -= 1
            if _callers == 0:
                torch.set_default_dtype(_callers_dtype)
