"""Time of an evaluation, from a few seconds of it: decodes the first prompts and keeps nothing."""

from collections.abc import Callable, Sequence
from math import ceil, inf

import numpy as np

from tempera.continuous.target import MARTarget
from tempera.data.prompts import Prompt
from tempera.decoding.timing import batch_seconds
from tempera.evaluation.estimate import blank_tokens
from tempera.evaluation.generate import batches
from tempera.evaluation.latency import CLOCKED, SpeedProtocol, timed_kinds, whole_batches
from tempera.evaluation.pipeline import DecodingMethod, Pipeline
from tempera.metrics.evaluators import BATCH, Evaluator, Pictures
from tempera.metrics.quality import score_batch
from tempera.runtime.cost import Time

SECONDS = 10.0
"""How long each kind of batch is decoded, in seconds; at least two rounds after a warm-up."""


def run_time(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    batch_size: int,
    diagnostics: bool,
    protocol: SpeedProtocol,
    evaluator: Evaluator,
    processes: int = 1,
    seconds: float = SECONDS,
) -> Time:
    """Time the first batches until the time is up, and extrapolate to the main process's share of
    the prompts; and, of the work that it does alone, time the speed protocol and one batch of each
    of the metrics' networks.

    Args:
        pipeline: as for the run.
        prompts: of the whole run.
        batch_size: prompts decoded together.
        diagnostics: see `tempera.decoding.loop.decode`.
        protocol: how speed is measured.
        evaluator: of the run, checked.
        processes: number of processes that share the prompts.
        seconds: how long each kind of batch is decoded.
    """
    share = prompts[::processes]
    groups = batches(share, batch_size)
    _decoding(pipeline, groups[0], 0.0, diagnostics=diagnostics)  # to warm up
    spent, sampled, begin = 0.0, 0, pipeline.now()
    for group in groups:
        left = seconds - (pipeline.now() - begin)
        if sampled and left <= 0:
            break
        spent += _decoding(pipeline, group, left, diagnostics=diagnostics)
        sampled += len(group)
    each, picture = _picture_seconds(pipeline, len(groups[0]))
    absent = evaluator.absent()
    return Time(
        {
            "decoding": len(share) * spent / sampled,
            "image decoder": len(share) * each,
            "speed timing": _protocol_seconds(pipeline, prompts, protocol, seconds),
            "metrics": 0.0 if absent else _metric_seconds(pipeline, evaluator, prompts, picture),
        },
        f"{sampled} images",
        _excluded(absent),
        processes,
    )


def _excluded(absent: Sequence[str]) -> str:
    """What is not timed, if these networks of metrics are not on this machine."""
    rest = "start, downloads, reference images, bootstrap and report"
    names = ", ".join(absent)
    return f"{rest}; nor metrics, as weights of {names} are not on this machine" if names else rest


def _decoding(
    pipeline: Pipeline,
    batch: list[Prompt],
    limit: float,
    method: DecodingMethod | None = None,
    diagnostics: bool = False,
) -> float:
    """Seconds of a batch, text encoder included. Batches of continuous tokens, whose steps draw
    more and more tokens, are not broken off.
    """

    def decode(progress: Callable[[int, int], None]) -> object:
        return pipeline.tokens(batch, method, diagnostics=diagnostics, progress=progress)

    continuous = isinstance(pipeline.target, MARTarget)
    tokens = len(batch) * pipeline.target.length
    return batch_seconds(decode, tokens, pipeline.now, inf if continuous else limit)


def _picture_seconds(pipeline: Pipeline, count: int) -> tuple[float, Pictures]:
    """Seconds that the image decoder takes for an image, in a batch of this many blank ones, and
    the picture of one, uint8 [3, h, w].
    """
    tokens = blank_tokens(pipeline.target, count)
    pipeline.pictures(tokens[:1])
    begin = pipeline.now()
    pictures = pipeline.pictures(tokens)
    return (pipeline.now() - begin) / count, pictures[0]


def _metric_seconds(
    pipeline: Pipeline, evaluator: Evaluator, prompts: Sequence[Prompt], picture: Pictures
) -> float:
    """Seconds to load the metrics' networks, and to score all images as fast as a batch of this
    picture.
    """
    batch = prompts[:BATCH]
    pictures = np.stack([picture] * len(batch))
    total, begin = 0.0, pipeline.now()
    for networks in evaluator.load(pipeline.device):
        total += pipeline.now() - begin
        score_batch(networks, batch[:1], pictures[:1])  # to warm up
        begin = pipeline.now()
        score_batch(networks, batch, pictures)
        total += len(prompts) / len(batch) * (pipeline.now() - begin)
        begin = pipeline.now()
    return total


def _protocol_seconds(
    pipeline: Pipeline, prompts: Sequence[Prompt], protocol: SpeedProtocol, seconds: float
) -> float:
    """Seconds of `latency.measure` at all batch sizes: it decodes a batch by plain autoregression
    and by the method, and the first prompts by the method once more for the parts of a round.
    """
    if not protocol.prompts:
        return 0.0
    total, kinds = 0.0, timed_kinds(pipeline)
    for size in (1, *protocol.batches):
        batch = whole_batches(prompts, size, size)
        each = [_decoding(pipeline, batch, seconds, kind) for kind in kinds]
        most = protocol.prompts if size > 1 else min(protocol.prompts, len(prompts))
        warmup = protocol.warmup if size == 1 else 0
        clocked = min(most, CLOCKED) if size == 1 else 0
        total += (ceil(most / size) + warmup) * sum(each) + clocked * each[-1]
    return total
