"""What keeps the package small and in layers: imports, the length of functions, and its weight."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from paths import ROOT

CORE = (
    "continuous",
    "decoding",
    "drafters",
    "errors.py",
    "exactness",
    "image_tokenizers",
    "rules",
    "targets",
)
BUDGETS = {"core": 5_800, "src/tempera": 15_000, "tests": 14_000}
"""Most lines of code, without docstrings, comments and blank lines. A change that needs more takes
something else away.
"""
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def weight(source: str) -> int:
    """Lines of code of a Python file, without docstrings, comments and blank lines."""
    code, texts = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - texts)


def files(part: str) -> list[Path]:
    """The Python files that a budget counts."""
    core = [ROOT / "src" / "tempera" / name for name in CORE]
    return [
        file
        for place in (core if part == "core" else [ROOT / part])
        for file in ([place] if place.is_file() else place.rglob("*.py"))
    ]


def test_a_line_of_code_is_counted_once():
    source = '"""Doc."""\n\nx = (\n    1,  # one\n)\n# comment\ny = """text\nmore"""\n'
    assert weight(source) == 5


@pytest.mark.parametrize("part", BUDGETS)
def test_the_code_stays_within_its_budget(part):
    assert sum(weight(file.read_text(encoding="utf-8")) for file in files(part)) <= BUDGETS[part]


def test_no_function_is_longer_than_sixty_lines():
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in files("src/tempera")
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
