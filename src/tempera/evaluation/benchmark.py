"""Measures where the time of a round goes, on any device: each part, the whole round, and the limit
that memory bandwidth sets.

Rounds are real rounds of the decoding loop. Those of discrete tokens are timed in an excerpt from
the middle of an image; weights may be random, because the cost of a round does not depend on how
much is accepted. Images of continuous tokens are decoded whole, because it does there. The speed-up
at an accepted length is accepted length × time of AR's round ÷ time of the method's round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tempera.continuous.loop import ContinuousTrace, Speculative
from tempera.decoding.interfaces import Draft, Scores
from tempera.decoding.loop import Decoding
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock, now
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Method
from tempera.runtime.processor import name_of, peak_memory
from tempera.targets.transformer import TransformerTarget

READ = {"cpu": 2**28, "cuda": 2**32}
"""Bytes read to measure the device's bandwidth: more than any cache holds, and on a GPU so many
that starting the sum does not count.
"""
AR_TOKENS = 24
"""Most rounds of plain autoregression in an excerpt. That of a method can be longer, because a long
draft may be accepted as a whole.
"""
DRAFTS = 4
"""Drafts of the longest kind that an excerpt has room for. In shorter ones, rounds take longer than
in whole images, because the processor's caches still hold what another method needs.
"""
AtLeast1 = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of these values."""
        low, median, high = np.quantile(np.array(values), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


Pace = dict[str, Spread]
"""How long a method takes, in milliseconds: the `beginning` of an image, from its prompt to the end
of the first round, less a later round; a later `round`; the `whole` decode; and if a clock ran, the
parts of a later round, each synchronised: `draft`, `target`, `verify`, `commit`. For continuous
tokens also `accepted_length`: tokens that a round adds to an image; in a batch, on average over the
rounds of the slowest image.
"""


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is measured.

    Args:
        batch_sizes: numbers of prompts decoded at once; the results have a column for each.
        repeats: timings of each part and of each round; the report gives median and quartiles.
        kernels: whether a table of the kernels of a round is printed; on a GPU.
        bandwidth: bandwidth of the device's memory in GB/s (10⁹ bytes); measured by default.
    """

    batch_sizes: Annotated[list[AtLeast1], Field(min_length=1)]
    repeats: AtLeast1
    kernels: bool
    bandwidth: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True)
class BenchmarkColumn:
    """Timings at one batch size.

    Attributes:
        ar: of plain autoregression.
        method: of the method, with the parts of its round.
        memory: peak bytes so far: allocated on a GPU, resident on a CPU.
        images: images per second by plain autoregression, without text encoder and image decoder.
        ratio: AR's round ÷ the method's round: speed-up ÷ accepted length.
        limit: of discrete tokens, milliseconds to read the weights, and the keys and values of a
            token in the middle of the image, once at the device's bandwidth.
    """

    batch_size: int
    ar: Pace
    method: Pace
    memory: int
    images: float
    ratio: float
    limit: float | None


@dataclass(frozen=True)
class BenchmarkReport:
    """What was measured.

    Attributes:
        compiled: whether the steps of a round were compiled.
        steps: drafting steps of a round.
        bandwidth: bytes per second, as given or measured by a large sum (reads); None for
            continuous tokens, as the next.
        weights: bytes of the weights that every pass reads.
    """

    device: str
    dtype: str
    compiled: bool
    steps: int
    bandwidth: float | None
    weights: int | None
    columns: list[BenchmarkColumn]


class Excerpt:
    """A target that starts in the middle of the image and stops `length` tokens later; everything
    else is the target's.
    """

    def __init__(self, target: TransformerTarget, length: int) -> None:
        self.target = target
        self.length = length
        self.start = (target.length - length) // 2

    @classmethod
    def of(cls, target: TransformerTarget, method: Method, longest: int) -> "Excerpt":
        """That of a method, of at most `longest` tokens. Rounds are compiled for each length."""
        most = AR_TOKENS if method.is_plain else longest
        return cls(target, min(target.length, longest, most))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None) -> None:
        """Start a batch and skip the first half of the images. Its keys and values stay zero; they
        take as long to read as any others.
        """
        self.target.begin(prompts, nodes, rows)
        token = torch.zeros(len(prompts), dtype=torch.int64, device=self.target.device)
        self.target.advance(token, token + self.start, self.start)

    def score(self, draft: Draft, longest: int) -> Scores:
        """See `interfaces.Target`."""
        return self.target.score(draft, self.start + longest)


def measure(
    target: Any,
    method: Decoding,
    plan: BenchmarkPlan,
    progress: Callable[[str], None] = lambda part: None,
) -> BenchmarkReport:
    """Time rounds of plain autoregression and of a method in turn, and the parts of the method's.

    Args:
        target: the model, on its device.
        method: decodes it.
        plan: what to measure, and how often.
        progress: called with the name of each part before it is measured.

    Raises:
        TemperaError: the method has no rounds to time.
    """
    steps = _steps(method, target.length)
    discrete = isinstance(target, TransformerTarget)
    columns = list[BenchmarkColumn]()
    speed = 1e9 * plan.bandwidth if plan.bandwidth else bandwidth(target.device)
    for batch_size in plan.batch_sizes:
        progress(f"batch {batch_size}")
        columns.append(_column(target, method, plan.repeats, batch_size, speed))
    return BenchmarkReport(
        name_of(target.device),
        str(target.dtype).removeprefix("torch."),
        target.compiled,
        steps,
        speed if discrete else None,
        target.weight_bytes if discrete else None,
        columns,
    )


def _steps(method: Decoding, length: int) -> int:
    """Drafting steps of a round; raises TemperaError for a method without rounds."""
    if isinstance(method, Speculative):
        if sum(method.prefilled(length)) < length:
            return method.gamma
        raise TemperaError(
            f"prefill={method.prefill:g} draws all {length} tokens of an image, so there is no "
            "round to time: give a smaller share, or more steps"
        )
    if isinstance(method, Method) and not method.is_plain:
        return method.drafter.depth
    raise TemperaError(
        "a benchmark times rounds of draft and verification against plain autoregression: choose "
        "another method, such as method=eagle, or for continuous tokens method=cspd."
    )


def _column(
    target: Any, method: Any, repeats: int, batch_size: int, speed: float
) -> BenchmarkColumn:
    """Time rounds and their parts at one batch size."""
    prompts = ["0"] * batch_size  # the first class, or a text
    device = target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with target.encoded(prompts):
        whole = time_rounds(target, {"ar": method.plain, "method": method}, prompts, repeats)
        clocked = time_rounds(target, {"method": method}, prompts, repeats, clocked=True)
    limit = None
    if isinstance(target, TransformerTarget):
        cache = target.runner.cache.nbytes(target.runner.prompt.prefix + target.length // 2)
        limit = 1000 * (target.weight_bytes + cache) / speed
    ar_pace = whole["ar"]
    method_pace = clocked["method"] | whole["method"]
    return BenchmarkColumn(
        batch_size=batch_size,
        ar=ar_pace,
        method=method_pace,
        memory=peak_memory(device),
        images=1000 * batch_size / (target.length * ar_pace["round"].median),
        ratio=ar_pace["round"].median / method_pace["round"].median,
        limit=limit,
    )


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """The device's bandwidth in bytes per second when it reads, in a large sum. A pass reads its
    weights and writes little; a copy would measure writing, too.
    """
    size = READ.get(device.type, READ["cpu"])
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(size, free // 2)
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    seconds = min(_seconds_to_sum(numbers) for _ in range(repeats))
    return 4 * len(numbers) / seconds


def _seconds_to_sum(numbers: torch.Tensor) -> float:
    """By the device's own clock on a GPU."""
    if not numbers.is_cuda:
        begun = now(numbers.device)
        numbers.sum()
        return now(numbers.device) - begun
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    numbers.sum()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def room(depth: int) -> int:
    """Tokens of an excerpt for drafts of a depth; an image may have fewer."""
    return DRAFTS * (1 + depth)


def time_rounds(
    target: Any,
    methods: Mapping[str, Decoding],
    prompts: list[str],
    repeats: int,
    clocked: bool = False,
) -> dict[str, Pace]:
    """Time the methods in turn, by name, in `repeats` decodes each after one to warm up: of whole
    images, or for discrete tokens of a few rounds in the middle of one; with a clock in each part
    of a round, or without.
    """
    depths = [method.drafter.depth for method in methods.values() if isinstance(method, Method)]
    longest = room(max(depths, default=0))
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for seed in range(-1, repeats):
        for name, method in methods.items():
            timings[name].append(_timed(target, method, prompts, seed, longest, clocked))
    return {name: _pace(decodes[1:]) for name, decodes in timings.items()}


def _pace(decodes: Sequence[Mapping[str, float]]) -> Pace:
    """The spread of each part over several decodes."""
    return {part: Spread.of([decode[part] for decode in decodes]) for part in decodes[0]}


def _timed(
    target: Any,
    method: Decoding,
    prompts: list[str],
    seed: int,
    longest: int,
    clocked: bool,
) -> dict[str, float]:
    """Decode a batch, of discrete tokens an excerpt, and return the values of its `Pace`.

    Args:
        longest: most tokens of an excerpt.
        clocked: whether to measure the parts of a round, which synchronises the device.
    """
    device = target.device
    clock = Clock(device) if clocked else None
    if isinstance(method, Method):
        target = Excerpt.of(target, method, longest)
        first = 1  # later rounds are alike
    elif isinstance(method, Speculative):
        first = len(method.prefilled(target.length))  # rounds after the prefill are alike
    else:
        first = 0
    streams = RandomStreams(seed, [str(row) for row in range(len(prompts))], device)
    times = [now(device)]
    clocks: list[dict[str, float]] = [{}]

    def mark(*_: Any) -> None:
        times.append(now(device))
        clocks.append({} if clock is None else dict(clock.seconds))

    options: dict[str, Any] = {} if clock is None else {"run": clock}
    output = method.decode(target, streams, prompts, watch=[mark], **options)
    rounds = len(times) - 1 - first
    later = (times[-1] - times[first]) / rounds if rounds else 0.0
    seconds = {
        "beginning": times[first] - times[0] - later,
        "round": later,
        "whole": times[-1] - times[0],
    }
    before = clocks[first] if rounds else {}  # a round that is alone has the parts
    for part, total in clocks[-1].items():
        seconds[part] = (total - before.get(part, 0.0)) / max(1, rounds)
    values = {part: 1000 * spent for part, spent in seconds.items()}
    if isinstance(output.trace, ContinuousTrace):
        emitted = output.trace.proposed.gt(0).sum(-1).float().mean()
        values["accepted_length"] = float(emitted) / max(1, rounds)
    return values
