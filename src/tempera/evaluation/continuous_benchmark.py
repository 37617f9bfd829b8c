"""Measures rounds of speculative decoding with continuous tokens, beside the target alone.

Images are decoded whole: the time of a round depends on how many tokens are known, and on how many
drafts are rejected and replaced. Timings are means over the rounds of an image.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from tempera.continuous.loop import ContinuousTrace, Decoding, Model, Speculative, counts
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock, no_clock, now
from tempera.errors import BenchmarkTooLarge, TemperaError
from tempera.evaluation.benchmark import (
    Spread,
    cell,
    is_out_of_memory,
    milliseconds,
    name_of,
    peak_memory,
    reset_memory,
)


@dataclass(frozen=True)
class ContinuousColumn:
    """Timings at one batch size, in milliseconds.

    Attributes:
        step: a step of the target alone, which draws one token per image.
        round: a round, without clocks inside.
        parts: the parts of a round, by name (draft, target, verify, commit), each synchronised.
        accepted_length: tokens that a round adds to an image, with these weights; in a batch, on
            average over the rounds of the slowest image.
        speedup: the target's time for an image ÷ the method's, median over images.
        ratio: speed-up ÷ accepted length of rounds alone, which is step ÷ round.
        ratio_limit: the machine's limit of `ratio`: step ÷ the target's part of a round.
        memory: peak bytes so far: allocated on a GPU, resident on a CPU.
    """

    batch_size: int
    step: Spread
    round: Spread
    parts: dict[str, Spread]
    accepted_length: float
    speedup: float
    ratio: float
    ratio_limit: float
    memory: int


@dataclass(frozen=True)
class ContinuousReport:
    """What was measured.

    Attributes:
        gamma: drafting steps of a round.
    """

    device: str
    dtype: str
    gamma: int
    columns: list[ContinuousColumn]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


def measure_continuous(
    target: Model,
    method: Speculative,
    batch_sizes: Sequence[int],
    repeats: int,
    device: torch.device,
    progress: Callable[[str], None] = lambda part: None,
) -> ContinuousReport:
    """Time the target alone and a method in turn.

    Args:
        target: the model, on its device; its prompts are classes.
        method: the method whose rounds are timed.
        batch_sizes: prompts decoded at once; the report has a column for each.
        repeats: batches that are decoded by each, after one to warm up.
        progress: called with the name of each part before it is measured.

    Raises:
        TemperaError: the prefill draws whole images.
        BenchmarkTooLarge: memory ran out.
    """
    if sum(_prefill(method, target.length)) >= target.length:
        raise TemperaError(
            f"prefill={method.prefill:g} draws all {target.length} tokens of an image, so there is "
            "no round to time: give a smaller share, or more steps"
        )
    columns = []
    for batch_size in batch_sizes:
        progress(f"batch {batch_size}")
        texts = batch_size * ["0"]  # the first class
        try:
            with target.encoded(texts):
                columns.append(_column(target, method, texts, repeats, device))
        except (MemoryError, RuntimeError) as problem:
            if not is_out_of_memory(problem):
                raise
            raise BenchmarkTooLarge(batch_size) from problem
    dtype = str(target.dtype).removeprefix("torch.")
    return ContinuousReport(name_of(device), dtype, method.gamma, columns)


class _Timed(NamedTuple):
    """One batch: seconds of its images, of its rounds alone, their number, and accepted length."""

    image: float
    in_rounds: float
    rounds: int
    length: float


def _column(
    target: Model, method: Speculative, texts: list[str], repeats: int, device: torch.device
) -> ContinuousColumn:
    reset_memory(device)
    plain, own, parts = list[_Timed](), list[_Timed](), dict[str, list[float]]()
    for seed in range(-1, repeats):  # the first one warms up
        clock = Clock(device)
        for made, one in ((plain, method.plain), (own, method)):
            made.append(_decoded(target, one, texts, seed, device))
        rounds = _decoded(target, method, texts, seed, device, clock).rounds
        if seed >= 0:
            for name, seconds in clock.seconds.items():
                parts.setdefault(name, []).append(seconds / rounds)
    plain, own = plain[1:], own[1:]
    step = Spread.of([one.in_rounds / one.rounds for one in plain])
    whole = Spread.of([one.in_rounds / one.rounds for one in own])
    spreads = {name: Spread.of(values) for name, values in parts.items()}
    gains = [a.image / b.image for a, b in zip(plain, own, strict=True)]
    return ContinuousColumn(
        batch_size=len(texts),
        step=step,
        round=whole,
        parts=spreads,
        accepted_length=sum(one.length for one in own) / len(own),
        speedup=median(gains),
        ratio=step.median / whole.median,
        ratio_limit=step.median / spreads["target"].median,
        memory=peak_memory(device),
    )


def _decoded(
    target: Model,
    method: Decoding,
    texts: list[str],
    seed: int,
    device: torch.device,
    clock: Clock | None = None,
) -> _Timed:
    """Decode a batch. A clock sees the rounds alone, not the prefill."""
    prefill = len(_prefill(method, target.length))
    marks: list[float] = []

    def mark(steps: int, written: int) -> None:
        marks.append(now(device))
        if clock is not None and steps <= prefill:
            clock.seconds.clear()

    streams = RandomStreams(seed, [str(row) for row in range(len(texts))], device)
    marks.append(now(device))
    output = method.decode(target, streams, texts, clock=clock or no_clock, progress=mark)
    rounds = len(marks) - 1 - prefill
    assert isinstance(output.trace, ContinuousTrace)
    emitted = output.trace.proposed.gt(0).sum(-1).float().mean()
    return _Timed(
        marks[-1] - marks[0], marks[-1] - marks[prefill], rounds, float(emitted) / max(1, rounds)
    )


def _prefill(method: Decoding, length: int) -> Sequence[int]:
    """Tokens of each step of the target alone before the first round."""
    if not isinstance(method, Speculative):
        return ()
    return method.rule.prefilled(method.prefill, counts(length, method.steps or length))


def continuous_table(report: ContinuousReport) -> list[tuple[str, ...]]:
    """The report as rows of text: the row's name, then a cell for each column."""
    columns = report.columns
    rows = [
        ("step of the target alone", *(cell(column.step) for column in columns)),
        (f"round, γ = {report.gamma}", *(cell(column.round) for column in columns)),
    ]
    for part in columns[0].parts:
        rows.append((f"round: {part}", *(cell(column.parts[part]) for column in columns)))
    steps = (milliseconds(column.parts["draft"].median / report.gamma) for column in columns)
    return [
        *rows,
        (f"round: one of {report.gamma} draft steps", *steps),
        ("accepted length", *(f"{column.accepted_length:.2f}" for column in columns)),
        (
            "speed-up ÷ accepted length",
            *(f"{column.ratio:.2f} of at most {column.ratio_limit:.2f}" for column in columns),
        ),
        ("speed-up of whole images", *(f"{column.speedup:.2f}×" for column in columns)),
        ("memory at the peak, GiB", *(f"{column.memory / 2**30:.2f}" for column in columns)),
    ]
