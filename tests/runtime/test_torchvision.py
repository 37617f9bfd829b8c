import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

# What torchvision does when its compiled operators cannot be loaded: it registers a fake kernel for
# an operator that does not exist.
BROKEN = """
import torch
from . import extension
@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    return dets
"""


@pytest.mark.slow
def test_a_torchvision_without_operators_is_repaired(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(BROKEN)
    (tmp_path / "torchvision" / "extension.py").write_text("")
    mend = "from tempera.runtime.torchvision import import_torchvision\nimport_torchvision()\n"
    plain, mended = (
        subprocess.run(
            [sys.executable, "-c", f"{before}import torchvision\nprint(torchvision.__file__)"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for before in ("", mend)
    )
    assert "operator torchvision::nms does not exist" in plain.stderr
    assert str(tmp_path) in mended.stdout, mended.stderr
