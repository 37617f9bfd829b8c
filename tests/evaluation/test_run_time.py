"""The time of an evaluation, extrapolated on a clock that only the fakes advance."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_evaluation import ToyEvaluator, tiny_pipeline
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Pipeline
from tempera.evaluation.run_time import run_time
from tempera.metrics.evaluators import Evaluator, Networks, NoEvaluator
from tempera.runtime.cost import Time

PROMPTS = [Prompt(str(number), "a cat") for number in range(5)]
LENGTH = 10
UNTIMED = SpeedProtocol(prompts=0)


class Clock:
    """Seconds and rounds so far."""

    seconds, rounds = 0.0, 0


@dataclass(frozen=True)
class FakeMethod:
    """A round takes `pace` seconds and emits a token per image; the first takes two more."""

    clock: Clock
    pace: float
    is_plain: bool

    @property
    def plain(self) -> "FakeMethod":
        return FakeMethod(self.clock, 3.0, is_plain=True)

    def decode(self, target: Any, streams: Any, prompts: list[str], progress: Any, **_: Any) -> Any:
        for number in range(1, LENGTH + 1):
            self.clock.seconds += self.pace + 2.0 * (number == 1)
            self.clock.rounds += 1
            progress(number, number * len(prompts))


class FakePipeline(Pipeline):
    """The image decoder takes half a second per image."""

    @classmethod
    def make(cls, is_plain: bool = False) -> "FakePipeline":
        clock = Clock()

        def decode_codes(codes: Tensor) -> Tensor:
            clock.seconds += 0.5 * len(codes)
            return torch.zeros(len(codes), 3, 2, 2)

        method: Any = FakeMethod(clock, 3.0 if is_plain else 1.0, is_plain)
        target: Any = SimpleNamespace(length=LENGTH, grid=(2, LENGTH // 2))
        decoder: Any = SimpleNamespace(decode_codes=decode_codes)
        return cls(target, method, decoder, 0, torch.device("cpu"))

    @override
    def now(self) -> float:
        method: Any = self.method
        return float(method.clock.seconds)


@dataclass
class SlowEvaluator(ToyEvaluator):
    """Two networks, each loaded in 7 seconds, that score a picture in a quarter of a second."""

    clock: Any = None
    missing: tuple[str, ...] = ()

    @override
    def absent(self) -> tuple[str, ...]:
        return self.missing

    @override
    def load(self, device: torch.device) -> Iterator[Networks]:
        def features(pictures: Tensor) -> Tensor:
            self.clock.seconds += 0.25 * len(pictures)
            return pictures[:, 0, 0, :1]

        for _ in range(2):
            self.clock.seconds += 7.0
            yield Networks(features)


def timed(pipeline: Pipeline, batch_size: int = 2, **options: Any) -> Time:
    """Of the five prompts, without speed timing and metrics unless they are given."""
    protocol: SpeedProtocol = options.pop("protocol", UNTIMED)
    evaluator: Evaluator = options.pop("evaluator", NoEvaluator())
    prompts: list[Prompt] = options.pop("prompts", PROMPTS)
    return run_time(pipeline, prompts, batch_size, False, protocol, evaluator, **options)


def parts(*args: Any, **options: Any) -> tuple[float, ...]:
    """Seconds of decoding, image decoder and speed timing."""
    return tuple(timed(*args, **options).parts.values())[:3]


def test_a_stretch_of_a_batch_is_extrapolated_to_all_images() -> None:
    pipeline = FakePipeline.make()
    assert parts(pipeline, seconds=5.0) == (5 * 12 / 2, 5 * 0.5, 0.0)
    method: Any = pipeline.method
    assert method.clock.rounds == 2 + 3  # to warm up, and until 5 seconds are over
    assert parts(FakePipeline.make(), seconds=0.0) == (30, 2.5, 0)  # two rounds are enough


def test_several_batches_are_timed_if_they_are_short() -> None:
    assert parts(FakePipeline.make(), seconds=100.0) == (3 * 12, 2.5, 0)  # the last is smaller
    assert timed(FakePipeline.make()).sample == "2 images"


@pytest.mark.parametrize(("processes", "share"), [(2, 3), (5, 1), (9, 1)])
def test_processes_share_the_images(processes: int, share: int) -> None:
    found = timed(FakePipeline.make(), batch_size=1, processes=processes)
    assert tuple(found.parts.values()) == (share * 12, share * 0.5, 0, 0)
    assert found.processes == processes


@pytest.mark.parametrize("count", [5, 200])
def test_metrics_score_all_images_in_one_process(count: int) -> None:
    pipeline: Any = FakePipeline.make()
    evaluator = SlowEvaluator(clock=pipeline.method.clock)
    prompts = [Prompt(str(number), "a cat") for number in range(count)]
    time = timed(pipeline, prompts=prompts, evaluator=evaluator, processes=2)
    assert time.parts["metrics"] == 2 * (7 + count * 0.25)
    assert time.excluded == "start, downloads, reference images, bootstrap and report"


def test_metrics_whose_weights_are_absent_are_not_loaded() -> None:
    time = timed(FakePipeline.make(), evaluator=SlowEvaluator(missing=("clip", "vgg")))
    assert time.parts["metrics"] == 0
    assert time.excluded.endswith(
        "report; nor metrics, as weights of clip, vgg are not on this machine"
    )


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (SpeedProtocol(prompts=3, warmup=0), 3 * (32 + 12) + 2 * 12),
        (SpeedProtocol(prompts=3, warmup=2), 5 * (32 + 12) + 2 * 12),
        (SpeedProtocol(prompts=8, warmup=0), 5 * (32 + 12) + 2 * 12),  # there are five prompts
        (SpeedProtocol(prompts=3, warmup=0, batches=[8]), 4 * (32 + 12) + 2 * 12),
    ],
)
def test_the_speed_protocol_decodes_a_batch_twice_and_two_prompts_once_more(
    protocol: SpeedProtocol, expected: float
) -> None:
    assert parts(FakePipeline.make(), protocol=protocol)[2] == expected


def test_plain_autoregression_is_timed_once_and_clocked() -> None:
    protocol = SpeedProtocol(prompts=3, warmup=1)
    assert parts(FakePipeline.make(is_plain=True), protocol=protocol)[2] == (3 + 1 + 2) * 32


def test_tables_are_timed() -> None:
    found = timed(
        tiny_pipeline(), 1, protocol=SpeedProtocol(), evaluator=ToyEvaluator(), seconds=0.1
    )
    assert min(found.parts.values()) > 0


def test_the_sentence_of_a_time() -> None:
    time = Time({"decoding": 290.0, "image decoder": 10.0, "speed timing": 0.0}, "4 images", "all")
    assert time.total == 300
    assert str(time) == (
        "about 5 min (decoding 4.83 min, image decoder 10 s), from 4 images; not included: all"
    )
    assert str(replace(time, processes=8)).startswith("about 5 min with 8 processes (decoding")
