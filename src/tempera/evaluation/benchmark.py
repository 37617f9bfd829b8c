"""Measures where the time of a round goes, on any device: each part, the whole round, and the limit
that memory bandwidth sets.

Rounds are real rounds of `decode`, in an excerpt from the middle of an image. Weights may be
random, because the cost of a round does not depend on how much is accepted. The speed-up at an
accepted length is accepted length × time of AR's round ÷ time of the method's round, where both
rounds are compiled or both are not.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import Clock, PartTimer, no_clock, now
from tempera.decoding.trees import Tree
from tempera.errors import BenchmarkTooLarge, TemperaError
from tempera.evaluation.pipeline import Method
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
        low, median, high = (
            float(1000 * value) for value in np.quantile(np.array(seconds), [0.25, 0.5, 0.75])
        )
        return cls(median, low, high)


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
class BenchmarkColumn:
    """Timings in milliseconds at one batch size, with compiled or with plain steps.

    Attributes:
        target: one forward pass and its sampling distribution, by the number of tokens per row.
        parts: the parts of the method's round, by name (draft, target, verify, commit), each
            synchronised.
        sampling: the part of `target` from hidden states to the sampled distribution, for the
            method's draft.
        ar: a round of plain autoregression, without clocks inside.
        method: a round of the method, without clocks inside.
        cache: bytes of keys and values that a token in the middle of the image reads.
        limit: milliseconds to read weights and cache once at the device's bandwidth.
        memory: peak bytes so far: allocated on a GPU, resident on a CPU.
        images: images per second by plain autoregression, without text encoder and image decoder.
        ratio: speed-up ÷ accepted length, which is AR's round ÷ the method's round.
        ratio_limit: the machine's limit of `ratio`: AR's round ÷ the target's part of the method's
            round, as if draft, verification and commit took no time.
        speedups: speed-ups over plain autoregression, by accepted length.
    """

    batch_size: int
    compiled: bool
    target: dict[int, Spread]
    parts: dict[str, Spread]
    sampling: Spread
    ar: Spread
    method: Spread
    cache: int
    limit: float
    memory: int
    images: float
    ratio: float
    ratio_limit: float
    speedups: dict[float, float]

    @property
    def title(self) -> str:
        """Heading of the column in a table."""
        return f"{'compiled' if self.compiled else 'eager'}, batch {self.batch_size}"


@dataclass(frozen=True)
class BenchmarkReport:
    """What was measured.

    Attributes:
        drafted: number of nodes in the method's draft; the deepest is at `depth`.
        bandwidth: bytes per second, as given or measured by a large sum (reads).
        weights: bytes of the weights that every pass reads.
    """

    device: str
    dtype: str
    drafted: int
    depth: int
    bandwidth: float
    weights: int
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
        self.start = (target.length - length) // 2
        if self.start < 0:
            raise TemperaError(
                f"an image of {target.length} tokens is too short to time {length}: give at most "
                f"{target.length}."
            )

    @property
    def identity(self) -> str:
        """The target's."""
        return self.target.identity

    @property
    def dtype(self) -> torch.dtype:
        """The target's."""
        return self.target.dtype

    @property
    def compiled(self) -> bool:
        """The target's."""
        return self.target.compiled

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
        token = torch.zeros(len(prompts), dtype=torch.int64, device=self.target.device)
        self.target.advance(token, token + self.start, self.start)

    def score(self, draft: Draft) -> Scores:
        """The target's."""
        return self.target.score(draft)

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """The target's."""
        self.target.commit(draft, verdict, emitted)


def measure(
    target: TransformerTarget,
    make_method: Callable[[], Method],
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
        BenchmarkTooLarge: memory ran out.
        TemperaError: the method is plain autoregression.
    """
    speed = bandwidth(target.device) if plan.bandwidth is None else 1e9 * plan.bandwidth
    columns = []
    for compiled in plan.kinds:
        if compiled:
            target.compile()
        method = make_method()
        for batch_size in plan.batch_sizes:
            columns.append(measure_column(target, method, plan, batch_size, speed, progress))
    drafter = method.drafter
    dtype = str(target.dtype).removeprefix("torch.")
    return BenchmarkReport(
        name_of(target.device),
        dtype,
        drafter.nodes,
        drafter.depth,
        speed,
        target.weight_bytes,
        columns,
    )


def measure_column(
    target: TransformerTarget,
    method: Method,
    plan: BenchmarkPlan,
    batch_size: int,
    speed: float,
    progress: Callable[[str], None] = lambda part: None,
) -> BenchmarkColumn:
    """Time rounds and their parts at one batch size, on the target as it is: compiled or not.

    Args:
        speed: the device's bandwidth in bytes per second, for the limit that it sets.

    Raises:
        BenchmarkTooLarge: memory ran out.
        TemperaError: the method is plain autoregression.
    """
    if method.is_plain:
        raise TemperaError(
            "method=ar is the baseline that methods are timed against: choose another, such as "
            "method=eagle."
        )
    try:
        return _column(target, method, plan, batch_size, speed, progress)
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise BenchmarkTooLarge(batch_size) from problem


def is_out_of_memory(problem: Exception) -> bool:
    """Whether memory ran out in Python, on a GPU or in PyTorch's allocator of the CPU."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
        problem
    )


