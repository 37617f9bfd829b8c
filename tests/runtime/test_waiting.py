"""A wait for something else is told."""

import time

import pytest

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
