"""Public names keep to docs/glossary.md: those of docs/api.md and the options of conf/."""

import ast
import re
from collections.abc import Iterator

import pytest
from markdown_pages import text_of
from paths import ROOT

SRC, CONF = ROOT / "src", ROOT / "conf"
REPLACED = {
    "frontier": "inner nodes",
    "held": "wrapped",
    "keep": "accept, mask",
    "keeps": "accepts",
    "kept": "accepted, persistent",
    "lesson": "teacher-forced batch",
    "own": "custom",
    "place": "index, position, path",
    "places": "indices, positions, paths",
    "seal": "manifest",
    "session": "runner",
    "settle": "commit",
}
"""Words that were public names once, and the field's word for each."""


def modules() -> dict[str, list[str]]:
    """The modules of the API reference, and their members where it names them."""
    page = text_of(ROOT / "docs" / "api.md")
    entries = re.findall(r"::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\])?", page)
    return {name: members.split(", ") if members else [] for name, members in entries}


def names(node: ast.AST) -> Iterator[str]:
    """The public names that a definition brings: itself, its arguments, fields and methods."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
        yield from (one.arg for one in [*node.args.args, *node.args.kwonlyargs])
    elif isinstance(node, ast.ClassDef):
        yield node.name
        for part in node.body:
            if not getattr(part, "name", "").startswith("_") or part.name == "__init__":
                yield from names(part)
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        yield from (one.id for one in targets if isinstance(one, ast.Name))


def words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def public() -> Iterator[tuple[str, str]]:
    """Module and name of all that docs/api.md shows."""
    for module, members in modules().items():
        path = (SRC / module.replace(".", "/")).with_suffix(".py")
        yield from ((module, part) for part in module.split(".")[1:])
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = getattr(node, "name", "")
            if not name.startswith("_") and (not members or name in members):
                yield from ((module, one) for one in names(node) if not one.startswith("_"))


def options() -> Iterator[tuple[str, str]]:
    """File and key of every option of conf/."""
    for path in sorted(CONF.rglob("*.yaml")):
        for key in re.findall(r"(?m)^ *(\w+):", path.read_text(encoding="utf-8")):
            yield path.relative_to(ROOT).as_posix(), key


@pytest.mark.parametrize("word", sorted(REPLACED))
def test_a_public_name_has_no_replaced_word(word: str) -> None:
    found = {(where, name) for where, name in [*public(), *options()] if word in words(name)}
    assert found == set(), f"say {REPLACED[word]}"


def in_code() -> list[str]:
    """What the glossary says that its words are called in code."""
    rows = re.findall(r"(?m)^\| .* \| ([^|]+) \|$", text_of(ROOT / "docs" / "glossary.md"))
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_a_name_of_the_glossary_is_used() -> None:
    code = {name for _, name in public()}
    keys = {name for _, name in options()} | {path.name for path in CONF.iterdir()}
    choices = {f"{path.parent.name}={path.stem}" for path in CONF.rglob("*.yaml")}
    metrics = (SRC / "tempera" / "metrics" / "metrics.yaml").read_text(encoding="utf-8")
    known = code | {f"{key}=" for key in keys} | choices | set(re.findall(r"key: (\w+)", metrics))
    named = in_code()
    assert len(named) > 25
    assert [name for name in named if name not in known] == []
