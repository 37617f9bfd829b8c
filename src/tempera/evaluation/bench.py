"""Where the time of a round goes, on whatever device is present: each part, the whole round, and what the device's bandwidth allows.

Rounds are real ones of `decode`, over an excerpt from the middle of an image, so that weights may be random: what a draft costs does not
depend on what is accepted. Speed-ups are then given for every accepted length, as accepted length × AR's round ÷ the method's round.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tempera.acceptance import Exact
from tempera.decode import decode
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.painter import Method
from tempera.streams import Streams
from tempera.targets.adapter import TransformerTarget
from tempera.timing import Clock, no_clock
from tempera.trees import Tree
from tempera.types import Draft, Scores, Verdict

COPIED = 2**28
"""Bytes that are copied to measure the device's bandwidth; beyond any cache."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated timings, in milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Of timings in seconds."""
        low, median, high = (float(1000 * value) for value in np.quantile(np.array(seconds), [0.25, 0.5, 0.75]))
        return cls(median, low, high)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        batch_size: prompts decoded at once.
        repeats: timings of each part and of each round; their median and quartiles are told.
        trees: static trees, by name, whose target passes are timed beside 1 token and the method's own draft.
        accepted_lengths: for which the speed-up is told.
    """

    batch_size: int = 1
    repeats: int = 20
    trees: Sequence[str] = ("mc_sim_7b_63", "naive_extend_57")
    accepted_lengths: Sequence[float] = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.repeats < 1:
            raise TemperaError(f"batch_size={self.batch_size} and repeats={self.repeats} must be at least 1.")


@dataclass(frozen=True)
class Report:
    """Timings in milliseconds.

    Attributes:
        target: one forward pass with its sampling distribution, by the number of tokens per row.
        parts: of the method's round, by name (draft, target, verify, commit), each synchronised.
        sampling: from hidden states to the sampled distribution, inside `target`, for the method's draft.
        ar: a round of plain autoregression, not clocked inside; `method`: a round of the method.
        bandwidth: bytes per second of a large copy (reads and writes); `weights`, `cache`: bytes that a token's pass must read.
        limit: milliseconds that reading them takes.
        memory: peak bytes: allocated on a GPU, resident on a CPU.
    """

    device: str
    dtype: str
    batch_size: int
    drafted: int
    target: dict[int, Spread]
    parts: dict[str, Spread]
    sampling: Spread
    ar: Spread
    method: Spread
    bandwidth: float
    weights: int
    cache: int
    memory: int
    speedups: dict[float, float]

    @property
    def limit(self) -> float:
        """Milliseconds that reading weights and cache once takes at the measured bandwidth."""
        return 1000 * (self.weights + self.cache) / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"limit": self.limit}


class Excerpt:
    """A target that starts in the middle of the image and ends `length` tokens later. Implements `types.Target`."""

    def __init__(self, target: TransformerTarget, length: int) -> None:
        self.target, self.length = target, length
        self.vocab_size, self.grid = target.vocab_size, (1, length)
        self.start = (target.length - length) // 2
        if self.start < 0:
            raise TemperaError(f"an image of {target.length} tokens has no {length} to time: give fewer repeats.")

    def begin(self, prompts: list[str], nodes: int) -> None:
        """Begin the images and pass over the first half; its keys and values are zeros, which take as long to read as any."""
        self.target.begin(prompts, nodes)
        token = torch.zeros(len(prompts), dtype=torch.int64, device=self.target.device)
        empty = Draft(token[:, None][:, :0], torch.zeros(len(prompts), 0, 0, device=self.target.device), Tree.empty())
        verdict = Verdict(token[:, None][:, :0], token, token[:, None], token)
        self.target.commit(empty, verdict, token + self.start)
        self.target.reach = self.start

    def score(self, draft: Draft) -> Scores:
        """The target's."""
        return self.target.score(draft)

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """The target's."""
        self.target.commit(draft, verdict, emitted)


