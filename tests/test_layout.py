"""What keeps the package in layers: imports, and the length of functions; and the table of the
findings beside it.
"""

import ast
import re
import subprocess
import sys

from paths import ROOT


def test_no_function_is_longer_than_sixty_lines():
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in (ROOT / "src" / "tempera").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    }
    assert long == set()


def lint_imports(directory):
    """In a process of its own, whose loggers it may switch off."""
    script = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def test_imports_point_downwards():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


def test_an_upward_import_is_seen(tmp_path):
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
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "tempera.decoding -> tempera.rules" in done.stdout


def test_the_table_of_findings_names_each_script():
    findings = ROOT / "findings"
    table = findings.joinpath("README.md").read_text(encoding="utf-8")
    named = re.findall(r"(?m)^\| \[?(\w+)\b", table.partition("|---")[2])
    assert sorted(named) == sorted(script.stem for script in findings.glob("*.sh"))
