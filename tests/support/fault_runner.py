"""Shows a copy of the sources with a fault in it to tests, in a process of its own. The libraries
are imported once, before.
"""

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAST = "not slow and not docs and not gpu"
SLOW = "slow"
SECONDS = 600
"""Processor time that the tests of a fault may take."""
ENDLESS = "a decoding that does not end"


def copy_sources(place: Path) -> Path:
    """Copy src/ to `place`/src, with conf/ beside it, and return it."""
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "conf").symlink_to(ROOT / "conf")
    return place / "src"


def seen_by(tests: Sequence[str], sources: Path, marks: str, seconds: int = SECONDS) -> str | None:
    """The first test that fails on these sources; none if all pass.

    Args:
        tests: files below tests/, in the order in which they run.
        sources: the copy of src/.
        marks: expression of pytest markers.
        seconds: processor time after which a test counts as failed.
    """
    read, write = os.pipe()
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        sys.path[:0] = [str(sources), str(ROOT / "tests" / "support")]
        os.chdir(ROOT)
        os.write(write, _run(tests, marks).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    _, status = os.wait()
    return told or (ENDLESS if os.WIFSIGNALED(status) else None)


def _run(tests: Sequence[str], marks: str) -> str:
    import pytest

    class First:
        name = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.name:
                self.name = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.name:
                self.name = f"collecting {report.nodeid}"

    first = First()
    files = [str(ROOT / "tests" / name) for name in tests]
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        status = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *files], plugins=[first]
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return first.name or "starting the tests"
    return first.name


def warm() -> None:
    """Import the libraries, and nothing of tempera's."""
    sys.path.insert(0, str(ROOT / "src"))
    import tempera.runtime.huggingface  # noqa: F401

    sys.path.pop(0)
    for name in [name for name in sys.modules if name.split(".")[0] == "tempera"]:
        del sys.modules[name]
