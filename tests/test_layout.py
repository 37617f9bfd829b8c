"""What keeps the package in layers: imports, and the length of functions."""

import ast
import subprocess
import sys

from importlinter.cli import lint_imports
from paths import ROOT


def test_no_function_is_longer_than_sixty_lines():
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in (ROOT / "src" / "tempera").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    }
    assert long == set()


def test_imports_point_downwards(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert lint_imports() == 0


def test_an_upward_import_is_seen(monkeypatch, tmp_path):
    (tmp_path / "tempera").mkdir()
    settings = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    layers = ast.literal_eval(settings.partition("layers = ")[2].partition("]")[0] + "]")
    for name in layers:
        (tmp_path / "tempera" / f"{name}.py").touch()
    (tmp_path / "tempera" / "__init__.py").touch()
    (tmp_path / "tempera" / "decoding.py").write_text("def late():\n    import tempera.rules\n")
    (tmp_path / "pyproject.toml").write_text(
        "[tool.importlinter]" + settings.partition("[tool.importlinter]")[2]
    )
    script = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "tempera.decoding -> tempera.rules" in done.stdout
