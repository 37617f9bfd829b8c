"""Two processes that share their work, here as threads of one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Half:
    """One of the two, as `tempera.runtime.distributed.Processes`."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.count, self.is_main = rank, 2, rank == 0
        self.shared, self.barrier = shared, barrier

    def gather(self, value: Any) -> list[Any]:
        self.shared[self.rank] = value
        self.barrier.wait(60)
        every = list(self.shared)
        self.barrier.wait(60)
        return every

    def wait(self) -> None:
        self.barrier.wait(60)


def together(work: Callable[[Any], T]) -> list[T]:
    """What `work` returns in each of the two."""
    shared: list[Any] = [None, None]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, (Half(rank, shared, barrier) for rank in (0, 1))))
