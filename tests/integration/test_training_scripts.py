"""train_draft/main.py and train_draft/prepare.py as a user runs them, on the shipped model."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from hydra import compose, initialize_config_dir
from paths import ROOT

from tempera.config.build import build_drafter, build_target
from tempera.drafters.eagle_network import EagleModel
from tempera.shapes.networks import SHIPPED

pytestmark = pytest.mark.skipif(
    not all(
        (SHIPPED / part / "model.safetensors").is_file()
        for part in ("tokenizer", "target", "text_encoder")
    ),
    reason="the shipped weights are not built yet",
)
QUICK = [
    "tracking=none",
    "steps=2",
    "batch_size=2",
    "validate_every=2",
    "holdout=2",
    "decodes=1",
    "guidance=1",
]
Command = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a script's entry function on a command line -> exit status, output, errors."""

    def run(script: str, *arguments: str) -> tuple[int | str | None, str, str]:
        AcceleratorState._reset_state(True)
        spec = importlib.util.spec_from_file_location(
            f"train_draft_{script}", ROOT / "train_draft" / f"{script}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        status: int | str | None = 0
        try:
            module.main()
        except SystemExit as stop:
            status = stop.code
        return status, *capfd.readouterr()

    return run


@pytest.mark.slow
def test_a_draft_is_trained_on_the_world_and_drafts(tmp_path: Path, command: Command) -> None:
    status, out, err = command("main", *QUICK, f"hydra.run.dir={tmp_path}")
    assert status == 0, err
    assert f"drafter.path={tmp_path / 'draft'}" in out
    metrics = json.loads((tmp_path / "draft" / "metrics.json").read_text())
    assert metrics["finished"]
    assert metrics["model"] == "shapes"
    assert metrics["best"]["accepted_length"] >= 1
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("eval", ["method=eagle", f"drafter.path={tmp_path / 'draft'}"])
    target = build_target(cfg)
    assert build_drafter(cfg, target).depth == 5
    status, out, err = command("main", *QUICK, f"hydra.run.dir={tmp_path}")
    assert (status, f"{tmp_path}: already trained, 2 steps." in out) == (0, True)
    status, out, err = command(
        "main",
        *QUICK,
        "steps=1",
        "decodes=0",
        f"start={tmp_path / 'draft'}",
        "lr=1e-12",
        "matrix_lr=1e-12",
        f"hydra.run.dir={tmp_path / 'more'}",
    )
    assert status == 0, err
    first, more = (
        EagleModel.from_pretrained(directory / "draft").state_dict()
        for directory in (tmp_path, tmp_path / "more")
    )
    torch.testing.assert_close(more, first, rtol=0, atol=1e-6)
    status, out, err = command("main", *QUICK, "hidden_noise=0.2", f"hydra.run.dir={tmp_path}")
    assert status == 1
    assert err.splitlines()[-1].startswith(
        f"error: {tmp_path} was started with recipe.hidden_noise=0.1, now it is 0.2: "
    )


@pytest.mark.slow
def test_shards_of_the_world_train_a_draft(tmp_path: Path, command: Command) -> None:
    shards = tmp_path / "shards"
    options = ["source.count=40", "shard_size=25", f"hydra.run.dir={shards}"]
    status, out, err = command("prepare", *options)
    assert status == 0, err
    assert "40 images in 2 shards, 0 broken entries" in out
    before = {path.name: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert command("prepare", *options)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in shards.iterdir()} == before
    run = [
        "train_data=shards",
        f"train_data.path={shards}",
        *QUICK,
        "decodes=0",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    status, out, err = command("main", *run)
    assert status == 0, err
    assert json.loads((tmp_path / "run" / "training.json").read_text())["train_data"][
        "path"
    ] == str(shards)


@pytest.mark.slow
def test_a_dry_run_prints_what_it_would_do_and_writes_nothing(
    tmp_path: Path, command: Command
) -> None:
    status, out, err = command(
        "prepare", "dry_run=true", "source.count=60", "limit=40", f"hydra.run.dir={tmp_path}"
    )
    assert status == 0, err
    assert "to do: at most 40 entries of the source (count=60" in out
    assert {path.name for path in tmp_path.iterdir()} <= {".hydra", "prepare.log"}


@pytest.mark.slow
def test_the_target_draws_training_images(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(0)
    status, _, err = command(
        "prepare", "encoder=target", "source.count=2", "guidance=1", f"hydra.run.dir={tmp_path}"
    )
    assert status == 0, err
    manifest: dict[str, Any] = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["encoder"]["kind"] == "target"
    assert manifest["encoder"]["sampling"]["guidance"] == 1
    assert manifest["count"] == 2
    status, _, err = command(
        "prepare", "encoder=target", "source.count=2", "guidance=2", f"hydra.run.dir={tmp_path}"
    )
    assert err.splitlines()[-1].startswith(f"error: {tmp_path} holds shards of another encoder")


REFUSED = {
    "main lr=-1": "`lr=-1`",
    "main stepz=5": "there is no option `stepz`",
    "main recipe=foo": "there is no recipe=foo: choose one of chameleon, llamagen, shapes",
    "main train_data=foo": "there is no train_data=foo: choose one of generated,",
    "main train_data=shards": "`train_data.path` has no value",
    "main train_data=shards train_data.path=/absent": "/absent holds no manifest.json",
    "main batch_size=5 gradient_accumulation=2": "batch_size=5 does not divide",
    "prepare source=foo": "there is no source=foo: choose one of coco,",
    "prepare source=imagefolder source.path=/absent": "/absent does not exist: give the path of "
    "an image folder",
    "prepare shard_size=many": "`shard_size=many`",
    "prepare dry_run=maybe": "`dry_run=maybe`",
    "prepare dry_run=true limit=0": "`limit=0`",
    "prepare encoder=foo": "there is no encoder=foo: choose one of target, vq",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", REFUSED)
def test_refused_in_one_sentence(line: str, tmp_path: Path, command: Command) -> None:
    script, *arguments = line.split()
    tracking = ["tracking=none"] if script == "main" else []
    status, _, err = command(script, *tracking, *arguments, f"hydra.run.dir={tmp_path / 'run'}")
    last = err.replace("\r", "\n").splitlines()[-1]
    assert status == 1
    assert last.startswith(f"error: {REFUSED[line]}"), err
    assert not (tmp_path / "run" / "draft").exists()
