"""Where conf/ is found, and how messages name the commands."""

import sys
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

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
    assert set(project["scripts"]) == commands
    assert all((ROOT / script).is_file() for script in installation.SCRIPTS.values())
