"""transformers is imported in one place, after torchvision has been repaired; see
`tempera.runtime.huggingface`.
"""

import re

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
