import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tempera.errors import TemperaError
from tempera.runtime.installation import commit
from tempera.runtime.tracking import NoTracker, WandbTracker, no_tracker, wandb_tracker

SCRIPT = """
import sys
from pathlib import Path
from PIL import Image
from tempera.runtime.tracking import wandb_tracker
directory = Path(sys.argv[1])
Image.new("RGB", (4, 4)).save(directory / "a.png")
tags, config = ["method=coolsd", "x" * 80], {"delta": 2}
tracker = wandb_tracker(directory=directory, job_type="eval", group="g", tags=tags, config=config)
tracker.log({"accepted_length": 2.5}, step=1)
tracker.summary({"fid": 1.0})
tracker.image("grid", directory / "a.png", "a caption")
tracker.table("images", ["id", "image"], [["p", directory / "a.png"]])
(directory / "page.html").write_text("<p>a page</p>")
tracker.html("report", directory / "page.html")
tracker.artifact("results of a/b", "evaluation", [directory / "a.png"])
print("id", tracker.run.id)
assert tracker.run.config["delta"] == 2 and "git_commit" in tracker.run.config
tracker.finish()
"""


@pytest.mark.slow
def test_offline_run_says_how_to_sync_and_keeps_its_id(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    ids = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.strip().splitlines()
        assert len(lines) == 2, lines
        assert lines[0].startswith("W&B: not logged in") and "wandb sync" in lines[0]
        assert Path(lines[0].split()[-1]).is_dir()
        ids.append(lines[1])
    assert ids[0] == ids[1]
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_resumed_run_may_log_a_step_again() -> None:
    logged: list[dict[str, float]] = []

    class Refusing:
        """As W&B: an internal step that goes back is dropped."""

        def define_metric(self, name: str, **settings: object) -> None:
            assert settings.get("step_metric", "step") == "step"

        def log(self, values: dict[str, float], step: int | None = None) -> None:
            if step is None or not logged or step >= logged[-1].get("step", 0):
                logged.append(values)

    tracker = WandbTracker(Refusing())
    for step in (1, 2, 2, 3):
        tracker.log({"loss": 1.0 / step}, step=step)
    tracker.log({"loss": 1.0}, step=1)
    assert [values["step"] for values in logged] == [1, 2, 2, 3, 1]


@pytest.mark.slow
def test_a_table_and_a_number_may_have_the_same_name() -> None:
    logged: dict[str, object] = {}

    class Summary:
        """As W&B: the last value logged under a key is its summary."""

        summary = logged

        def define_metric(self, name: str, **settings: object) -> None:
            pass

        def log(self, values: dict[str, object]) -> None:
            logged.update(values)

    tracker = WandbTracker(Summary())
    tracker.summary({"images": 64})
    tracker.table("images", ["id"], [["p"]])
    assert logged["images"] == 64
    assert len(logged) == 2


@pytest.mark.slow
def test_the_name_of_an_artifact_is_one_that_wandb_accepts(tmp_path: Path) -> None:
    logged: list[Any] = []

    class Run:
        """Keeps artifacts."""

        def define_metric(self, name: str, **settings: object) -> None:
            pass

        def log_artifact(self, artifact: Any) -> None:
            logged.append(artifact)

    (tmp_path / "a.txt").write_text("a")
    tracker = WandbTracker(Run())
    for name in ("shapes-coolsd δ=1.5", "x" * 200):
        tracker.artifact(name, "evaluation", [tmp_path / "a.txt"])
    assert [artifact.name for artifact in logged] == ["shapes-coolsd-1.5", "x" * 128]
    assert logged[0].type == "evaluation" and list(logged[0].manifest.entries) == ["a.txt"]


def test_the_commit_of_the_checkout_is_known() -> None:
    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)


def test_only_the_main_process_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert isinstance(wandb_tracker(directory=tmp_path), NoTracker)
    assert not list(tmp_path.iterdir())


def test_no_tracking_accepts_the_same_arguments(tmp_path: Path) -> None:
    tracker = no_tracker(
        directory=tmp_path, job_type="eval", group="g", tags=["a"], config=json.loads("{}")
    )
    tracker.log({"a": 1.0}, step=1)
    tracker.image("grid", tmp_path / "missing.png")
    tracker.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "environment"),
    [({"mode": "on"}, None), ({}, "on"), ({"project": "a/b"}, "offline")],
)
def test_what_wandb_refuses_is_one_error(
    options: dict[str, Any],
    environment: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    with pytest.raises(TemperaError, match="W&B refuses the run"):
        wandb_tracker(directory=tmp_path, **options)
