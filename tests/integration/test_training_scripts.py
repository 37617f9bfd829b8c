"""train_draft/main.py and train_draft/prepare.py as a user runs them, on the shipped model."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from paths import ROOT

from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.drafters.draft_files import read_draft
from tempera.drafters.eagle_network import EagleModel

pytestmark = pytest.mark.slow
QUICK = [
    "tracking=none",
    "training.steps=2",
    "training.batch_size=2",
    "training.validate_every=2",
    "training.holdout=2",
    "training.matrix_lr=0",  # Muon takes most of a step
    "guidance=1",
]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a script of train_draft/ -> exit status, output, errors."""

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        AcceleratorState._reset_state(True)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        status = 0
        try:
            runpy.run_path(str(ROOT / "train_draft" / f"{script}.py"), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capfd.readouterr()

    return run


def test_drafts_of_the_world_and_of_shards(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is trained on the world, drafts and is published; it is the start of another one, on
    shards.
    """
    first = [*QUICK, "training.decodes=1", f"hydra.run.dir={tmp_path}"]
    draft = tmp_path / "draft"
    status, out, err = command("main", *first)
    assert status == 0, err
    assert f"drafter.path={draft}" in out
    metrics = json.loads((draft / "metrics.json").read_text())
    assert metrics["finished"] and metrics["model"] == "shapes"
    assert metrics["best"]["accepted_length"] >= 1
    cfg = composed("eval", ["method=eagle", f"drafter.path={draft}"])
    assert Parts.of(cfg).drafter(Parts.of(cfg).target()).depth == 5
    uploaded: list[Any] = []
    monkeypatch.setattr("huggingface_hub.whoami", dict)
    monkeypatch.setattr("huggingface_hub.create_repo", lambda *given, **_: uploaded.extend(given))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **given: uploaded.append(given))
    status, out, _ = command("main", *first, "push_to_hub=me/draft")
    assert (status, f"{tmp_path}: already trained, 2 steps." in out) == (0, True)
    assert uploaded == ["me/draft", {"repo_id": "me/draft", "folder_path": draft}]
    card = (draft / "README.md").read_text()
    assert all(word in card for word in ("library_name: tempera", "accepted_length", "- lr: "))
    assert "drafter=eagle drafter.path=me/draft" in out
    status, _, err = command("main", *first, "training.hidden_noise=0.2")
    assert status == 1 and f"error: {tmp_path} was made with" in err.splitlines()[-1]

    shards = tmp_path / "shards"
    options = ["source.count=20", "shard_size=12", "tracking=none", f"hydra.run.dir={shards}"]
    status, out, err = command("prepare", *options)
    assert status == 0, err
    assert "20 images in 2 shards, 0 broken entries" in out
    before = {path.name: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert command("prepare", *options)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in shards.iterdir()} == before
    data = ["train_data=shards", f"train_data.path={shards}", "training.decodes=0"]
    still = [f"start={draft}", "training.lr=1e-12"]
    status, _, err = command("main", *QUICK, *data, *still, f"hydra.run.dir={tmp_path / 'more'}")
    assert status == 0, err
    old, new = (
        read_draft(EagleModel, place).state_dict() for place in (draft, tmp_path / "more/draft")
    )
    torch.testing.assert_close(new, old, rtol=0, atol=1e-6)


def test_the_target_draws_training_images(tmp_path: Path, command: Command) -> None:
    drawn = ["encoder=target", "source.count=2", "tracking=none", f"hydra.run.dir={tmp_path}"]
    status, _, err = command("prepare", *drawn, "guidance=1")
    assert status == 0, err
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (
        manifest["encoder"]["kind"] == "target"
        and sum(shard["count"] for shard in manifest["shards"]) == 2
    )
    assert manifest["encoder"]["sampling"]["guidance"] == 1
    status, _, err = command("prepare", *drawn, "guidance=2")
    assert err.splitlines()[-1].startswith(f"error: {tmp_path} was made with encoder")


def test_a_dry_run_prints_what_it_would_do_and_writes_nothing(
    tmp_path: Path, command: Command
) -> None:
    status, out, err = command(
        "prepare",
        "dry_run=true",
        "source.count=60",
        "source.limit=40",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert status == 0, err
    assert "to do: encode at most 40 entries of the source into" in out
    assert not (tmp_path / "run").exists()
