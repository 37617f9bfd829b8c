import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from tempera.config.compose import composed
from tempera.config.tracking import Tracking
from tempera.runtime.tracking import (
    Tracker,
    WandbTracker,
    csv_tracker,
    no_tracker,
    tensorboard_tracker,
    wandb_tracker,
)

USUAL: dict[str, Any] = {"project": "tempera", "mode": "auto"}
SCRIPT = """
import sys
from pathlib import Path
from PIL import Image
from tempera.runtime.tracking import wandb_tracker
directory = Path(sys.argv[1])
Image.new("RGB", (4, 4)).save(directory / "a.png")
tracker = wandb_tracker(
    directory=directory,
    project="tempera",
    mode="auto",
    job_type="eval",
    group="g",
    tags=["method=coolsd", "x" * 80],
    config={"delta": 2},
)
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


VARIABLES = {
    "MODE": "offline", "PROJECT": "mine", "ENTITY": "us", "NAME": "named", "RUN_GROUP": "grouped",
    "JOB_TYPE": "job", "NOTES": "noted", "TAGS": "a, b", "RUN_ID": "foreign", "RESUME": "must",
    "DIR": "elsewhere",
}  # fmt: skip
FOLLOWED = """
from pathlib import Path
from tempera.config.compose import composed
from tempera.config.tracking import Tracking
run = Tracking.of(composed("eval", ["data.limit=1"], Path("run")), "eval").start(Path("run")).run
told = (run.project, run.entity, run.name, run.group, run.job_type, run.notes)
print(*told, {"a", "b"} <= set(run.tags), run.id == Path("run/wandb_run_id").read_text().strip())
print(run.dir)
run.finish()
"""


@pytest.mark.slow
def test_wandbs_own_variables_are_followed_or_not_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    environment = os.environ | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    environment |= {f"WANDB_{name}": value for name, value in VARIABLES.items()}
    command = [sys.executable, "-c", FOLLOWED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, told, place = done.stdout.splitlines()
    assert told == "mine us named grouped job noted True True", done.stdout
    assert (tmp_path / place).is_relative_to(tmp_path / "run") and not any(
        (tmp_path / "elsewhere").iterdir()
    )


@pytest.mark.parametrize("value", ["true", "1", "false", ""])
def test_wandb_disabled_is_followed_where_the_mode_is_auto(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    monkeypatch.setattr("wandb.init", started)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_DISABLED", value)
    for mode in ("auto", "offline"):
        wandb_tracker(directory=tmp_path, project="tempera", mode=mode)
    modes = [call.kwargs["mode"] for call in started.call_args_list]
    assert modes == ["disabled" if value in ("true", "1") else "offline", "offline"]


@pytest.mark.parametrize(
    ("mode", "variable", "why"),
    [
        ("auto", "offline", "WANDB_MODE is offline"),
        ("auto", "dryrun", "WANDB_MODE is dryrun"),
        ("auto", "", "not logged in"),
        ("offline", "online", "tracking.mode is offline"),
    ],
)
def test_an_offline_run_says_why(
    mode: Any,
    variable: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("wandb.init", Mock(return_value=Mock(dir=str(tmp_path / "run" / "files"))))
    monkeypatch.setattr("wandb.login", lambda **_: False)
    monkeypatch.setenv("WANDB_MODE", variable)
    wandb_tracker(directory=tmp_path, project="tempera", mode=mode)
    told = f"W&B: {why}, so the run is logged offline; send it with: wandb sync {tmp_path / 'run'}"
    assert capsys.readouterr().out == f"{told}\n"


def test_a_step_is_a_value_because_a_resumed_run_may_log_it_again() -> None:
    tracker = WandbTracker(run := Mock())
    tracker.log({"loss": 1.0}, step=7)
    run.define_metric.assert_called_with("*", step_metric="step")
    run.log.assert_called_once_with({"loss": 1.0, "step": 7})
    tracker.table("images", ["id"], [["a"]])
    assert [*run.log.call_args.args[0]] == ["tables/images"]  # a scalar may have its name


def test_a_resumed_run_goes_on_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    monkeypatch.setattr("wandb.init", started)
    for _ in range(2):
        wandb_tracker(directory=tmp_path, project="tempera", mode="online", config={"delta": 2})
    first, second = (call.kwargs for call in started.call_args_list)
    assert first == second and (first["resume"], first["config"]["delta"]) == ("allow", 2)
    settings = first["settings"]  # a server that takes nothing does not hold a run
    assert settings.finish_timeout == 600 and settings.finish_timeout_raises


def test_only_the_main_process_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for make in (partial(wandb_tracker, **USUAL), no_tracker):
        tracker = make(directory=tmp_path, job_type="eval", group="g", tags=["a"], config={})
        tracker.log({"a": 1.0}, step=1)
        tracker.image("grid", tmp_path / "missing.png")
        tracker.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "environment"),
    [({"mode": "on"}, None), ({}, "on"), ({"project": "a/b"}, "offline")],
)
def test_what_wandb_refuses_is_told_and_the_run_goes_on(
    options: dict[str, Any],
    environment: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert type(wandb_tracker(directory=tmp_path, **USUAL | options)) is Tracker
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B does not start (it refuses the run: ")
    assert line.endswith("continues without it.")


def test_a_directory_that_wandb_cannot_write_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb").touch()
    refused = NotADirectoryError(20, "Not a directory", str(tmp_path / "wandb"))
    monkeypatch.setattr("wandb.init", Mock(side_effect=refused))
    assert type(wandb_tracker(directory=tmp_path, **USUAL | {"mode": "offline"})) is Tracker
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B does not start ([Errno 20] Not a directory")


def test_a_tracker_that_fails_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = Mock()
    run.log.side_effect = OSError(28, "No space left on device")
    tracker = WandbTracker(run)
    for _ in range(2):
        tracker.log({"a": 1.0})
        tracker.image("a", tmp_path / "missing.png")
        tracker.artifact("a", "b", [tmp_path / "missing"])
        tracker.finish()
    (line,) = capsys.readouterr().out.splitlines()
    assert "W&B failed" in line and "No space left on device" in line
    (record,) = caplog.records  # in the run's log file
    assert record.exc_info is not None and record.exc_info[0] is OSError
    run.finish.assert_not_called()


def test_numbers_of_a_run_and_of_its_resumption_are_rows(tmp_path: Path) -> None:
    for step in (1, 2):
        with csv_tracker(directory=tmp_path, project="not read") as tracker:
            tracker.log({"loss": 1.5}, step=step)
            tracker.summary({"fid": 2.0})
            tracker.image("grid", tmp_path / "missing.png")
    lines = (tmp_path / "tracked.csv").read_text().splitlines()
    assert lines == ["step,name,value", *("1,loss,1.5", ",final/fid,2.0", "2,loss,1.5"), lines[2]]


def test_tensorboard_that_is_not_installed_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert type(tensorboard_tracker(directory=tmp_path)) is Tracker
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("TensorBoard does not start (it is not installed: pip install")


def test_tensorboard_gets_numbers_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with tensorboard_tracker(directory=tmp_path, config={"delta": 2}) as tracker:
        tracker.log({"loss": 1.5, "word": "no number"}, step=3)
        tracker.summary({"fid": 2.0})
        tracker.image("grid", tmp_path / "a.png")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (event,) = found.Scalars("loss")
    assert (event.step, event.value) == (3, 1.5)
    assert found.Tags()["images"] == ["grid"] and "final/fid" in found.Tags()["scalars"]


@pytest.mark.parametrize("tracking", ["csv", "none"])
def test_a_tracker_is_a_yaml(tracking: str, tmp_path: Path) -> None:
    part = Tracking.of(composed("eval", [f"tracking={tracking}"]), "eval")
    with part.start(tmp_path) as tracker:
        tracker.log({"loss": 1.5})
    assert (tmp_path / "tracked.csv").exists() == (tracking == "csv")
