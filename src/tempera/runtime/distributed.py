"""One process, or several started by `torchrun` that share a run directory."""

import os
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")


class Processes:
    """This process and the others of the run. Without `torchrun` there is only this one, and
    accelerate is not used.

    Args:
        cpu: communicate through gloo instead of NCCL.
        patience: how long to wait for another process before failing; by default torch's timeout.
    """

    def __init__(self, cpu: bool, patience: timedelta | None = None) -> None:
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            self._state = PartialState(
                cpu=cpu, **({} if patience is None else {"timeout": patience})
            )
        self.rank: int = self._state.process_index if self._state else 0
        self.count: int = self._state.num_processes if self._state else 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that times, evaluates and reports."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def from_main(self, value: str) -> str:
        """The main process's value, such as a run directory with a timestamp."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        values = [value]
        broadcast_object_list(values)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, in every process."""
        if self._state is None:
            return [value]
        from accelerate.utils import gather_object

        gathered: list[T] = gather_object([value])
        return gathered
