"""Where conf/ is found, and how messages name the commands."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from paths import ROOT

from tempera.commands import environment
from tempera.runtime import installation


@pytest.mark.parametrize(
    ("called", "wheel", "message"),
    [
        ("eval/run.py", False, "python eval/report.py"),
        ("/usr/bin/tempera-train", True, "tempera-report"),
        ("ipykernel_launcher.py", False, "python eval/report.py"),
        ("ipykernel_launcher.py", True, "tempera-report"),
    ],
)
def test_messages_call_commands_as_the_user_did(
    called: str, wheel: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wheel:
        (tmp_path / "conf").mkdir()
    monkeypatch.setattr(installation, "PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "argv", [called])
    assert installation.command("report") == message


def test_every_command_has_its_script_and_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = {f"tempera-{name}" for name in installation.SCRIPTS}
    assert set(project["scripts"]) == commands | {"tempera-env"}  # which needs no checkout
    assert all((ROOT / script).is_file() for script in installation.SCRIPTS.values())


def test_the_environment_is_told_for_bug_reports_also_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://a.org")
    environment.main()
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert told["tempera"].startswith(installation.installed_version())
    assert told["HF_ENDPOINT"] == "http://a.org" and told["torch"] in torch.__version__
    assert f", PyTorch {torch.__version__}" in told["device"]
    assert "GB free" in told["hub's cache"] and "GB free" in told["tempera's cache"]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tempera.evaluation.latency")
    environment.main()
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert told["device"].startswith("unknown (ModuleNotFoundError: import of torch halted")


def test_the_commit_says_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *own, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "src" / "tempera")
    assert installation.commit() is None
    file = tmp_path / "a.txt"
    file.write_text("a", encoding="utf-8")
    git("init", "-q")
    git("add", "a.txt")
    git("commit", "-qm", "Begin")
    head = git("rev-parse", "HEAD")
    assert installation.commit() == head
    file.write_text("b", encoding="utf-8")
    assert installation.commit() == f"{head}-dirty"
