import time

import pytest

from tempera.decoding import timing
from tempera.decoding.timing import Clock, batch_seconds, no_clock


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


@pytest.mark.parametrize(
    ("limit", "rounds", "seconds"),
    [
        (3.0, 2, 3 + 7),  # 14 tokens left after 6, at 2 a second
        (0.5, 2, 3 + 7),  # not before the second round
        (3.5, 3, 5 + 9),  # 12 left after 8, at 4 in 3 seconds
        (9.0, 4, 6),  # the whole batch
    ],
)
def test_the_tokens_left_count_as_those_after_the_first_round(limit, rounds, seconds):
    times, played = iter([10.0, 12.0, 13.0, 15.0, 16.0]), []

    def decode(progress):
        for number, written in enumerate((4, 6, 8, 20), start=1):
            played.append(number)
            progress(number, written)

    assert batch_seconds(decode, 20, lambda: next(times), limit) == pytest.approx(seconds)
    assert len(played) == rounds


def test_a_batch_of_one_round_takes_as_long_as_it():
    times = iter([10.0, 12.0])
    assert batch_seconds(lambda progress: progress(1, 20), 20, lambda: next(times), 1.0) == 2


def test_no_clock_does_nothing():
    with no_clock("draft"), no_clock("target"):
        pass
