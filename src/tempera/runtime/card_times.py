"""Times of several ways to compute something on a GPU, taken once for a kind of card: the cache
keeps them, because the ways differ by rounding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tempera.runtime.files import remembered

TIMED_ENTRIES = 2**26
"""Entries of what is timed, of two bytes: 128 MB, more than a GPU's cache holds."""


def card_times(
    kind: str, name: str, device: torch.device, decide: Callable[[], dict[str, int]]
) -> dict[str, int]:
    """What `decide` has found for such a card and this version of PyTorch."""
    card = torch.cuda.get_device_name(device)
    return remembered(kind, f"{name}, {card}, torch {torch.__version__}", decide)


def nanoseconds(compute: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> int:
    """Nanoseconds of a computation in a CUDA graph of those with all inputs: the least of five
    turns after a first.
    """
    times = []
    with torch.cuda.device(inputs[0].device):
        compute(inputs[0])  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for one in inputs:
                compute(one)
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return int(1e6 * min(times[1:]) / len(inputs))
