"""A loaded model in the threads of a web server: calls, and rounds that any thread asks for."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
from held_models import janus

from tempera import LoadedModel, TemperaError

CAPTION = "a red cat"
BUSY = "the rounds of another batch"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    held = janus()
    return held.accelerated("ar", held.processor(), temperature=1.0)  # 9 tokens


@pytest.fixture(autouse=True)
def usable_afterwards(loaded: LoadedModel) -> Iterator[None]:
    """From any thread."""
    whole = loaded.generate(CAPTION, seed=1, images=False).tokens
    yield
    assert torch.equal(in_thread(lambda: loaded.generate(CAPTION, seed=1)).tokens, whole)
    assert torch.equal(loaded.generate(CAPTION, seed=1, images=False).tokens, whole)


def in_thread(job: Callable[[], Any]) -> Any:
    """What a job returns, or raises, in a new thread; it may not wait for ever."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(job())
        except BaseException as problem:
            raised.append(problem)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for ever"
    if raised:
        raise raised[0]
    return found[0]


def modes() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
    )


def test_every_round_in_another_thread_with_modes_of_its_own(loaded: LoadedModel) -> None:
    """Those of the generator neither stay in a thread nor come from it."""
    whole = loaded.generate(CAPTION, seed=1, images=False).tokens
    rounds = loaded.rounds(CAPTION, seed=1)

    def step(number: int) -> Any:
        with ExitStack() as stack:
            if number % 2:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if number % 3 == 2:
                stack.enter_context(torch.device("meta"))
            before = modes()
            round = next(rounds)
            assert modes() == before
        return round.tokens.clone()

    tokens = [in_thread(partial(step, number)) for number in range(9)]
    assert in_thread(partial(next, rounds, None)) is None and torch.equal(tokens[-1], whole)


@pytest.mark.parametrize("end", ["close", "throw", "forget"])
def test_rounds_end_in_another_thread(loaded: LoadedModel, end: str) -> None:
    box = [loaded.rounds(CAPTION, seed=1)]
    in_thread(lambda: [next(box[0]) for _ in range(3)])
    if end == "close":
        in_thread(box[0].close)  # type: ignore[attr-defined]
    elif end == "throw":
        with pytest.raises(KeyError):
            in_thread(lambda: box[0].throw(KeyError()))  # type: ignore[attr-defined]
    else:
        circle: list[Any] = [box.pop()]
        circle.append(circle)  # so that only a collection finds it
        del circle
        in_thread(gc.collect)


def test_nobody_waits_for_rounds(loaded: LoadedModel) -> None:
    """They may never be asked for; whoever calls is told, from whatever thread."""
    first = loaded.rounds(CAPTION, seed=1)
    in_thread(lambda: next(first))
    for call in (lambda: loaded.generate(CAPTION), lambda: next(loaded.rounds(CAPTION))):
        for place in (in_thread, lambda job: job()):
            with pytest.raises(TemperaError, match=BUSY):
                place(call)
    assert sum(1 for _ in first) > 3
    assert next(loaded.rounds(CAPTION)).sequences.written


def test_a_call_that_waits_for_another_is_told_of_rounds_that_come_first(
    loaded: LoadedModel,
) -> None:
    """And rounds wait for a call, which ends by itself."""
    begun, go_on = Event(), Event()

    def hold(_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    call = Thread(target=lambda: loaded.generate(CAPTION, callback=hold), daemon=True)
    call.start()
    assert begun.wait(60)
    rounds = loaded.rounds(CAPTION, seed=1)
    waiting = Thread(target=lambda: next(rounds), daemon=True)
    waiting.start()
    go_on.set()
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(TemperaError, match=BUSY):
        loaded.generate(CAPTION)
    rounds.close()  # type: ignore[attr-defined]
    call.join(60)


def test_a_call_within_a_call_is_refused(loaded: LoadedModel) -> None:
    """It would wait for itself."""
    with pytest.raises(TemperaError, match=BUSY):
        in_thread(lambda: loaded.generate(CAPTION, callback=lambda _: loaded.generate(CAPTION)))
