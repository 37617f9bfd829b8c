"""transformers is imported in one place, after torchvision has been repaired; see
`tempera.runtime.huggingface`.
"""

import re
import subprocess
import sys

import pytest
from paths import ROOT

PACKAGE = ROOT / "src" / "tempera"


def test_nobody_else_imports_transformers() -> None:
    importing = re.compile(
        r"^\s*(?:from|import) (?:transformers|torchvision|open_clip)\b", re.MULTILINE
    )
    found = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if importing.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["runtime/huggingface.py"]


@pytest.mark.slow
def test_the_target_imports_in_a_fresh_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tempera.targets.llamagen"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
