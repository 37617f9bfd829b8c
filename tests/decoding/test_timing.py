from tempera.decoding import timing
from tempera.decoding.timing import Clock


def test_a_clock_adds_up_the_time_of_each_part(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 15.0, 16.0])
    monkeypatch.setattr(timing, "now", lambda device: next(times))
    clock = Clock()
    clock.lap("")
    clock.lap("draft")
    clock.lap("")
    clock.lap("draft")
    clock.lap("target")
    assert clock.seconds == {"draft": 7.0, "target": 1.0}
