"""The pages of docs/extend/ work as written: in a copy, their modules and YAML files are created
and their code and commands run. None touches more than 3 existing files.
"""

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import blocks, commands, text_of
from page_commands import run
from paths import ROOT

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
FILE = re.compile(r"(?:# @package \S+\n)?# ((?:src|conf)/\S+)\n")


def files(page: Path) -> dict[str, str]:
    """The blocks that are files, by their path: it is their first comment."""
    written = [*blocks(page, "python"), *blocks(page, "yaml")]
    return {match[1]: block for block in written if (match := FILE.match(block))}


def added(page: Path) -> list[tuple[str, str, str]]:
    """What the page adds to a tuple of an existing module: its name, the module, the entries."""
    pattern = re.compile(r"# added to (\w+) in src/(\S+)\.py\n(.*)", re.DOTALL)
    found = [match for block in blocks(page, "python") if (match := pattern.match(block))]
    return [(match[1], match[2].replace("/", "."), match[3]) for match in found]


def touched(page: Path, how: str) -> list[str]:
    return re.findall(rf"(?m)^\| `([^`]+)` \| {how}", text_of(page))


@pytest.fixture
def overlay(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's files in it; its modules can be imported as tempera's."""
    before = set(sys.modules)
    for name, text in files(request.param).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".py":
            package = importlib.import_module(".".join(Path(name).parts[1:-1]))
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
    for name, module_name, entries in added(request.param):
        module = importlib.import_module(module_name)
        more = tuple(eval(f"[{entries}]", vars(module)))
        monkeypatch.setattr(module, name, getattr(module, name) + more)
    (tmp_path / "prompts.txt").write_text("a small red ring\n", encoding="utf-8")
    (tmp_path / "conf").mkdir(exist_ok=True)
    yield tmp_path
    new = [Path(name).with_suffix("").parts[1:] for name in files(request.param)]
    for name in {".".join(parts) for parts in new} & (set(sys.modules) - before):
        package, _, module = name.rpartition(".")
        del sys.modules[name]
        vars(sys.modules[package]).pop(module, None)


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
with_its_files = pytest.mark.parametrize(
    ("page", "overlay"), [(page, page) for page in PAGES], ids=lambda page: page.stem,
    indirect=["overlay"],
)  # fmt: skip


@each_page
def test_it_touches_at_most_3_existing_files(page: Path) -> None:
    assert sorted(touched(page, "new")) == sorted(files(page))
    assert all(not (ROOT / name).exists() for name in touched(page, "new"))
    assert all((ROOT / name).exists() for name in touched(page, "changed"))
    assert len(touched(page, "changed")) <= 3


@with_its_files
def test_its_code_and_commands_run(page: Path, overlay: Path, monkeypatch: Any) -> None:
    module = types.ModuleType(f"walk_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(overlay)
    for block in blocks(page, "python"):
        if not FILE.match(block) and not block.startswith("# added to "):
            exec(compile(block, page.name, "exec"), module.__dict__)
    for command in commands(page):
        extra = [] if "report.py" in command else ["--config-dir", str(overlay / "conf")]
        run(command, overlay, monkeypatch, *extra)
    for _, _, entries in added(page):
        (key,) = re.findall(r'Metric\("(\w+)"', entries)
        (metrics,) = overlay.glob("outputs/eval/*/metrics.json")
        assert f'"{key}"' in metrics.read_text(encoding="utf-8")