def measure(target: TransformerTarget, method: Method, plan: Plan, progress: Callable[[str], None] = lambda part: None) -> Report:
    """Time a method's round and its parts beside plain autoregression's, in turn.

    Args:
        target: the model, on its device.
        method: what is timed against `method=ar`.
        plan: how often, and what beside.
        progress: told what comes next.
    """
    if method.is_plain:
        raise TemperaError("method=ar is what a method is timed against: choose another one, such as method=eagle.")
    _reset_memory(target.device)
    prompts = [f"prompt {row}" for row in range(plan.batch_size)]
    passes = {}
    for tree in _trees(method, plan):
        progress(f"target, {1 + tree.nodes} tokens")
        passes[1 + tree.nodes] = _time_pass(target, tree, prompts, plan.repeats)
    progress("rounds")
    ar, own, clock = _time_rounds(target, method, prompts, plan.repeats)
    progress("bandwidth")
    return Report(
        device=_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        batch_size=plan.batch_size,
        drafted=method.drafter.nodes,
        target=passes,
        parts=clock,
        sampling=_time_sampling(target, method.drafter.nodes, plan.repeats),
        ar=ar,
        method=own,
        bandwidth=bandwidth(target.device),
        weights=_weights(target),
        cache=target.cache.storage[..., : target.prefix + target.length // 2, :, :].nbytes,
        memory=_memory(target.device),
        speedups={length: length * ar.median / own.median for length in plan.accepted_lengths},
    )


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes per second that the device reads and writes in a large copy."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * COPIED / min(_timed(lambda: target.copy_(source), device) for _ in range(repeats))


def _trees(method: Method, plan: Plan) -> list[Tree]:
    """The empty tree, the method's own number of tokens as a chain, and the plan's trees; by size."""
    trees = [Tree.empty(), Tree.chain(method.drafter.nodes), *(Tree.named(name) for name in plan.trees)]
    return sorted({tree.nodes: tree for tree in trees}.values(), key=lambda tree: tree.nodes)


def _time_pass(target: TransformerTarget, tree: Tree, prompts: list[str], repeats: int) -> Spread:
    excerpt = Excerpt(target, 1)
    excerpt.begin(prompts, tree.nodes)
    shape = (len(prompts), tree.nodes)
    draft = Draft(
        torch.zeros(shape, dtype=torch.int64, device=target.device), torch.zeros(*shape, 0, device=target.device), tree.to(target.device)
    )
    return _spread(lambda: target.score(draft), target.device, repeats)


def _time_rounds(target: TransformerTarget, method: Method, prompts: list[str], repeats: int) -> tuple[Spread, Spread, dict[str, Spread]]:
    """Rounds of plain autoregression and of the method in turn, and the parts of the method's; `repeats` excerpts of a few tokens each."""
    plain = Method(NoDraft(), Exact())
    excerpt = Excerpt(target, min(target.length, 2 * (method.drafter.depth + 1)))
    seconds: dict[str, list[float]] = {"ar": [], "method": []}
    parts: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):  # the first one warms up
        for name, kind in (("ar", plain), ("method", method)):
            rounds, elapsed = _excerpt(excerpt, kind, prompts, repeat, None)
            if repeat >= 0:
                seconds[name].append(elapsed / rounds)
        clock = Clock(target.device)
        rounds, _ = _excerpt(excerpt, method, prompts, repeat, clock)
        for part, spent in clock.seconds.items():
            if repeat >= 0:
                parts.setdefault(part, []).append(spent / rounds)
    return Spread.of(seconds["ar"]), Spread.of(seconds["method"]), {part: Spread.of(values) for part, values in parts.items()}


def _excerpt(target: Excerpt, method: Method, prompts: list[str], seed: int, clock: Clock | None) -> tuple[int, float]:
    """Rounds and seconds of one excerpt, its beginning (text and prefix) left out."""
    marks: list[float] = []

    def mark(rounds: int, written: int) -> None:
        _synchronise(target.target.device)
        marks.append(time.perf_counter())

    streams = Streams(seed, [str(row) for row in range(len(prompts))], target.target.device)
    decode(target, method.drafter, method.rule, streams, prompts, progress=mark, clock=clock or no_clock)
    return (len(marks) - 1, marks[-1] - marks[0]) if len(marks) > 1 and clock is None else (len(marks), 0.0)


def _time_sampling(target: TransformerTarget, nodes: int, repeats: int) -> Spread:
    hidden = torch.zeros(target.rows, 1 + nodes, target.hidden_size, dtype=target.dtype, device=target.device)
    ahead = torch.arange(1 + nodes, device=target.device).clamp(max=1)
    return _spread(lambda: target.distribution(hidden, ahead), target.device, repeats)


def _spread(work: Callable[[], Any], device: torch.device, repeats: int) -> Spread:
    _timed(work, device)
    return Spread.of([_timed(work, device) for _ in range(repeats)])


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weights(target: TransformerTarget) -> int:
    """Bytes of the weights that every pass reads: all but the embedding tables."""
    network = target.network
    read = [*network.model.layers.parameters(), *network.model.norm.parameters(), *network.lm_head.parameters()]
    return sum(parameter.nbytes for parameter in read)


def _reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"


def table(report: Report) -> list[tuple[str, str, str]]:
    """What a person reads: name, median in milliseconds, and quartiles or what it means."""

    def row(name: str, spread: Spread) -> tuple[str, str, str]:
        return name, f"{spread.median:.3f}", f"{spread.low:.3f} … {spread.high:.3f}"

    parts = report.parts
    small = parts["verify"].median + parts["commit"].median
    total = sum(part.median for part in parts.values())
    lines = [row(f"target, {tokens} token{'s' if tokens > 1 else ''} a row", spread) for tokens, spread in report.target.items()]
    lines += [row(f"round: {name}", spread) for name, spread in parts.items()]
    lines += [row("sampling, inside the target's part", report.sampling)]
    lines += [row("round of AR", report.ar), row("round of the method", report.method)]
    lines.append(("verify + commit", f"{small:.3f}", f"{100 * small / total:.1f}% of a round"))
    ratio = f"{report.bandwidth / 1e9:.1f} GB/s; AR takes {report.ar.median / report.limit:.1f}×"
    lines.append(("bandwidth limit of AR", f"{report.limit:.3f}", ratio))
    return lines
