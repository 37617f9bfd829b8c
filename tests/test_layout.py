"""The packages of `tempera` are layers: imports only point downwards, and there are no cycles."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT
from tested_in import TESTED_IN

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


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Modules of tempera that a file imports, at any place in the file."""
    for node in ast.walk(parsed(path)):
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


def test_every_package_has_its_level():
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


def type_names(tree: ast.Module) -> Iterator[str]:
    """Classes, type aliases and type variables of a module, without leading underscores."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
            public = name.id.lstrip("_")
            yield from [public] if public[:1].isupper() and not public.isupper() else []


def test_a_type_name_has_one_meaning():
    modules = [(name, type_names(parsed(path))) for name, path in MODULES.items()]
    homes: dict[str, list[str]] = {}
    for module, names in modules:
        for name in names:
            homes.setdefault(name, []).append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_function_is_longer_than_sixty_lines():
    long = {
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    }
    assert long == set()


def test_no_adapter_of_a_metric_is_longer_than_eighty_lines():
    sources = {module: path.read_text() for module, path in MODULES.items()}
    adapters = {module: text for module, text in sources.items() if "(Adapter):" in text}
    assert len(adapters) > 5
    assert [module for module, text in adapters.items() if len(text.splitlines()) > 80] == []


def test_every_module_has_its_test_file():
    tests = ROOT / "tests"
    elsewhere = [module for modules in TESTED_IN.values() for module in modules]
    named = {
        module
        for path in MODULES.values()
        if (module := path.relative_to(PACKAGE).with_suffix("")).name != "__init__"
        and (tests / module.parent).is_dir()
        and [
            *(tests / module.parent).glob(f"test_{module.name}.py"),
            *(tests / module.parent).glob(f"test_{module.name}_*.py"),
        ]
    }
    modules = {path.relative_to(PACKAGE).with_suffix("") for path in MODULES.values()}
    missing = {str(module) for module in modules - named if module.name != "__init__"}
    assert missing == set(elsewhere)
    assert len(elsewhere) == len(missing)
    assert all((tests / name).is_file() for name in TESTED_IN)


def test_no_test_file_imports_another():
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(parsed(path)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not (module or "").split(".")[-1].startswith("test_"), path
