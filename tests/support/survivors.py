"""Mutants that no test can see, from survivors.toml."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("survivors.toml")
KEYS = {"module", "changes", "every", "places", "reason"}


def entries() -> list[dict[str, Any]]:
    """All entries of survivors.toml."""
    return list(tomllib.loads(FILE.read_text(encoding="utf-8"))["survivor"])


def faults(entry: dict[str, Any], package: Path) -> Iterator[str]:
    """What is wrong with an entry, given the folder of the package that it is about."""
    module, changes, every = (entry.get(key) for key in ("module", "changes", "every"))
    file = package / f"{module}.py"
    if unknown := entry.keys() - KEYS:
        yield f"{module}: unknown keys {', '.join(sorted(unknown))}"
    if not str(entry.get("reason", "")).endswith("."):
        yield f"{module}: give the reason as a sentence"
    if not file.is_file():
        yield f"there is no module {module}"
        return
    if (changes is None) == (every is None):
        yield f"{module}: give either changes, or every for all mutants of a text"
        return
    if not all(
        len(pair) == 2 and _squeezed(pair[0]) != _squeezed(pair[1]) for pair in changes or ()
    ):
        yield f"{module}: a change is a text and what a mutant makes of it"
        return
    code, expected = _squeezed(file.read_text(encoding="utf-8")), entry.get("places", 1)
    for old in {every} if changes is None else {old for old, _ in changes}:
        if (found := code.count(_squeezed(old))) != expected:
            yield f"{module} has {found} times {old!r}, not {expected}: say so by places"


def reason(module: str, diff: str) -> str | None:
    """Why a mutant, given as `- old` and `+ new` lines, may survive; None if it may not."""
    before, after = (_squeezed("".join(_side(diff, sign))) for sign in "-+")
    for entry in entries():
        if entry["module"] == module and any(
            _is_change(before, after, *texts)
            for texts in entry.get("changes") or [[entry["every"], None]]
        ):
            return str(entry["reason"])
    return None


def _side(diff: str, sign: str) -> list[str]:
    return [line[1:] for line in diff.splitlines() if line.startswith(sign)]


def _squeezed(text: str) -> str:
    """A text without blanks: mutants have some of their own."""
    return "".join(text.split())


def _is_change(before: str, after: str, old: str, new: str | None) -> bool:
    """Whether `after` is `before` with one `old` replaced by `new`, or by anything if None."""
    old = _squeezed(old)
    for place in range(len(before)):
        if before.startswith(old, place):
            head, tail = before[:place], before[place + len(old) :]
            if new is None:
                room = len(after) >= len(head) + len(tail)
                if room and after.startswith(head) and after.endswith(tail):
                    return True
            elif after == head + _squeezed(new) + tail:
                return True
    return False
