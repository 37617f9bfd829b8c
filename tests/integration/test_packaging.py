"""pyproject.toml and constraints.txt agree with the code: what is imported is declared, what is
declared is pinned, for any machine.
"""

import ast
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
MODULES = {
    "pil": "pillow",
    "hydra": "hydra-core",
    "open-clip": "open-clip-torch",
    "vl-convert": "vl-convert-python",
    "yaml": "pyyaml",
}  # where a module is not called as its package


def declared(*extras: str) -> set[str]:
    wanted = [
        *PROJECT["dependencies"],
        *(item for extra in extras for item in PROJECT["optional-dependencies"][extra]),
    ]
    return {canonicalize_name(Requirement(item).name) for item in wanted}


@pytest.mark.slow
def test_what_is_imported_is_declared() -> None:
    imported = set()
    for folder in ("src", "eval", "train_draft"):
        for path in (ROOT / folder).rglob("*.py"):
            for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(statement, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in statement.names}
                elif (
                    isinstance(statement, ast.ImportFrom)
                    and statement.module
                    and not statement.level
                ):
                    imported.add(statement.module.partition(".")[0])
    foreign = {
        canonicalize_name(name)
        for name in imported - set(sys.stdlib_module_names) - {"tempera", "shapes_recipe"}
    } - {"triton"}  # torch's builds for CUDA bring it, and it is imported only on a GPU
    assert {MODULES.get(name, name) for name in foreign} - declared(
        "diffusers", "tiktoken", "torchao"
    ) == set()


def test_what_is_declared_is_pinned_for_any_machine() -> None:
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in PINS), (
        "plain name==version lines: no local builds, paths or hosts"
    )
    pinned = {canonicalize_name(pin.partition("==")[0]) for pin in PINS}
    assert declared(*PROJECT["optional-dependencies"]) - pinned == set()
