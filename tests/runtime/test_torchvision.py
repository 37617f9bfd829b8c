import subprocess
import sys
from pathlib import Path

import pytest

# What torchvision does when its compiled operators cannot be loaded: it registers a fake kernel for
# an operator that does not exist.
BROKEN = """
import torch
from . import extension
@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    return dets
"""


def python(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    head = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(BROKEN)
    (tmp_path / "torchvision" / "extension.py").write_text("")
    return tmp_path


@pytest.mark.slow
def test_a_torchvision_without_operators_is_repaired(broken: Path) -> None:
    plain = python("import torchvision", broken)
    assert "operator torchvision::nms does not exist" in plain.stderr
    mend = (
        "from tempera.runtime.torchvision import import_torchvision\n"
        "print(import_torchvision().__file__)\nimport torchvision"
    )
    mended = python(mend, broken)
    assert mended.returncode == 0, mended.stderr
    assert str(broken) in mended.stdout


@pytest.mark.slow
def test_other_failures_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('no disk')")
    done = python(
        "from tempera.runtime.torchvision import import_torchvision\nimport_torchvision()", tmp_path
    )
    assert "no disk" in done.stderr
