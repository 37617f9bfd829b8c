"""One process, or several that share a run directory: started by `torchrun` or `accelerate launch`,
or as the tasks of a Slurm step (`srun`, `launcher=slurm`).
"""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

from tempera.errors import TemperaError, shortened
from tempera.runtime.files import reason
from tempera.runtime.waiting import waiting

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""Processes may wait for hours where one downloads, or draws the last images."""

MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
)
"""Where launchers of MPI say how many processes there are, and which this is; accelerate reads it.
"""

LAUNCHER_SETTINGS = {
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION", "no"),
    "gradient_accumulation": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
    "dynamo": ("ACCELERATE_DYNAMO_BACKEND", "no"),
}
"""How `accelerate launch` passes on its settings that are options here, or nothing, and what it
sets by default.
"""

FIRST_PORT, PORTS = 20000, 40000
"""Where the processes of a Slurm job meet, by its number."""


class Processes:
    """This process and the others of the run. Where there is only this one, accelerate is not used.

    Args:
        cpu: communicate through gloo instead of NCCL.
        patience: how long to wait for another process before failing.

    Raises:
        TemperaError: the environment does not say where they meet, or some do not come.
    """

    def __init__(self, cpu: bool, patience: timedelta = PATIENCE) -> None:
        self._state: Any = None
        os.environ.update(launched(os.environ))
        if not started_with_others():
            os.environ.pop("LOCAL_RANK", None)  # accelerate would wait for others
        else:
            check_meeting(os.environ, cpu)
            from accelerate import PartialState

            with _met(os.environ):
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
            with self._together():
                self._state.wait_for_everyone()

    def from_main(self, value: T) -> T:
        """The main process's value, such as a run directory with a timestamp."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        values = [value]
        with self._together():
            broadcast_object_list(values)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks, in every process."""
        if self._state is None:
            return [value]
        from accelerate.utils import gather_object

        with self._together():
            gathered: list[T] = gather_object([value])
        return gathered

    @contextmanager
    def _together(self) -> Iterator[None]:
        """The main process says that it waits; torch's errors become sentences."""
        try:
            with waiting("the other processes of the run") if self.is_main else nullcontext():
                yield
        except RuntimeError as problem:
            raise TemperaError(
                "another process of this run has ended or did not answer in time "
                f"({reason(problem)}): start all of them again with the same options."
            ) from problem


@contextmanager
def _met(environment: Mapping[str, str]) -> Iterator[None]:
    """Every process says that it waits for the others to start, and ends at Ctrl-C, for which
    torch's wait would not stop; what torch raises if some do not come becomes a sentence.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    count = environment["WORLD_SIZE"]
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    try:
        with waiting(
            f"{count} processes to connect at {address}, as WORLD_SIZE and MASTER_ADDR say"
        ):
            yield
    except (RuntimeError, ValueError) as problem:
        raise TemperaError(
            f"process {environment['RANK']} of {count} could not connect to the others at "
            f"{address} ({reason(problem)}): start them all, with torchrun or srun, or unset "
            "WORLD_SIZE and RANK, which a launcher may have left behind."
        ) from problem
    finally:
        signal.signal(signal.SIGINT, before)


def check_meeting(environment: Mapping[str, str], cpu: bool) -> None:
    """Raise TemperaError unless the environment says who and where this process is among several.

    Args:
        environment: of this process.
        cpu: whether it needs no GPU of its own.
    """
    count = environment["WORLD_SIZE"]
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", *(() if cpu else ("LOCAL_RANK",))):
        if not environment.get(name):
            raise TemperaError(
                f"WORLD_SIZE={count} asks for several processes, but there is no {name}: launch "
                "them with torchrun or srun, or unset WORLD_SIZE, which a launcher may have left "
                "behind."
            )
    rank, port = (_number(environment, name) for name in ("RANK", "MASTER_PORT"))
    if not rank < int(count) or not port < 2**16:
        raise TemperaError(
            f"RANK={rank}, WORLD_SIZE={count} and MASTER_PORT={port} are not valid: launch with "
            "torchrun or srun, or unset them."
        )


def _number(environment: Mapping[str, str], name: str, usual: str = "0") -> int:
    """A whole number of the environment.

    Raises:
        TemperaError: it is something else.
    """
    text = environment.get(name) or usual
    if not re.fullmatch("[0-9]{1,9}", text):
        raise TemperaError(
            f"{name}={shortened(text)} is not a number: launch with torchrun or srun, or unset "
            f"{name}."
        )
    return int(text)


def started_as_main() -> bool:
    """Whether this process was started as the main one of a run, by its environment. A rank that a
    launcher left behind, without others, does not count.
    """
    environment = _launched()
    alone = environment.get("WORLD_SIZE", "1") == "1"
    return alone or environment.get("RANK", "0") == "0"


def started_with_others() -> bool:
    """Whether this process was started as one of several of a run, by its environment."""
    return _number(_launched(), "WORLD_SIZE", "1") > 1


def _launched() -> Mapping[str, str]:
    return {**launched(os.environ), **os.environ}


def launched(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch and accelerate want to know of a process that Slurm or MPI started, as `torchrun`
    would say it; empty where there is nothing to add.
    """
    for size, rank, local in MPI:
        if _number(environment, size, "1") > 1 and "WORLD_SIZE" not in environment:
            names = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": local}
            found = {name: environment[mpi] for name, mpi in names.items() if mpi in environment}
            return {name: value for name, value in found.items() if name not in environment}
    return slurm_environment(environment)


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch and accelerate want to know of a task of a Slurm step, as `torchrun` would say it;
    empty outside of a step of several tasks, and under torchrun.

    Args:
        environment: of this process. A batch script has the number of tasks too, but is one
            process: only a step has SLURM_STEP_NUM_TASKS.
    """
    count = _number(environment, "SLURM_STEP_NUM_TASKS", "1")
    if count < 2 or "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    step = environment.get("SLURM_STEP_ID", "0")
    job = _number(environment, "SLURM_JOB_ID") + (int(step) if step.isdigit() else 0)
    local = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(count),
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


def check_launch(options: Mapping[str, object]) -> None:
    """Raise TemperaError if accelerate is configured to split networks among processes. What it is
    configured to do otherwise than a training's options is not done, and the main process says so.

    Args:
        options: `mixed_precision` and `gradient_accumulation` of the training.
    """
    from accelerate.utils import parse_flag_from_env

    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise TemperaError(
                f"accelerate is configured to split networks across processes ({engine}), but in "
                "tempera each process holds the whole target: launch with torchrun instead."
            )
    own = {**options, "dynamo": "no"}
    for option, (variable, usual) in LAUNCHER_SETTINGS.items():
        given = os.environ.get(variable, usual).lower()
        if given not in (usual, str(own[option])) and started_as_main():
            print(f"{variable}={given} is ignored: this training run has {option}={own[option]}")
