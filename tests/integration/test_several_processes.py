"""The commands of a published model in two processes, on tiny weights of a hub on loopback: nothing
is downloaded twice, one run directory, one bar, and the results of one process.
"""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from hub import Hub
from image_server import ImageServer
from paths import ROOT
from safetensors.torch import load_file
from tiny_targets import write_llamagen_text

from tempera.runtime.distributed import FIRST_PORT

pytestmark = pytest.mark.slow
PROCESSES = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """With MS-COCO's captions."""
    with Hub(tmp_path_factory.mktemp("cache")) as started:
        assert isinstance(started, Hub)
        started.add_captions()
        yield started


@pytest.fixture(scope="module")
def options(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a tiny LlamaGen on the hub."""
    directory = tmp_path_factory.mktemp("weights")
    options = [one for one in write_llamagen_text(directory) if not one.startswith("model.weights")]
    hub.add_directory("peizesun/llamagen_t2i", directory)
    return [*options, "device=cpu", "tracking=none"]


def start(hub: Hub, place: Path, *command: str, **environment: str) -> "subprocess.Popen[str]":
    """A process in a directory."""
    return subprocess.Popen(
        [sys.executable, *command],
        env={
            **os.environ,
            **hub.environment,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        },
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a process printed."""
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return out, error


def alone(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """The same command in one process, this one."""
    place.mkdir(exist_ok=True)
    AcceleratorState._reset_state(True)
    hub.here(monkeypatch)
    monkeypatch.chdir(place)
    for name, value in {"ACCELERATE_USE_CPU": "true", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(command))
    runpy.run_path(command[0], run_name="__main__")


def tasks(hub: Hub, place: Path, *command: str) -> list["subprocess.Popen[str]"]:
    """The tasks of a Slurm step on two nodes, which are this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = max(free.getsockname()[1], FIRST_PORT)
    step = {
        "SLURM_JOB_ID": str(port - FIRST_PORT), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,other",
    }  # fmt: skip
    ranks = [{**step, "SLURM_PROCID": str(rank)} for rank in range(PROCESSES)]
    return [start(hub, place, *command, **rank) for rank in ranks]


def test_two_processes_train_on_laion_coco(
    hub: Hub, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one downloads; codes and training are shared."""
    command = [
        str(ROOT / "train_draft/main.py"), *options, "train_data.limit=70", "source.shard_size=40",
        "source.min_side=8", "source.path=null", "source.timeout=120", "training.steps=2",
        "training.batch_size=4", "training.validate_every=2", "training.holdout=3",
        "training.decodes=1", "training.depth=2",
    ]  # fmt: skip
    with ImageServer() as web:
        hub.add_pictures(web)
        (tmp_path / "two").mkdir()
        out, error = ended(start(hub, tmp_path / "two", *TORCHRUN, *command))
        assert len(web.paths()) == len(set(web.paths())) <= 120
    assert "HTTP Request" not in out + error
    assert out.count("the draft is in") == 1
    assert sorted(fetched(hub)) == ["data/part-0.parquet", "t2i_XL_stage1_256.pt"]
    shutil.copytree(tmp_path / "two/outputs/images", tmp_path / "one/outputs/images")
    alone(hub, tmp_path / "one", monkeypatch, *command, "training.gradient_accumulation=2")
    (one, single), (two, both) = (trained(tmp_path / place) for place in ("one", "two"))
    assert both["data"] == single["data"] and both["data"]["count"] == 70
    assert (single["processes"], both["processes"]) == (1, 2)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)
    again = shutil.copytree(tmp_path / "two", tmp_path / "again")
    (draft,) = again.glob("outputs/train_draft/*/draft")
    shutil.rmtree(draft)
    alone(hub, again, monkeypatch, *command)  # reads what two processes saved
    resumed, _ = trained(again)
    assert all(torch.equal(resumed[name], value) for name, value in two.items())


def fetched(hub: Hub) -> list[str]:
    """The files of models and data sets that were downloaded, each as often as it was."""
    got = [request.path for request in hub.requests if request.method == "GET"]
    files = [path.partition("/resolve/")[2].partition("/")[2] for path in got]
    return [name for name in files if name.endswith((".pt", ".parquet"))]


def trained(place: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The draft's weights and what its metrics.json says."""
    (directory,) = (place / "outputs/train_draft").iterdir()
    metrics = json.loads((directory / "draft/metrics.json").read_text())
    return load_file(directory / "draft/model.safetensors"), metrics


def results(place: Path) -> dict[str, list[int]]:
    """The tokens of every image."""
    table = pq.read_table(place / "records", columns=["id", "tokens"]).to_pydict()
    return dict(zip(table["id"], table["tokens"], strict=True))


def test_two_nodes_evaluate_as_one_process(
    hub: Hub, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        str(ROOT / "eval/run.py"), *options, "method=sjd", "window=4", "data.limit=7",
        "batch_size=2", "metrics=none", "speed.prompts=0", "replays=0",
    ]  # fmt: skip
    (tmp_path / "two").mkdir()
    outputs = [ended(one) for one in tasks(hub, tmp_path / "two", *command)]
    alone(hub, tmp_path / "one", monkeypatch, *command)
    assert [out.count("report: ") for out, _ in outputs] == [1, 0]
    assert outputs[1] == ("", "")
    (two,) = (tmp_path / "two/outputs/eval").iterdir()
    (one,) = (tmp_path / "one/outputs/eval").iterdir()
    assert results(two) == results(one) and len(results(one)) == 7
    parts = [
        pq.read_table(part, columns=["id"])["id"].to_pylist()
        for part in (two / "records").glob("*.parquet")
    ]
    names = sorted(results(one))
    assert sorted(name for part in parts for name in part) == names  # each once
    shares = [{names.index(name) % 2 for name in part} for part in parts]
    assert all(len(share) == 1 for share in shares) and set.union(*shares) == {0, 1}
    assert all(fetched(hub).count(name) == 1 for name in fetched(hub))


def test_the_slurm_preset_submits_a_sweep(
    hub: Hub, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through submitit, whose local executor takes Slurm's place."""
    submitit = pytest.importorskip("submitit")
    auto = submitit.AutoExecutor
    monkeypatch.setattr(
        submitit, "AutoExecutor", lambda cluster, **more: auto(cluster="local", **more)
    )
    for name, value in (hub.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}).items():
        monkeypatch.setenv(name, value)
    alone(
        hub, tmp_path / "sweep", monkeypatch, str(ROOT / "eval/run.py"), "-m", *options,
        "method=ar", "seed=0,1", "data.limit=2", "metrics=none", "speed.prompts=0",
        "launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.sweep.dir=outputs/sweep",
    )  # fmt: skip
    runs = sorted((tmp_path / "sweep/outputs/sweep").glob("*/metrics.json"))
    assert [json.loads(run.read_text())["images"] for run in runs] == [2, 2]
