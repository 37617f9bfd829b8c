import time

import pytest

from tempera.decoding import timing
from tempera.decoding.timing import Clock, no_clock


def test_a_clock_adds_up_the_time_of_each_part():
    clock = Clock()
    for _ in range(2):
        with clock("draft"):
            time.sleep(0.002)
    with clock("target"):
        pass
    assert clock.seconds["draft"] >= 0.004
    assert set(clock.seconds) == {"draft", "target"}
    assert clock.total == pytest.approx(sum(clock.seconds.values()))


def test_a_clock_takes_the_differences(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(timing, "now", lambda device: next(times))
    clock = Clock()
    for _ in range(2):
        with clock("draft"):
            pass
    assert clock.seconds == {"draft": 7.0} and clock.total == 7.0


def test_no_clock_does_nothing():
    with no_clock("draft"), no_clock("target"):
        pass
