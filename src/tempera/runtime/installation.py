"""Where tempera runs from, a checkout or an installed wheel: its `conf/`, and how its commands are
called.
"""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "eval": "eval/run.py",
    "report": "eval/report.py",
    "calibrate": "eval/calibrate.py",
    "bench": "eval/bench.py",
    "train": "train_draft/main.py",
    "prepare": "train_draft/prepare.py",
    "build": "train_draft/build_shapes.py",
}
"""The commands `tempera-<name>`, and the scripts that do the same in a checkout."""


def conf_directory() -> Path:
    """The configurations: `conf/` of the checkout that this package lies in, editable installs
    included, or the copy that a wheel carries inside the package.
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
    """How to call `tempera-<name>`, in the form that this process was called in: as a script, as an
    installed command, or, in notebooks and the like, as a script where there is a checkout.
    """
    called = Path(sys.argv[0]).as_posix()
    script = called.endswith(tuple(SCRIPTS.values()))
    installed = Path(called).name.startswith("tempera-") or (PACKAGE / "conf").is_dir()
    return f"tempera-{name}" if installed and not script else f"python {SCRIPTS[name]}"
