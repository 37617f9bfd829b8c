"""The commands of docs/real/ compose with the models' own defaults; tests/integration/
test_real_path.py runs the like of them against a hub on loopback.
"""

import re
import shlex
from pathlib import Path

import pytest
from paths import ROOT

from tempera.config.compose import composed

SCRIPTS = {
    "eval/run.py": "eval",
    "eval/report.py": "report",
    "train_draft/main.py": "train_draft",
    "train_draft/prepare.py": "prepare",
}


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


COMMANDS = [
    command for page in sorted((ROOT / "docs/real").glob("*.md")) for command in commands(page)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_composes(command: str) -> None:
    words = shlex.split(command)
    script = next(word for word in words if word in SCRIPTS)
    options = [word for word in words[words.index(script) + 1 :] if word != "-m"]
    plain = [option for option in options if not option.startswith("hydra.")]
    if any(option.startswith("launcher=") for option in plain):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    plain = [re.sub(r"=([^,\[]+),.*", r"=\1", option) for option in plain]  # of a sweep the first
    composed(SCRIPTS[script], plain)
    assert len(COMMANDS) > 10