def _column(
    target: TransformerTarget,
    method: Method,
    plan: BenchmarkPlan,
    batch_size: int,
    speed: float,
    progress: Callable[[str], None],
) -> BenchmarkColumn:
    kind = f"{'compiled' if target.compiled else 'eager'}, batch {batch_size}"
    reset_memory(target.device)
    prompts = [str(row) for row in range(batch_size)]  # for classes as well as for texts
    passes = {}
    for tree in _trees(method, plan):
        progress(f"{kind}: target, {1 + tree.nodes} tokens")
        passes[1 + tree.nodes] = _time_pass(target, tree, prompts, plan.repeats)
    progress(f"{kind}: rounds")
    rounds = time_rounds(target, {"ar": method.plain, "method": method}, prompts, plan.repeats)
    ar, own = rounds["ar"].round, rounds["method"].round
    parts = _time_parts(target, method, prompts, plan.repeats)
    middle = target.session.prompt.prefix + target.length // 2
    cache = target.session.cache.nbytes(middle)
    return BenchmarkColumn(
        batch_size=batch_size,
        compiled=target.compiled,
        target=passes,
        parts=parts,
        sampling=_time_sampling(target, method.drafter.nodes, plan.repeats),
        ar=ar,
        method=own,
        cache=cache,
        limit=1000 * (target.weight_bytes + cache) / speed,
        memory=peak_memory(target.device),
        images=1000 * batch_size / (target.length * ar.median),
        ratio=ar.median / own.median,
        ratio_limit=ar.median / parts["target"].median,
        speedups={length: length * ar.median / own.median for length in plan.accepted_lengths},
    )


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """The device's bandwidth in bytes per second when it reads, in a large sum. A pass reads its
    weights and writes little; a copy would measure writing, too.
    """
    numbers = torch.ones(READ // 4, dtype=torch.float32, device=device)
    return READ / min(_timed(numbers.sum, device) for _ in range(repeats))


def _trees(method: Method, plan: BenchmarkPlan) -> list[Tree]:
    """The empty tree, a chain of as many nodes as the method's draft, and the plan's trees, by
    size.
    """
    trees = [
        Tree.empty(),
        Tree.chain(method.drafter.nodes),
        *(Tree.named(name) for name in plan.trees),
    ]
    return sorted({tree.nodes: tree for tree in trees}.values(), key=lambda tree: tree.nodes)


def _time_pass(target: TransformerTarget, tree: Tree, prompts: list[str], repeats: int) -> Spread:
    excerpt = Excerpt(target, 1)
    excerpt.begin(prompts, tree.nodes)
    shape = (len(prompts), tree.nodes)
    draft = Draft(
        torch.zeros(shape, dtype=torch.int64, device=target.device),
        torch.zeros(*shape, 0, device=target.device),
        tree.to(target.device),
    )
    return _spread(lambda: target.score(draft), target.device, repeats)


@dataclass(frozen=True)
class Pace:
    """How long a method takes.

    Attributes:
        beginning: of an image, from its prompt to the end of the first round, less a later round.
        round: a later round.
    """

    beginning: Spread
    round: Spread


def time_rounds(
    target: TransformerTarget, methods: Mapping[str, Method], prompts: list[str], repeats: int
) -> dict[str, Pace]:
    """Time the methods in turn, by name, in `repeats` excerpts of a few rounds each, from the
    middle of an image.
    """
    longest = max(map(_tokens, methods.values()))
    excerpts = {
        name: Excerpt(target, min(target.length, longest, AR_TOKENS if one.is_plain else longest))
        for name, one in methods.items()
    }
    beginnings: dict[str, list[float]] = {name: [] for name in methods}
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    for name, method in methods.items():
        _warm_up(excerpts[name], method, prompts)
    for repeat in range(repeats):
        for name, method in methods.items():
            start, first, *others = _excerpt(excerpts[name], method, prompts, repeat)
            later = (others[-1] - first) / len(others) if others else 0.0
            rounds[name].append(later)
            beginnings[name].append(first - start - later)
    return {name: Pace(Spread.of(beginnings[name]), Spread.of(rounds[name])) for name in methods}


def _tokens(method: Method) -> int:
    """Tokens of an excerpt that suits a method; an image may have fewer."""
    return DRAFTS * (1 + method.drafter.depth)


def _warm_up(excerpt: Excerpt, method: Method, prompts: list[str]) -> None:
    """Play an excerpt, so that nothing is made for the first time."""
    _excerpt(excerpt, method, prompts, -1)


def _time_parts(
    target: TransformerTarget, method: Method, prompts: list[str], repeats: int
) -> dict[str, Spread]:
    """Time the parts of the method's rounds in such excerpts, without the first round of each,
    which is another kind of round.
    """
    excerpt = Excerpt(target, min(target.length, _tokens(method)))
    parts: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name, seconds in _seconds_by_part(excerpt, method, prompts, repeat).items():
            parts.setdefault(name, []).append(seconds)
    return {part: Spread.of(values) for part, values in parts.items()}


def _seconds_by_part(
    excerpt: Excerpt, method: Method, prompts: list[str], seed: int
) -> dict[str, float]:
    """The mean time of each part, over all rounds but the first; over that one if there is no
    other.
    """
    clock, ends = Clock(excerpt.target.device), list[dict[str, float]]()
    _excerpt(excerpt, method, prompts, seed, clock, lambda: ends.append(dict(clock.seconds)))
    first = ends[0] if len(ends) > 1 else {}
    rounds = max(1, len(ends) - 1)
    return {part: (spent - first.get(part, 0.0)) / rounds for part, spent in ends[-1].items()}


def _excerpt(
    target: Excerpt,
    method: Method,
    prompts: list[str],
    seed: int,
    clock: PartTimer = no_clock,
    after_round: Callable[[], None] = lambda: None,
) -> list[float]:
    """The times in seconds at which one excerpt began and its rounds ended."""
    streams = RandomStreams(seed, [str(row) for row in range(len(prompts))], target.target.device)
    times = [now(target.target.device)]

    def mark(rounds: int, written: int) -> None:  # the number was read: the round has ended
        times.append(time.perf_counter())
        after_round()

    method.decode(target, streams, prompts, progress=mark, clock=clock)
    return times


def _time_sampling(target: TransformerTarget, nodes: int, repeats: int) -> Spread:
    hidden = torch.zeros(
        target.session.prompt.rows,
        1 + nodes,
        target.head.hidden_size,
        dtype=target.dtype,
        device=target.device,
    )
    ahead = torch.arange(1 + nodes, device=target.device).clamp(max=1)
    lengths = target.session.prompt.lengths
    return _spread(lambda: target.head.distribution(hidden, lengths, ahead), target.device, repeats)


def _spread(work: Callable[[], Any], device: torch.device, repeats: int) -> Spread:
    _timed(work, device)
    return Spread.of([_timed(work, device) for _ in range(repeats)])


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    start = now(device)
    work()
    return now(device) - start


def reset_memory(device: torch.device) -> None:
    """Start measuring `peak_memory` anew; has no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


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
    first = {column.compiled: column for column in reversed(columns)}

    def timed(name: str, spreads: Iterable[Spread]) -> tuple[str, ...]:
        return name, *map(cell, spreads)

    return [
        *(timed(_pass_name(n), (one.target[n] for one in columns)) for n in columns[0].target),
        timed("sampling, inside the target's", (one.sampling for one in columns)),
        *(
            timed(f"round: {part}", (one.parts[part] for one in columns))
            for part in columns[0].parts
        ),
        (
            f"round: one of {report.depth} draft steps",
            *(milliseconds(one.parts["draft"].median / report.depth) for one in columns),
        ),
        timed("round of the method", (one.method for one in columns)),
        ("verify + commit, of it", *(f"{100 * _small(one):.1f}%" for one in columns)),
        timed("round of AR", (one.ar for one in columns)),
        ("bandwidth limit of AR", *map(_limit, columns)),
        ("speed-up ÷ accepted length", *map(_ratio, columns)),
        ("memory at the peak, GiB", *(f"{one.memory / 2**30:.2f}" for one in columns)),
        ("images/s of AR", *(f"{one.images:.3g}" for one in columns)),
        (
            "and over the first column",
            *(f"{one.images / first[one.compiled].images:.2f}×" for one in columns),
        ),
        *(
            (f"at accepted length {length:g}", *(_gain(one, length) for one in columns))
            for length in columns[0].speedups
        ),
    ]


def _pass_name(tokens: int) -> str:
    return f"target, {tokens} token{'s' if tokens > 1 else ''} per row"


def _gain(column: BenchmarkColumn, length: float) -> str:
    return f"{column.speedups[length]:.2f}×, {column.speedups[length] * column.images:.3g} images/s"


def _limit(column: BenchmarkColumn) -> str:
    return f"{milliseconds(column.limit)}; AR takes {column.ar.median / column.limit:.2f}×"


def _ratio(column: BenchmarkColumn) -> str:
    share = 100 * column.ratio / column.ratio_limit
    return f"{column.ratio:.2f} of at most {column.ratio_limit:.2f} ({share:.0f}%)"


def _small(column: BenchmarkColumn) -> float:
    """The share of a round spent in neither draft nor target."""
    parts = column.parts
    return (parts["verify"].median + parts["commit"].median) / sum(
        part.median for part in parts.values()
    )


def cell(spread: Spread) -> str:
    """Median and quartiles as text."""
    return (
        f"{milliseconds(spread.median)} ({milliseconds(spread.low)} … {milliseconds(spread.high)})"
    )


def milliseconds(time: float) -> str:
    """A time in milliseconds, to about three digits."""
    digits = 3 if time < 1 else 2 if time < 10 else 1 if time < 1000 else 0
    return f"{time:.{digits}f}"
