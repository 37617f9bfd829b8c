"""Several processes: as torchrun says it, or as Slurm does."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from paths import ROOT

from tempera.config import resolvers
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes, first_node, slurm_environment, started_as_main

STEP = {
    "SLURM_JOB_ID": "41000", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """`Processes` writes into it what a launcher said."""
    with mock.patch.dict(os.environ):
        yield


def test_a_task_of_a_slurm_step_is_a_rank() -> None:
    assert slurm_environment(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "21000",
    }
    assert slurm_environment({**STEP, "MASTER_PORT": "7"}).get("MASTER_PORT") is None


def test_a_process_knows_its_part_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert started_as_main()
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert not started_as_main()
    monkeypatch.setenv("RANK", "0")
    assert started_as_main()


def test_one_process_stays_one() -> None:
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    for environment in ({}, batch, {**STEP, "RANK": "0"}, {**STEP, **one}):
        assert slurm_environment(environment) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],big1", "gpu07"), ("gpu[12,15]", "gpu12"), ("a1,a2", "a1"),
     ("rack[1-2]-node", "rack1-node"), ("", "")],
)  # fmt: skip
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_requeued_batch_job_has_the_directory_of_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(command: str, job: str) -> str:
        monkeypatch.setattr(sys, "argv", command.split())
        monkeypatch.setenv("SLURM_JOB_ID", job)
        return resolvers.started()

    assert begun("run.py method=ar", "7") != begun("run.py method=ar", "7")  # in a shell
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    first = begun("run.py method=ar", "7")
    assert first.startswith("slurm-7_")
    assert first == begun("run.py method=ar hydra/job_logging=disabled", "7")  # of another rank
    assert first not in (begun("run.py method=ar seed=1", "7"), begun("run.py method=ar", "8"))


LEFT: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "2"}, "there is no RANK: launch"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "there is no MASTER_ADDR"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "there is no MASTER_PORT"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
    ({"WORLD_SIZE": "2", "RANK": "7", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=7, WORLD_"),
    ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2, WORLD_"),
    ({"WORLD_SIZE": "2", "RANK": "-1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=-1 is no"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "=70000"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "there is no MASTER_ADDR"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "there is no MASTER_ADDR"),
    ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many is not a number"),
]
"""What a launcher may leave in a shell -> what is told."""


def test_a_rank_that_was_left_behind_is_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    assert started_as_main()
    processes = Processes(cpu=True)
    assert processes.is_main and processes.count == 1 and "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize(("environment", "told"), LEFT)
def test_leftovers_of_a_launcher_are_a_sentence(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TemperaError, match=told) as refused:
        Processes(cpu=True)
    assert "unset" in str(refused.value) and "\n" not in str(refused.value)


MEET = """
from datetime import timedelta
from tempera.errors import TemperaError
from tempera.runtime.distributed import Processes
try:
    processes = Processes(cpu=True, patience=timedelta(seconds={limit}))
    print(processes.gather(processes.rank))
except TemperaError as problem:
    print(problem)
"""


def started(port: int, rank: int, limit: int) -> "subprocess.Popen[str]":
    own = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | own | {"MASTER_PORT": str(port)}
    command = [sys.executable, "-c", MEET.format(limit=limit)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.slow
def test_processes_that_do_not_come_are_waited_for_aloud_and_not_forever() -> None:
    """By the main process and by others; and the wait can be interrupted."""
    alone = [started(free_port(), rank, 3) for rank in range(2)]
    patient = [started(free_port(), rank, 300) for rank in range(2)]
    for rank, process in enumerate(patient):
        assert process.stderr is not None
        assert process.stderr.readline().startswith(
            "waiting for 2 processes to connect at 127.0.0.1"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT, rank
    for rank, process in enumerate(alone):
        out, told = process.communicate(timeout=200)
        assert "waiting for 2 processes" in told
        assert out.startswith(f"process {rank} of 2 could not connect to the others")
        assert "unset WORLD_SIZE" in out and len(out.splitlines()) == 1


@pytest.mark.slow
def test_processes_that_come_meet() -> None:
    port = free_port()
    both = [started(port, rank, 200) for rank in range(2)]
    assert [one.communicate(timeout=250)[0] for one in both] == ["[0, 1]\n"] * 2


@pytest.mark.slow
def test_a_job_of_a_sweep_that_is_requeued_goes_on(tmp_path: Path) -> None:
    """With submitit's local jobs, which are requeued as those of Slurm are."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    options = "-m method=ar data.limit=4 batch_size=1 metrics=none speed.prompts=0 tracking=none"
    command = [sys.executable, str(ROOT / "eval" / "run.py"), *options.split()]
    place = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    with subprocess.Popen([*command, "hydra/launcher=submitit_local", place]) as sweep:
        while sweep.poll() is None and not list(tmp_path.glob("sweep/0/records/*.parquet")):
            time.sleep(0.05)
        (job,) = (
            child
            for child in psutil.Process(sweep.pid).children(recursive=True)
            if "submitit.core._submit" in child.cmdline()
        )
        os.kill(job.pid, signal.SIGUSR2)
        assert sweep.wait(timeout=200) == 0
    assert (tmp_path / "sweep" / "0" / "metrics.json").is_file()
    (log,) = tmp_path.glob("sweep/.submitit/*/*_log.err")
    told = log.read_text(encoding="utf-8")
    assert "Caught signal SIGUSR2" in told and told.count(" 0.00/576") == 1, told
