"""One process, or several that share a run directory: started by `torchrun` or `accelerate launch`,
or as the tasks of a Slurm step (`srun`, `launcher=slurm`).
"""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from tempera.errors import TemperaError

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""Processes may wait for hours where one downloads, or draws the last images."""

FIRST_PORT, PORTS = 20000, 40000
"""Where the processes of a Slurm job meet, by its number."""


class Processes:
    """This process and the others of the run. Where there is only this one, accelerate is not used.

    Args:
        cpu: communicate through gloo instead of NCCL.
        patience: how long to wait for another process before failing.
    """

    def __init__(self, cpu: bool, patience: timedelta = PATIENCE) -> None:
        self._state: Any = None
        os.environ.update(slurm_environment(os.environ))
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            self._state = PartialState(cpu=cpu, timeout=patience)
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


def started_as_main() -> bool:
    """Whether this process was started as the main one of a run, by its environment."""
    return _launched().get("RANK", "0") == "0"


def started_with_others() -> bool:
    """Whether this process was started as one of several of a run, by its environment."""
    return int(_launched().get("WORLD_SIZE", "1")) > 1


def _launched() -> Mapping[str, str]:
    return {**slurm_environment(os.environ), **os.environ}


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch and accelerate want to know of a task of a Slurm step, as `torchrun` would say it;
    empty outside of a step of several tasks, and under torchrun.

    Args:
        environment: of this process. A batch script has the number of tasks too, but is one
            process: only a step has SLURM_STEP_NUM_TASKS.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if int(tasks) < 2 or "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    step = environment.get("SLURM_STEP_ID", "0")
    job = int(environment.get("SLURM_JOB_ID", "0")) + (int(step) if step.isdigit() else 0)
    local = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_node(nodes) or "127.0.0.1",
        "MASTER_PORT": str(FIRST_PORT + job % PORTS),
    }
    if match := re.match(r"\d+", local):
        found["LOCAL_WORLD_SIZE"] = match[0]
    return {name: value for name, value in found.items() if name not in environment}


def first_node(nodes: str) -> str:
    """The first name of a Slurm list of nodes: `gpu[07-09,12],big1` is gpu07 and others."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def check_launch() -> None:
    """Raise TemperaError if accelerate is configured to split networks among processes."""
    from accelerate.utils import parse_flag_from_env

    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise TemperaError(
                f"accelerate is configured to split networks among processes ({engine}), but here "
                "each of them holds the whole target: launch with torchrun instead."
            )
