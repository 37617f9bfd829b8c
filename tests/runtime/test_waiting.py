"""A wait for something else is told, and has an end."""

import time

import pytest

from tempera.errors import TemperaError
from tempera.runtime import waiting


def test_a_wait_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting.waiting("nothing"):
        pass
    monkeypatch.setattr(waiting, "SILENCE", 0.02)
    with pytest.raises(ValueError, match="late"), waiting.waiting("a lock"):
        time.sleep(0.3)
        raise ValueError("late")
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6 and {*lines} == {"waiting for a lock (0 s)"}  # ever longer pauses


def test_a_wait_ends_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: 30.0 * next(clock))
    states = iter([*range(50), *[50] * 1000])
    waits = []
    with pytest.raises(TemperaError, match="the process has made no progress for 10 min.*: end it"):
        waits += waiting.attempts("the process", "end it", lambda: next(states))
        waits.clear()
    assert next(states) == 50  # it went on as long as there was some
    assert next(clock) > 50 + waiting.LIMIT / 30
