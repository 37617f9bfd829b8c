"""Several processes: as torchrun says it, or as Slurm does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from paths import ROOT

from tempera.config import resolvers
from tempera.runtime.distributed import first_node, slurm_environment, started_as_main

STEP = {
    "SLURM_JOB_ID": "41000", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip


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


@pytest.mark.slow
def test_a_job_of_a_sweep_that_is_requeued_goes_on(tmp_path: Path) -> None:
    """With submitit's local jobs, which are requeued as those of Slurm are."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    options = "-m method=ar limit=4 batch_size=1 metrics=none speed.prompts=0 tracking=none"
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
    assert "Caught signal SIGUSR2" in told and told.count("  0%|") == 1, told
