"""README.md is true: its commands run, its files exist, its table lists the methods there are."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from paths import ROOT
from PIL import Image

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
INDENTED = [line.strip() for line in re.findall(r"(?m)^    (?:pip|python) .*$", TEXT)]
COMMANDS = [
    part.strip()
    for line in INDENTED
    for part in line.split("&&")
    if part.strip().startswith("python ")
]
QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
SHORT = {  # what makes a command short enough for a test; the set-up commands run whole in .ci/run
    "eval/run.py": ["limit=1", "speed.prompts=0", "metrics=none", "tracking=none", *QUIET],
    "eval/report.py": [],
    "eval/calibrate.py": ["limit=1", *QUIET],
    "eval/bench.py": ["repeats=1", *QUIET],
    "train_draft/main.py": [
        *(
            "steps=2",
            "batch_size=2",
            "warmup_steps=1",
            "holdout=2",
            "decodes=1",
            "validate_every=2",
            "checkpoint_every=2",
            "tracking=none",
        ),
        *QUIET,
    ],
    "train_draft/prepare.py": QUIET,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with what the commands take from the user: a file of prompts, and photos
    with captions beside them.
    """
    directory = tmp_path_factory.mktemp("readme")
    (directory / "prompts.txt").write_text(
        "a small red ring\na large blue star\n", encoding="utf-8"
    )
    (directory / "photos").mkdir()
    for number in range(120):
        Image.new("RGB", (80, 64), (2 * number, 90, 200)).save(
            directory / "photos" / f"{number}.png"
        )
        (directory / "photos" / f"{number}.txt").write_text(
            f"photo {number} of the sky\n", encoding="utf-8"
        )
    return directory


def shortened(argument: str) -> str:
    """A sweep over the first and the last of its values."""
    name, separator, values = argument.partition("=")
    several = values.split(",")
    return (
        f"{name}={several[0]},{several[-1]}"
        if separator and len(several) > 2 and " " not in values
        else argument
    )


def test_two_set_up_commands_and_ci_runs_them() -> None:
    assert [line for line in INDENTED if line.startswith("pip")] == [
        "pip install -c constraints.txt -e . && python eval/run.py method=coolsd delta=2",
        'pip install -c constraints.txt -e ".[dev]" && pytest',
    ]
    assert r"grep -E '^    pip install -c constraints\.txt -e ' README.md" in (
        ROOT / ".ci" / "run"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one working directory: later commands use what earlier ones made."""
    _, script, *arguments = shlex.split(command)
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "argv", [script, *map(shortened, arguments), *SHORT[script]])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def test_the_commands_left_what_they_promise(workplace: Path) -> None:
    assert len(list((workplace / "outputs").glob("eval/*/metrics.json"))) >= 5
    assert (workplace / "outputs/train_draft/shapes/draft/model.safetensors").is_file()
    for name in ("report.md", "results.csv"):
        assert (workplace / "outputs/report" / name).is_file()
    assert (
        len({path.parent for path in (workplace / "outputs/frontier").rglob("metrics.json")}) == 10
    )


def test_the_python_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = io.StringIO()
    for block in re.findall(r"(?ms)^```python\n(.*?)^```", TEXT):
        with contextlib.redirect_stdout(said):
            exec(compile(block, "README.md", "exec"), {})
    exact, relaxed = said.getvalue().splitlines()
    assert exact.startswith("agrees")
    assert relaxed.startswith("DIFFERS")


def test_its_files_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", TEXT)
    named = re.findall(r"`((?:notebooks|conf|eval|train_draft)/[\w./]*)`", TEXT)
    assert [
        name for name in [*linked, *named] if "://" not in name and not (ROOT / name).exists()
    ] == []


def test_the_table_lists_the_methods() -> None:
    listed = re.findall(r"(?m)^\| `(\w+)` \|", TEXT)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
