from tempera.decoding import timing
from tempera.decoding.timing import Clock


def test_a_clock_adds_up_the_time_of_each_part(monkeypatch):
    """What lies between two parts is of `commit`."""
    times = iter([1.0, 3.0, 10.0, 15.0, 16.0, 18.0])
    monkeypatch.setattr(timing, "now", lambda device: next(times))

    clock = Clock()
    propose, score = clock(lambda: "draft", "draft"), clock(lambda: "scores", "target")
    assert [propose(), score(), propose()] == ["draft", "scores", "draft"]
    assert clock.seconds == {"draft": 4.0, "target": 5.0, "verify": 0.0, "commit": 8.0}
    assert clock.rounds == 1  # each has a pass of the target
