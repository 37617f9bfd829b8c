"""A scheduler takes the machine while a draft is trained: real processes and signals."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
STEPS = 16
OPTIONS = (
    f"model=shapes training.steps={STEPS} training.batch_size=2 training.warmup_steps=2 "
    "training.matrix_lr=0 training.ttt_steps=0 "  # which take most of a step
    "training.log_every=1 training.checkpoint_every=1000 training.validate_every=4 "
    "training.holdout=4 training.decodes=0 training.ema=0.9 tracking=none device=cpu"
).split()
TRAIN = [str(ROOT / "train_draft/main.py"), *OPTIONS]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = os.environ | {
    "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)
}  # fmt: skip
Stop = Callable[["subprocess.Popen[bytes]"], object]


def begun(place: Path, launcher: list[str], *more: str) -> "subprocess.Popen[bytes]":
    """A training in a directory, in a process group of its own."""
    place.mkdir(exist_ok=True)
    script, *options = TRAIN
    flags = [one for one in more if one.startswith("-")]
    options += [f"hydra.run.dir={place / 'run'}", *(one for one in more if one not in flags)]
    command = [sys.executable, *launcher, script, *flags, *options]
    with (place / "out").open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env=ENVIRONMENT, start_new_session=True, cwd=place
        )


def told(place: Path) -> str:
    return (place / "out").read_text()


def wait_for(place: Path, step: int, training: "subprocess.Popen[bytes]") -> None:
    """Until a training has taken so many steps."""
    reached = 0
    while reached < step:
        assert training.poll() is None, told(place)
        time.sleep(0.02)
        reached = max(map(int, re.findall(rf"\b(\d+)/{STEPS} ", told(place))), default=0)


def checkpoint(place: Path) -> Path:
    (found,) = (place / "run").glob("checkpoint-*")
    return found


def weights(place: Path) -> dict[str, torch.Tensor]:
    assert checkpoint(place).name == f"checkpoint-{STEPS}"
    kept = [
        load_file(checkpoint(place) / name) for name in ("network.safetensors", "extra.safetensors")
    ]
    return {**kept[0], **{f"extra {name}": value for name, value in kept[1].items()}}


def parent(training: "subprocess.Popen[bytes]") -> None:
    training.terminate()


def everyone(training: "subprocess.Popen[bytes]") -> None:
    """As Slurm: torchrun passes it on to processes that have it already."""
    os.killpg(training.pid, signal.SIGTERM)


def a_worker(training: "subprocess.Popen[bytes]") -> None:
    os.kill(psutil.Process(training.pid).children()[-1].pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("launcher", "stops"), [([], [parent]), (TORCHRUN, [everyone, a_worker])], ids=["one", "two"]
)
def test_a_training_that_is_stopped_loses_no_step(
    launcher: list[str], stops: list[Stop], tmp_path: Path
) -> None:
    """Of one process or two, as often as it is stopped."""
    whole, place = tmp_path / "whole", tmp_path / "stopped"
    assert begun(whole, launcher).wait(500) == 0, told(whole)
    step = 0
    for stop in stops:
        training = begun(place, launcher)
        wait_for(place, step + 5, training)
        stop(training)
        status = training.wait(100)
        assert status == (1 if launcher else 130), told(place)
        assert f"resumes after step {step}." in told(place) or step == 0
        step, before = int(checkpoint(place).name.partition("-")[2]), step
        assert before + 5 <= step < STEPS and f"it resumes after step {step}" in told(place)
        assert "to resume: " in told(place)
    assert begun(place, launcher).wait(500) == 0, told(place)
    assert f"resumes after step {step}." in told(place)
    expected, resumed = weights(whole), weights(place)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    drafts = [load_file(at / "run/draft/model.safetensors") for at in (whole, place)]
    assert all(torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """The first comes while a step is taken that has no end."""
    training = begun(
        tmp_path, [], "training.gradient_accumulation=1000", "training.batch_size=8000"
    )
    while "train draft" not in told(tmp_path):
        assert training.poll() is None, told(tmp_path)
        time.sleep(0.02)
    time.sleep(1)
    training.terminate()
    time.sleep(1)
    assert training.poll() is None
    training.terminate()
    assert training.wait(20) == 130
    assert list((tmp_path / "run").glob("*checkpoint*")) == []


def test_a_training_that_submitit_requeues_loses_no_step(tmp_path: Path) -> None:
    """With local jobs, which are requeued as those of Slurm are: SIGTERM is for information."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    sweep = begun(
        tmp_path, [], "-m", "seed=0", "hydra/launcher=submitit_local",
        f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweep.subdir=0",
    )  # fmt: skip
    logs: list[Path] = []
    while not any(re.search(rf"\b[5-9]/{STEPS} ", log.read_text()) for log in logs):
        assert sweep.poll() is None, told(tmp_path)
        time.sleep(0.05)
        logs = list(tmp_path.glob("sweep/.submitit/*/*_log.err"))
    (job,) = (
        child
        for child in psutil.Process(sweep.pid).children(recursive=True)
        if "submitit.core._submit" in child.cmdline()
    )
    os.kill(job.pid, signal.SIGUSR2)
    assert sweep.wait(300) == 0, told(tmp_path)
    (log,) = tmp_path.glob("sweep/.submitit/*/*_log.out")
    said = log.read_text()
    (step,) = map(int, re.findall(r"it resumes after step (\d+)", said))
    assert 5 <= step < STEPS and f"resumes after step {step}." in said, said
