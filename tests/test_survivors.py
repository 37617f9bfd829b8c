"""The list of mutants that no test can see, tests/support/survivors.toml: entries excuse what they
name and no more. And the list of faults in tests/support/mutants.py: each stands for one place.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from mutants import FAULTS
from paths import ROOT
from survivors import entries, faults, reason

CODE = "for k in range(30):\n    total += 1 + 1\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one module."""
    (tmp_path / "module.py").write_text(CODE)
    return tmp_path


def entry(**changed: Any) -> dict[str, Any]:
    """A good entry with changes; None takes a key out."""
    good = {"module": "module", "changes": [["range(30)", "range( 31)"]], "reason": "So it is."}
    return {key: value for key, value in (good | changed).items() if value is not None}


def test_every_entry_fits_its_module() -> None:
    assert [fault for one in entries() for fault in faults(one, ROOT / "src" / "tempera")] == []


def test_every_fault_has_one_place() -> None:
    texts = {one.file: (ROOT / "src/tempera" / one.file).read_text() for one in FAULTS}
    assert [one.name for one in FAULTS if texts[one.file].count(one.right) != 1] == []


def test_few_entries_excuse_whatever_stands_there() -> None:
    assert sum("every" in one for one in entries()) < 4


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"changes": [["range(30)"]]}, "a change is a text and what a mutant makes of it"),
        ({"changes": [["range(30)", "range( 30 )"]]}, "a change is a text and what"),
        ({"changes": None}, "give either changes, or every"),
        ({"every": "30"}, "give either changes, or every"),
        ({"changes": [["range(40)", "range(41)"]]}, r"module has 0 times 'range\(40\)', not 1"),
        ({"changes": [["1", "2"]]}, "module has 2 times '1', not 1: say so by places"),
        ({"changes": None, "every": "1"}, "module has 2 times '1', not 1"),
        ({"module": "other"}, "there is no module other"),
        ({"reason": "so"}, "give the reason as a sentence"),
        ({"line": 1}, "unknown keys line"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(
    changed: dict[str, Any], fault: str, package: Path
) -> None:
    (found,) = faults(entry(**changed), package)
    assert re.search(fault, found)


def test_good_entries_are_taken(package: Path) -> None:
    for changed in ({}, {"changes": [["1", "2"]], "places": 2}, {"changes": None, "every": "30"}):
        assert list(faults(entry(**changed), package)) == []


@pytest.mark.parametrize(
    ("listed", "module", "after", "excused"),
    [
        ({}, "module", "for k in range( 31):", True),
        ({}, "module", "for k in range( 29):", False),
        ({}, "module", "for k in []:", False),
        ({}, "module", "for k in -range(31):", False),
        ({}, "modules", "for k in range( 31):", False),
        ({"changes": None, "every": "30"}, "module", "for k in range( 29):", True),
        ({"changes": None, "every": "30"}, "module", "for k in range(-30):", True),
        ({"changes": None, "every": "30"}, "module", "for k in []:", False),
    ],
)
def test_what_is_listed_is_excused_and_nothing_beside_it(
    listed: dict[str, Any],
    module: str,
    after: str,
    excused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("survivors.entries", lambda: [entry(**listed)])
    found = reason(module, f"- for k in range(30):\n+ {after}")
    assert found == ("So it is." if excused else None)


def test_a_text_that_stands_twice_may_change_at_either_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = entry(changes=[["1", "2"], ["+", ""]], places=2)
    monkeypatch.setattr("survivors.entries", lambda: [twice])
    lines = ["2 + 1", "1 + 2", "2 + 2", "1 1"]
    found = [reason("module", f"- total += 1 + 1\n+ total += {line}") for line in lines]
    assert [one is not None for one in found] == [True, True, False, True]
