"""The modes that PyTorch keeps for a thread or for the whole process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch

_LOCK = Lock()
_callers = 0
_callers_modes: tuple[torch.dtype, str, str]
FLOAT32 = torch.float32, "ieee", "ieee"
"""Default dtype, and how products of float32 are computed on GPUs and on CPUs."""


@contextmanager
def usual_modes(grad: bool = False) -> Iterator[None]:
    """Inside the `with` block PyTorch's modes are those of a fresh process, whatever the caller has
    set: no inference mode, whose tensors cannot be written outside it; no autocast; float32 as the
    default dtype and in products of float32, for all threads; and the CPU as the default device.
    Then the caller's are back.

    With `torch.set_float32_matmul_precision("medium")` or "high", which rows are rounded to
    bfloat16 or TF32 depends on how many there are, so that a pass over a draft would give another p
    than one over a token.

    Modes that choose between computations of the same result stay: deterministic algorithms,
    anomaly detection, and number of threads.

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
    """float32 is the default dtype, and its products are computed in it. Both hold for all threads:
    the first of several callers sets them, and the last one sets back what was before.
    """
    global _callers, _callers_modes
    with _LOCK:
        if _callers == 0:
            backends: Any = torch.backends  # whose stubs lack mkldnn.matmul
            products = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
            _callers_modes = torch.get_default_dtype(), *products
            _set(*FLOAT32)
        _callers += 1
    try:
        yield
    finally:
        with _LOCK:
            _callers -= 1
            if _callers == 0:
                _set(*_callers_modes)


def _set(dtype: torch.dtype, on_cuda: str, on_cpu: str) -> None:
    torch.set_default_dtype(dtype)
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = on_cuda
    backends.mkldnn.matmul.fp32_precision = on_cpu
