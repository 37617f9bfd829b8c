"""The packages of `tempera` stand on each other from the ground up: an import points downwards, and
modules form no cycle.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "src" / "tempera"
FLOORS = (
    "errors",
    "runtime",
    "decoding",
    "image_tokenizers",
    "rules",
    "targets",
    "drafters",
    "continuous",
    "exactness",
    "config",
    "data",
    "training",
    "metrics",
    "reporting",
    "evaluation",
    "shapes",
    "api",
    "commands",
)
"""From bottom to top."""

MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(path: Path) -> Iterator[str]:
    """Modules of tempera that a file imports, wherever in the file that stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "tempera")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tempera":
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else str(node.module)


def upward(module: str, path: Path) -> list[str]:
    """Imports of a module that point to a floor above its own."""
    floor = FLOORS.index(module.split(".")[1])
    return [
        name for name in imported(path) if "." in name and FLOORS.index(name.split(".")[1]) > floor
    ]


def test_every_package_has_its_floor():
    here = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix in ("", ".py") and path.name[0] != "_"
    }
    assert here - {"py"} == set(FLOORS)


@pytest.mark.parametrize("package", FLOORS)
def test_an_import_points_downwards(package):
    wrong = {
        name: upward(name, path)
        for name, path in MODULES.items()
        if name.split(".")[1:2] == [package]
    }
    assert {name: names for name, names in wrong.items() if names} == {}


def test_an_upward_import_is_seen(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text("def late():\n    from tempera.rules import standard\n")
    assert upward("tempera.decoding.loop", file) == ["tempera.rules.standard"]


def test_no_modules_form_a_cycle():
    graph = {
        name: {other for other in imported(path) if other in MODULES} - {name}
        for name, path in MODULES.items()
    }
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert sorted(graph) == []
