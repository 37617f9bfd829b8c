"""Differences between a checkout and an installed wheel: where `conf/` is, and how to call the
commands.
"""

import shlex
import subprocess
import sys
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "eval": "eval/run.py",
    "score": "eval/score.py",
    "export": "eval/export.py",
    "report": "eval/report.py",
    "bench": "eval/bench.py",
    "gpu-check": "eval/gpu_check.py",
    "tune": "eval/tune.py",
    "train": "train_draft/main.py",
    "prepare": "train_draft/prepare.py",
}
"""For each command `tempera-<name>`, the equivalent script of a checkout."""
FLAGS: ContextVar[tuple[str, ...]] = ContextVar("flags", default=())
"""Of the command line that is running: those without which a command does not find the user's own
configurations.
"""


def installed_version() -> str:
    """Of tempera."""
    return version("tempera-decoding")


def version_of(package: str) -> str:
    """Of a distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def conf_directory() -> Path:
    """The directory of configurations: `conf/` of the checkout (also with an editable install), or
    the copy inside an installed wheel.
    """
    packaged = PACKAGE / "conf"
    return packaged if packaged.is_dir() else PACKAGE.parents[1] / "conf"


def commit() -> str | None:
    """The git commit of the checkout, followed by `-dirty` if files differ from it; None for an
    installed package.
    """
    checkout = PACKAGE.parents[1]
    if not (checkout / ".git").exists():
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*describe, "--exclude=*"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command(name: str) -> str:
    """How the user should call `tempera-<name>`: in the form in which this process was started, a
    script or an installed command, with its `FLAGS`. In a notebook it is the script if there is a
    checkout.
    """
    called = Path(sys.argv[0]).as_posix()
    script = called.endswith(tuple(SCRIPTS.values()))
    installed = Path(called).name.startswith("tempera-") or (PACKAGE / "conf").is_dir()
    form = f"tempera-{name}" if installed and not script else f"python {SCRIPTS[name]}"
    return shlex.join([*form.split(), *FLAGS.get()])
