"""A wheel, installed where no checkout is: the commands and the Python API work, and messages name
the commands as they were called.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
NAMES = ("bench", "eval", "export", "gpu-check", "prepare", "report", "score", "train", "tune")
QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "tracking=none"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel; everything else comes from this one, so
    that no network is needed.
    """
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("tempera_decoding-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    (packages,) = place.glob("env/lib/python*/site-packages")
    others = [place for place in sys.path if place.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    python = place / "env" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True
    )
    return python.parent


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def test_it_is_the_wheel_that_runs(installed: Path, workplace: Path) -> None:
    code = (
        "import tempera, tempera.runtime.installation as place;"
        "result = tempera.generate('a large green star', method='coolsd', delta=2);"
        "result.images[0].save('star.png');"
        "print(tempera.__file__, place.conf_directory(), place.command('eval'))"
    )
    done = run(installed / "python", "-c", code, cwd=workplace)
    assert done.returncode == 0, done.stderr
    module, conf, command = done.stdout.split()
    assert Path(module).is_relative_to(installed.parent)
    assert Path(conf) == Path(module).parent / "conf"
    assert command == "tempera-eval" and (workplace / "star.png").is_file()
    shipped = {path.relative_to(conf) for path in Path(conf).rglob("*.yaml")}
    assert shipped == {path.relative_to(ROOT / "conf") for path in ROOT.glob("conf/**/*.yaml")}


def test_a_run_and_its_report(installed: Path, workplace: Path) -> None:
    """Messages name the commands as they were called."""
    short = ["method=coolsd", "data.limit=1", "speed.prompts=0", "metrics=none", *QUIET]
    evaluated = run(installed / "tempera-eval", *short, cwd=workplace)
    assert evaluated.returncode == 0, evaluated.stderr
    report = run(installed / "tempera-report", "runs=outputs/eval", cwd=workplace)
    assert report.returncode == 0, report.stderr
    assert (workplace / "outputs" / "report" / "report.md").is_file()
    said = "".join(done.stdout + done.stderr for done in (evaluated, report))
    assert "eval/" not in said.replace("outputs/eval/", "")


COMMANDS = """
import sys
from importlib.metadata import entry_points
for command in entry_points(group="console_scripts"):
    if command.name.startswith("tempera-") and command.name != "tempera-env":
        sys.argv = [command.name, "nonsense=1"]
        try: command.load()()
        except SystemExit as end: print(command.name, end.code)
"""


def test_every_command_answers(installed: Path, workplace: Path) -> None:
    done = run(installed / "python", "-c", COMMANDS, cwd=workplace)
    assert done.returncode == 0, done.stderr
    ended = [f"tempera-{name} 1" for name in sorted(NAMES)]
    assert sorted(done.stdout.splitlines()) == ended
    told = "error: there is no option `nonsense`"
    assert [line.startswith(told) for line in done.stderr.splitlines()] == [True] * len(NAMES)
