"""What a round gives the device to do: where this takes longer than the device's own work, fewer
and larger operations make rounds faster.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tempera.decoding.random_streams import RandomStreams
from tempera.evaluation.benchmark import DRAFTS, Excerpt, room
from tempera.evaluation.pipeline import Method

ROUNDS = DRAFTS - 1
"""Rounds that are counted: an excerpt has at least one more, which comes first."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a GPU, or a copy.

    Attributes:
        name: as the profiler tells it.
        count: how often it runs in a round, also inside replayed graphs.
        milliseconds: of the device in a round, all its runs together.
        share: of the time of all kernels.
    """

    name: str
    count: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Launches:
    """Of a round, on average.

    Attributes:
        operators: calls of PyTorch's operators from Python or a compiled function; those inside
            another one, and those inside a replayed graph, do not count.
        kernels: launches on the GPU of kernels that are in no graph; None on a CPU.
        graph_replays: launches of CUDA graphs; None on a CPU.
        by_name: what ran on the GPU; empty on a CPU.
    """

    operators: float
    kernels: float | None
    graph_replays: float | None
    by_name: tuple[Kernel, ...] = ()


def launches(
    target: Any, method: Method, prompts: list[str], longest: int | None = None
) -> Launches:
    """Count them in rounds of the decoding loop, in the middle of an image.

    Args:
        target: with these prompts encoded; decoded before, if it is compiled.
        method: of discrete tokens.
        longest: most tokens of the excerpt, by default those that the method needs. With those of
            a measurement before, nothing is compiled anew.
    """
    on_gpu = target.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    ended = 0

    def count(_: Any) -> None:
        """Leave the first round, and what follows the last one, out."""
        nonlocal ended
        ended += 1
        if ended == 1:
            profiler.start()
        elif ended == 1 + ROUNDS:
            profiler.stop()

    longest = longest or room(method.drafter.depth)
    streams = RandomStreams(0, [str(row) for row in range(len(prompts))], target.device)
    method.decode(Excerpt.of(target, method, longest), streams, prompts, watch=[count])
    rounds = min(ended - 1, ROUNDS)
    if rounds < ROUNDS:
        profiler.stop()
    events = profiler.events() or []
    operators = [event for event in events if _is_operator(event)]
    kernels = [event for event in events if "LaunchKernel" in event.name]
    replays = [event for event in events if "GraphLaunch" in event.name]
    return Launches(
        len(operators) / rounds,
        len(kernels) / rounds if on_gpu else None,
        len(replays) / rounds if on_gpu else None,
        kernels_by_name(events, rounds),
    )


def kernels_by_name(events: Iterable[Any], rounds: int) -> tuple[Kernel, ...]:
    """The kernels of a round, on average; those that take most time first.

    Args:
        events: of PyTorch's profiler. What ran on the host, and marks that users set, do not count.
        rounds: how many rounds they are of.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            times[event.name].append(event.time_range.elapsed_us() / 1000)
    whole = sum(map(sum, times.values()))
    found = [
        Kernel(name, len(each) / rounds, sum(each) / rounds, sum(each) / whole if whole else 0.0)
        for name, each in times.items()
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.milliseconds))


def _is_operator(event: Any) -> bool:
    """Whether this is an operator that no other one calls."""
    parent = event.cpu_parent
    return event.name.startswith("aten::") and not (parent and parent.name.startswith("aten::"))
