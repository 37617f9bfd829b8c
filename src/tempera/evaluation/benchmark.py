"""Measures where the time of a round goes, on any device: each part, the whole round, and the limit
that memory bandwidth sets.

Rounds are real rounds of the decoding loop. Those of discrete tokens are timed in an excerpt from
the middle of an image; weights may be random, because the cost of a round does not depend on how
much is accepted. Images of continuous tokens are decoded whole, because it does there. The speed-up
at an accepted length is accepted length × time of AR's round ÷ time of the method's round, where
both rounds are compiled or both are not.
"""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tempera.continuous.loop import ContinuousTrace, Speculative
from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock, now
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import DecodingMethod, Method
from tempera.targets.transformer import TransformerTarget

READ = 2**28
"""Bytes read to measure the device's bandwidth; more than any cache holds."""
AR_TOKENS = 24
"""Most rounds of plain autoregression in an excerpt. That of a method can be longer, because a long
draft may be accepted as a whole.
"""
DRAFTS = 4
"""Drafts of the longest kind that an excerpt has room for. In shorter ones, rounds take longer than
in whole images, because the processor's caches still hold what another method needs.
"""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated timings, in milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Of timings in seconds."""
        low, median, high = 1000 * np.quantile(np.array(seconds), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        median, low, high = map(milliseconds, (self.median, self.low, self.high))
        return f"{median} ({low} … {high})"


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is measured.

    Args:
        batch_sizes: numbers of prompts decoded at once; the results have a column for each.
        compile: whether steps are compiled; `both` times plain steps first, then compiled ones.
        repeats: timings of each part and of each round; the report gives median and quartiles.
        bandwidth: bandwidth of the device's memory in GB/s (10⁹ bytes); measured by default.
        trees: names of static trees whose target passes are timed too, besides 1 token and the
            method's own draft.
        accepted_lengths: the accepted lengths at which speed-ups are given.
    """

    batch_sizes: list[int] = field(default_factory=lambda: [1, 16])
    compile: Literal[False, True, "both"] = False
    repeats: int = 20
    bandwidth: float | None = None
    trees: list[str] = field(default_factory=lambda: ["mc_sim_7b_63", "naive_extend_57"])
    accepted_lengths: list[float] = field(
        default_factory=lambda: [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    )

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or self.repeats < 1:
            raise TemperaError(
                f"batch_sizes={list(self.batch_sizes)} and repeats={self.repeats} must be at "
                "least 1."
            )
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise TemperaError(
                f"bandwidth={self.bandwidth} GB/s is not possible: give a number above 0, or "
                "null to measure it."
            )
        for name in self.trees:
            Tree.named(name)  # raises TemperaError, before weights are read

    @property
    def kinds(self) -> list[bool]:
        """Whether steps are compiled, for each kind of measurement in turn."""
        return [False, True] if self.compile == "both" else [self.compile]


@dataclass(frozen=True)
class Passes:
    """What is measured of the passes of a discrete target, besides rounds.

    Attributes:
        target: one forward pass and its sampling distribution, by the number of tokens per row.
        cache: bytes of keys and values that a token in the middle of the image reads.
        limit: milliseconds to read weights and cache once at the device's bandwidth.
    """

    target: dict[int, Spread]
    cache: int
    limit: float


@dataclass(frozen=True)
class BenchmarkColumn:
    """Timings in milliseconds at one batch size, with compiled or with plain steps.

    Attributes:
        parts: the parts of the method's round, by name (draft, target, verify, commit), each
            synchronised.
        ar: a round of plain autoregression, without clocks inside.
        method: a round of the method, without clocks inside.
        memory: peak bytes so far: allocated on a GPU, resident on a CPU.
        images: images per second by plain autoregression, without text encoder and image decoder.
        ratio: speed-up ÷ accepted length, which is AR's round ÷ the method's round.
        ratio_limit: the machine's limit of `ratio`: AR's round ÷ the target's part of the method's
            round, as if draft, verification and commit took no time.
        speedups: speed-ups over plain autoregression, by accepted length.
        passes: of discrete tokens.
        accepted_length: of continuous tokens, with these weights: tokens that a round adds to an
            image; in a batch, on average over the rounds of the slowest image.
        speedup: of continuous tokens: AR's time for whole images ÷ the method's.
    """

    batch_size: int
    compiled: bool
    parts: dict[str, Spread]
    ar: Spread
    method: Spread
    memory: int
    images: float
    ratio: float
    ratio_limit: float
    speedups: dict[float, float]
    passes: Passes | None = None
    accepted_length: float | None = None
    speedup: float | None = None

    @property
    def title(self) -> str:
        """Heading of the column in a table."""
        return f"{'compiled' if self.compiled else 'eager'}, batch {self.batch_size}"


@dataclass(frozen=True)
class BenchmarkReport:
    """What was measured.

    Attributes:
        steps: drafting steps of a round.
        bandwidth: bytes per second, as given or measured by a large sum (reads); None for
            continuous tokens, as the next.
        weights: bytes of the weights that every pass reads.
    """

    device: str
    dtype: str
    steps: int
    bandwidth: float | None
    weights: int | None
    columns: list[BenchmarkColumn]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


class Excerpt:
    """A target that starts in the middle of the image and stops `length` tokens later. Implements
    `interfaces.Target`.
    """

    def __init__(self, target: TransformerTarget, length: int) -> None:
        self.target, self.length = target, length
        self.vocab_size, self.grid = target.vocab_size, (1, length)
        self.identity, self.dtype, self.compiled = target.identity, target.dtype, target.compiled
        self.device, self.start = target.device, (target.length - length) // 2
        if self.start < 0:
            raise TemperaError(
                f"an image of {target.length} tokens is too short to time {length}: give at most "
                f"{target.length}."
            )

    @property
    def longest(self) -> int:
        """See `Target`."""
        return self.target.longest - self.start

    @longest.setter
    def longest(self, tokens: int) -> None:
        self.target.longest = self.start + tokens

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """The target's."""
        return self.target.encoded(prompts)

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Start a batch and skip the first half of the images. Its keys and values stay zero; they
        take as long to read as any others.
        """
        self.target.begin(prompts, nodes)
        token = torch.zeros(len(prompts), dtype=torch.int64, device=self.device)
        self.target.advance(token, token + self.start, self.start)

    def score(self, draft: Draft) -> Scores:
        """The target's."""
        return self.target.score(draft)

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """The target's."""
        self.target.commit(draft, verdict, emitted)


def measure(
    target: Any,
    make_method: Callable[[], DecodingMethod],
    plan: BenchmarkPlan,
    progress: Callable[[str], None] = lambda part: None,
) -> BenchmarkReport:
    """Time rounds of plain autoregression and of a method in turn, and the parts of the method's.

    Args:
        target: the model, on its device; it stays compiled if the plan asks for compiled steps.
        make_method: builds the method; called again for a compiled target, so that its draft is
            compiled too.
        plan: what to measure, and how often.
        progress: called with the name of each part before it is measured.

    Raises:
        TemperaError: memory ran out, or the method has no rounds to time.
    """
    discrete, columns = isinstance(target, TransformerTarget), list[BenchmarkColumn]()
    if plan.compile and not discrete:
        raise TemperaError("models of continuous tokens are not compiled: give compile=false")
    speed = 1e9 * plan.bandwidth if plan.bandwidth else bandwidth(target.device) if discrete else 0
    for compiled in plan.kinds:
        if compiled:
            target.compile()
        method = make_method()
        _check_rounds(method, target.length)
        for batch_size in plan.batch_sizes:
            progress(f"{'compiled' if compiled else 'eager'}, batch {batch_size}")
            try:
                columns.append(_column(target, method, plan, batch_size, speed))
            except (MemoryError, RuntimeError) as problem:
                if not is_out_of_memory(problem):
                    raise
                raise TemperaError(
                    f"out of memory at batch {batch_size}: take a smaller batch, half precision, "
                    "or fewer drafted tokens",
                    option="batch_sizes",
                ) from problem
    return BenchmarkReport(
        name_of(target.device),
        str(target.dtype).removeprefix("torch."),
        method.gamma if isinstance(method, Speculative) else method.drafter.depth,  # type: ignore[attr-defined]
        speed or None,
        target.weight_bytes if discrete else None,
        columns,
    )


def _check_rounds(method: DecodingMethod, length: int) -> None:
    """Raise TemperaError for a method without rounds of draft and verification."""
    if isinstance(method, Speculative):
        if sum(method.prefilled(length)) >= length:
            raise TemperaError(
                f"prefill={method.prefill:g} draws all {length} tokens of an image, so there is no "
                "round to time: give a smaller share, or more steps"
            )
    elif not isinstance(method, Method) or method.is_plain:
        raise TemperaError(
            "a benchmark times rounds of draft and verification beside plain autoregression: "
            "choose another method, such as method=eagle, or for continuous tokens method=cspd."
        )


def is_out_of_memory(problem: Exception) -> bool:
    """Whether memory ran out in Python, on a GPU or in PyTorch's allocator of the CPU."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
        problem
    )


def _column(
    target: Any, method: Any, plan: BenchmarkPlan, batch_size: int, speed: float
) -> BenchmarkColumn:
    """Time rounds and their parts at one batch size, on the target as it is: compiled or not."""
    prompts, device = batch_size * ["0"], target.device  # the first class, or a text
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with target.encoded(prompts):
        passes = (
            _time_passes(target, method, plan, prompts, speed)
            if isinstance(target, TransformerTarget)
            else None
        )
        rounds = time_rounds(target, {"ar": method.plain, "method": method}, prompts, plan.repeats)
        parts, accepted = _time_parts(target, method, prompts, plan.repeats)
    ar, own = rounds["ar"], rounds["method"]
    ratio = ar.round.median / own.round.median
    return BenchmarkColumn(
        batch_size=batch_size,
        compiled=target.compiled,
        parts=parts,
        ar=ar.round,
        method=own.round,
        memory=peak_memory(device),
        images=1000 * batch_size / (target.length * ar.round.median),
        ratio=ratio,
        ratio_limit=ar.round.median / parts["target"].median,
        speedups={length: length * ratio for length in plan.accepted_lengths},
        passes=passes,
        accepted_length=accepted,
        speedup=None if passes else ar.whole.median / own.whole.median,
    )


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """The device's bandwidth in bytes per second when it reads, in a large sum. A pass reads its
    weights and writes little; a copy would measure writing, too.
    """
    numbers = torch.ones(READ // 4, dtype=torch.float32, device=device)
    return READ / min(_seconds(numbers.sum, device) for _ in range(repeats))


def _time_passes(
    target: TransformerTarget, method: Method, plan: BenchmarkPlan, prompts: list[str], speed: float
) -> Passes:
    """Time passes over 1 token, over as many as the method's draft has, and over the plan's
    trees.
    """
    trees = [Tree.empty(), Tree.chain(method.drafter.nodes), *map(Tree.named, plan.trees)]
    passes = {
        nodes + 1: _time_pass(target, tree, prompts, plan.repeats)
        for nodes, tree in sorted({tree.nodes: tree for tree in trees}.items())
    }
    cache = target.session.cache.nbytes(target.session.prompt.prefix + target.length // 2)
    return Passes(passes, cache, 1000 * (target.weight_bytes + cache) / speed)


def _time_pass(target: TransformerTarget, tree: Tree, prompts: list[str], repeats: int) -> Spread:
    Excerpt(target, 1).begin(prompts, tree.nodes)
    tokens = torch.zeros(len(prompts), tree.nodes, dtype=torch.int64, device=target.device)
    draft = Draft(tokens, tokens.float().unsqueeze(-1)[..., :0], tree.to(target.device))
    seconds = [_seconds(lambda: target.score(draft), target.device) for _ in range(1 + repeats)]
    return Spread.of(seconds[1:])


@dataclass(frozen=True)
class Pace:
    """How long a method takes.

    Attributes:
        beginning: of an image, from its prompt to the end of the first round, less a later round.
        round: a later round.
        whole: the whole decode.
    """

    beginning: Spread
    round: Spread
    whole: Spread


def time_rounds(
    target: Any, methods: Mapping[str, DecodingMethod], prompts: list[str], repeats: int
) -> dict[str, Pace]:
    """Time the methods in turn, by name, in `repeats` decodes each after one to warm up: of whole
    images, or for discrete tokens of a few rounds in the middle of one.
    """
    longest = max(map(_tokens, methods.values()))
    timings: dict[str, list[tuple[float, float, float]]] = {name: [] for name in methods}
    for seed in range(-1, repeats):
        for name, method in methods.items():
            times = _decoded(target, method, prompts, seed, longest)[0]
            first, rounds = _kept(times, method, target.length)
            later = (times[-1] - times[first]) / rounds if rounds else 0.0
            whole = times[-1] - times[0]
            timings[name].append((times[first] - times[0] - later, later, whole))
    return {
        name: Pace(*map(Spread.of, zip(*found[1:], strict=True))) for name, found in timings.items()
    }


def _tokens(method: DecodingMethod) -> int:
    """Tokens of an excerpt that suits a method; an image may have fewer."""
    return DRAFTS * (1 + method.drafter.depth) if isinstance(method, Method) else 0


def _kept(times: Sequence[Any], method: DecodingMethod, length: int) -> tuple[int, int]:
    """The first time after which rounds are alike, and how many of them follow. Left out are the
    first round of discrete tokens, and the prefill of continuous ones.
    """
    prefill = len(method.prefilled(length)) if isinstance(method, Speculative) else 0
    first = 1 if isinstance(method, Method) else prefill
    return first, len(times) - 1 - first


def _time_parts(
    target: Any, method: DecodingMethod, prompts: list[str], repeats: int
) -> tuple[dict[str, Spread], float | None]:
    """Time the parts of the method's rounds in such decodes; and the accepted length of continuous
    tokens in them.
    """
    parts: dict[str, list[float]] = {}
    lengths: list[float] = []
    for seed in range(repeats):
        times, ends, trace = _decoded(target, method, prompts, seed, _tokens(method), Clock)
        first, rounds = _kept(times, method, target.length)
        before = ends[first] if rounds else {}
        for part, spent in ends[-1].items():
            parts.setdefault(part, []).append((spent - before.get(part, 0.0)) / max(1, rounds))
        if isinstance(trace, ContinuousTrace):
            emitted = trace.proposed.gt(0).sum(-1).float().mean()
            lengths.append(float(emitted) / max(1, rounds))
    spreads = {part: Spread.of(values) for part, values in parts.items()}
    return spreads, sum(lengths) / len(lengths) if lengths else None


def _decoded(
    target: Any,
    method: DecodingMethod,
    prompts: list[str],
    seed: int,
    longest: int,
    make_clock: Callable[[torch.device], Clock] | None = None,
) -> tuple[list[float], list[dict[str, float]], Any]:
    """Decode a batch, of discrete tokens an excerpt: the times in seconds at which it began and its
    rounds ended, what a clock had seen of the parts at each, and the trace.
    """
    device = target.device
    clock = None if make_clock is None else make_clock(device)
    if isinstance(method, Method):
        longest = min(target.length, longest, AR_TOKENS if method.is_plain else longest)
        target = Excerpt(target, longest)
    streams = RandomStreams(seed, [str(row) for row in range(len(prompts))], device)
    times, parts = [now(device)], list[dict[str, float]]([{}])

    def mark(*_: Any) -> None:
        times.append(now(device))
        parts.append(dict(clock.seconds) if clock is not None else {})

    output = method.decode(target, streams, prompts, clock=clock, observe=mark)
    return times, parts, output.trace


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    start = now(device)
    work()
    return now(device) - start


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident  # bytes on macOS, else KiB


def name_of(device: torch.device) -> str:
    """A GPU's name; otherwise the kind of device and the number of threads."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def table(report: BenchmarkReport) -> list[tuple[str, ...]]:
    """The report as rows of text: the row's name, then for each column the median and quartiles in
    milliseconds, or a derived number.
    """
    columns = report.columns

    def row(name: str, cells: Iterable[object]) -> tuple[str, ...]:
        return name, *map(str, cells)

    steps = (milliseconds(one.parts["draft"].median / report.steps) for one in columns)
    rows = [
        *(row(f"round: {part}", (one.parts[part] for one in columns)) for part in columns[0].parts),
        row(f"round: one of {report.steps} draft steps", steps),
        row("round of the method", (one.method for one in columns)),
        row("round of AR", (one.ar for one in columns)),
        row("speed-up ÷ accepted length", map(_ratio, columns)),
        row("memory at the peak, GiB", (f"{one.memory / 2**30:.2f}" for one in columns)),
        row("images/s of AR", (f"{one.images:.3g}" for one in columns)),
    ]
    passes = [one.passes for one in columns if one.passes is not None]
    if not passes:
        return [
            *rows,
            row("accepted length", (f"{one.accepted_length:.2f}" for one in columns)),
            row("speed-up of whole images", (f"{one.speedup:.2f}×" for one in columns)),
        ]
    limits = (
        f"{milliseconds(one.limit)}; AR takes {column.ar.median / one.limit:.2f}×"
        for one, column in zip(passes, columns, strict=True)
    )
    return [
        *(
            row(f"target, tokens per row: {count}", (one.target[count] for one in passes))
            for count in passes[0].target
        ),
        *rows,
        row("bandwidth limit of AR", limits),
        *(
            row(f"at accepted length {length:g}", (_gain(one, length) for one in columns))
            for length in columns[0].speedups
        ),
    ]


def _gain(column: BenchmarkColumn, length: float) -> str:
    return f"{column.speedups[length]:.2f}×, {column.speedups[length] * column.images:.3g} images/s"


def _ratio(column: BenchmarkColumn) -> str:
    share = 100 * column.ratio / column.ratio_limit
    return f"{column.ratio:.2f} of at most {column.ratio_limit:.2f} ({share:.0f}%)"


def milliseconds(time: float) -> str:
    """A time in milliseconds, to about three digits."""
    digits = 3 if time < 1 else 2 if time < 10 else 1 if time < 1000 else 0
    return f"{time:.{digits}f}"
