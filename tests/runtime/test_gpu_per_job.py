"""Jobs side by side take one GPU each; the GPUs are made up."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.utils import JobReturn
from hydra.utils import instantiate
from omegaconf import OmegaConf
from paths import CONF

from tempera.config.resolvers import jobs
from tempera.runtime.gpu_per_job import GPUPerJob

AUTO = OmegaConf.create({"device": "auto"})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The GPUs that jobs chose, of two."""
    chosen: list[int] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_each_job_takes_a_free_gpu(taken: list[int]) -> None:
    first, second, third = GPUPerJob(), GPUPerJob(), GPUPerJob()
    first.on_job_start(AUTO)
    second.on_job_start(AUTO)
    first.on_job_end(AUTO, JobReturn())
    third.on_job_start(AUTO)
    assert taken == [0, 1, 0]
    GPUPerJob().on_job_start(AUTO)  # all are taken: one is shared
    GPUPerJob().on_job_start(OmegaConf.create({"device": "cuda:1"}))
    assert taken[3] in (0, 1) and len(taken) == 4


def test_as_many_jobs_as_gpus_or_cores(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert [jobs(device) for device in ("auto", "cuda", "cuda:1", "cpu")] == [2, 2, 1, 3]


def test_the_launcher_has_the_callback() -> None:
    launcher: Any = OmegaConf.load(CONF / "launcher" / "joblib.yaml")
    made = instantiate(launcher.hydra.callbacks.gpu_per_job)
    assert isinstance(made, GPUPerJob)
