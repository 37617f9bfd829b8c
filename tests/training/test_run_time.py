"""The time of a training run, extrapolated on a clock that only the fakes advance."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from accelerate.state import AcceleratorState
from tiny_training import RECIPE, tiny_codes, tiny_draft, tiny_target

from tempera.runtime.distributed import Processes
from tempera.training import run_time as module
from tempera.training.losses import EagleLoss
from tempera.training.recipe import Recipe
from tempera.training.run_time import Drawing, run_time
from tempera.training.trainer import TrainingRun

T = TypeVar("T")


class Clock:
    """A clock that stands still until it is advanced."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def faked(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[Any]]:
    """A run whose first step takes 9 seconds, the others 2, a validation 3, a checkpoint 5; what it
    does, in order.
    """
    clock, done = Clock(), list[Any]()

    class Fake:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.directory = args[5]

        def step(self, number: int) -> None:
            clock.seconds += 2.0 if number else 9.0
            done.append(number)

        def validate(self, bar: Any) -> None:
            clock.seconds += 3.0
            done.append("validate")

        def save(self) -> None:
            clock.seconds += 5.0
            done.append("save")

    monkeypatch.setattr(module, "TrainingRun", Fake)
    monkeypatch.setattr(module, "Accelerator", lambda **_: None)
    return clock, done


class Sharing(Processes):
    """One process of several, all with the same clock, whose main one says what `says` holds."""

    def __init__(self, count: int, says: Sequence[bool] = ()) -> None:
        super().__init__(cpu=True)
        self.count, self.says = count, iter(says)

    def gather(self, value: T) -> list[T]:
        return [next(self.says, value), value]  # type: ignore[list-item]


def timed(clock: Clock | None, drawing: Drawing | None = None, **options: Any) -> Any:
    target = tiny_target()
    processes = options.pop("processes", None)
    recipe = Recipe(**{**RECIPE, **options})
    return run_time(
        target, tiny_draft(target), tiny_codes(), EagleLoss(), recipe, drawing,
        seconds=5.0, clock=clock, processes=processes,
    )  # fmt: skip


def test_steps_validations_and_checkpoints_are_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, done = faked(monkeypatch)
    time = timed(clock, steps=100, validate_every=30, checkpoint_every=50)
    assert done == [0, 1, 2, 3, "validate", "save"]
    assert time.parts == {
        "training images": 0.0, "steps": 200.0, "validation": 4 * 3.0, "checkpoints": 2 * 5.0,
    }  # fmt: skip
    assert time.sample == "3 steps" and time.excluded == "downloads"


def test_a_long_step_is_timed_once_and_few_are_all_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = faked(monkeypatch)
    target = tiny_target()
    recipe = Recipe(**{**RECIPE, "steps": 10})
    run_time(target, tiny_draft(target), tiny_codes(), EagleLoss(), recipe, seconds=1, clock=clock)
    assert done[:3] == [0, 1, "validate"]
    done.clear()
    recipe = Recipe(**{**RECIPE, "steps": 2})  # no more steps than the run has
    run_time(target, tiny_draft(target), tiny_codes(), EagleLoss(), recipe, seconds=99, clock=clock)
    assert done[:4] == [0, 1, 2, "validate"]


def test_processes_take_as_many_steps_as_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = faked(monkeypatch)
    time = timed(clock, steps=100, processes=Sharing(2, [True] * 6 + [False]))
    assert done == [*range(8), "validate", "save"]
    assert time.sample == "7 steps" and time.processes == 2


def test_the_images_that_the_target_draws_are_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, _ = faked(monkeypatch)
    sizes = []

    def decode(target: Any, drafter: Any, rule: Any, streams: Any, captions: Any, observe: Any):
        sizes.append(len(captions))
        for number in range(1, target.length + 1):
            clock.seconds += 1.0
            observe(SimpleNamespace(rounds=number, written=number * len(captions)))

    monkeypatch.setattr(module, "decode", decode)
    time = timed(clock, Drawing(30, "a red ring", 4), steps=1)
    assert time.parts["training images"] == 30 / 4 * tiny_target().length
    timed(clock, Drawing(3, "a red ring", 4), steps=1)
    assert sizes == [4, 4, 3, 3]
    for count, share in ((2, 2 / 4), (3, 2 / 4), (9, 1 / 4)):  # of the four batches of a shard
        shared = timed(clock, Drawing(32, "a red ring", 4), steps=1, processes=Sharing(count))
        assert shared.parts["training images"] == 32 / 4 * share * tiny_target().length
        assert shared.processes == count


@pytest.mark.slow
def test_a_training_run_is_timed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AcceleratorState._reset_state(True)
    monkeypatch.chdir(tmp_path)
    kept: list[Path] = []

    class Seen(TrainingRun):
        def save(self) -> None:
            super().save()
            kept.extend(self.directory.rglob("*.safetensors"))

    monkeypatch.setattr(module, "TrainingRun", Seen)
    target = tiny_target()
    time = run_time(
        target, tiny_draft(target), tiny_codes(), EagleLoss(), Recipe(**RECIPE),
        Drawing(8, "a red ring", 4), seconds=0.2,
    )  # fmt: skip
    assert min(time.parts.values()) > 0
    assert {path.name for path in kept} == {"model.safetensors", "last.safetensors"}
    assert not any(path.exists() for path in kept) and not list(tmp_path.iterdir())
