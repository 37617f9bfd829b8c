"""The latency protocol: seconds per image at batch 1, after a warm-up, on a synchronised device,
for plain autoregression and the method in turn, or for plain autoregression once in a sweep. Larger
batches can be timed in the same way.

Images differ in their tokens per round, which all images of a run tell, timed or not. What only a
clock tells is the efficiency: the time of AR's round ÷ that of the method's, which varies little
between images. It is the median of the timed pairs, whose number depends on the width of its
interval, never on its value. The speed-up is the efficiency × the accepted length of all images.

The text encoder and the image decoder are excluded and reported separately. A clock inside measures
the parts of a round of the first prompt. On a GPU it takes a separate decode, because it
synchronises the device around each part; elsewhere it takes microseconds of the timed one.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from tempera.data.prompts import Prompt
from tempera.decoding.compiled import plain as unwrapped
from tempera.decoding.loop import Decoding, Output
from tempera.decoding.timing import PARTS, Clock, is_awaited
from tempera.evaluation.pipeline import Pipeline
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Interval
from tempera.runtime.files import fingerprint
from tempera.runtime.processor import name_of
from tempera.runtime.row_store import Numbers, Row, Store

COLUMNS = {
    **dict.fromkeys(("ar", "method", "rounds"), Numbers(positive=True)),
    "text_encoder": Numbers(0),
    "image_decoder": Numbers(0, needed=False),
    "clocked": Numbers(0, needed=False),
    "load": Numbers(0, needed=False),
}
"""Columns of a timing, besides the parts of a round."""
PLAIN = {"ar": Numbers(positive=True), "load": Numbers(0, needed=False)}
"""Columns of a timing of plain autoregression alone."""
MOST = 10**6
"""Prompts that can be timed."""
LEAST = 5
"""Batches that are timed before the width of the interval counts. The interval of a median of five
is about their range, which holds the median with probability 1 − 2·2⁻⁵ = 0.94.
"""
CLOCKED = 1
"""Prompts whose parts of a round are measured. Their shares vary little between prompts."""
WARM = 3
"""Rounds that run before the first timing of each kind, unless they are compiled: a device's
libraries choose their kernels and take their memory when these are first called.
"""


@dataclass(frozen=True)
class SpeedProtocol:
    """How speed is measured.

    Args:
        prompts: most timed prompts, the first ones of the run; 0 skips timing.
        width: stop after `LEAST` prompts or more as soon as the 95% interval of the efficiency is
            at most this share of its value wide. None times all.
        batches: larger batch sizes to time as well, that metrics have; each with the same number of
            prompts, rounded up to whole batches.
        paired: time plain autoregression in turn with each method; False: the jobs of a sweep time
            it once a model and machine. None: so in a sweep.
    """

    prompts: Annotated[int, Field(ge=0, le=MOST)]
    width: Annotated[float, Field(gt=0)] | None
    batches: list[Literal[8, 32, 128, 256]]
    paired: bool | None = None


def measure(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    store: Store,
    width: float | None = None,
    progress: Callable[[Prompt], object] = lambda prompt: None,
    batch_size: int = 1,
    plain: Store | None = None,
) -> list[Row]:
    """Time batches of prompts that have no timing in the store yet, until what is timed suffices.

    Args:
        width: see `SpeedProtocol`.
        plain: timings of plain autoregression (`PLAIN`) that several methods share: what lacks
            there is timed in turn with the method and added.

    Returns:
        One row per timed batch, in the prompts' order, under the id of its first prompt: seconds of
        `ar` and `method` (equal for plain autoregression, which is timed once), of `text_encoder`
        and `image_decoder`; `rounds` (mean over images); and for the first `CLOCKED` prompts at
        batch size 1, `clocked` (rounds of a decode with a clock) and `part_<name>` (seconds that
        each part of the method took in them). `load` is how many processes ran, our own among them,
        also when what `plain` shares was timed.
    """
    groups = [
        list(prompts[first : first + batch_size]) for first in range(0, len(prompts), batch_size)
    ]
    known = store.rows()
    shared = {} if plain is None else plain.rows()
    warm = set[bool]()
    timed: list[Row] = []
    for index, group in enumerate(groups):
        row = known.get(group[0].id)
        if row is None:
            there = shared.get(_name_of(group), {})
            ar = there.get("ar")
            clock = Clock(pipeline.device) if batch_size == 1 and index < CLOCKED else None
            row = _timed(pipeline, group, ar, index, warm, clock)
            row["load"] = max(row["load"], there.get("load") or 0.0)
            if clock is not None:
                row |= _parts(pipeline, group, clock)
            if plain is not None and ar is None:
                plain.add([{"id": _name_of(group), "ar": row["ar"], "load": row["load"]}])
            store.add([row])
            progress(group[0])
        timed.append(row)
        if width is not None and _suffices(efficiency(timed, pipeline.target.length), width):
            break
    return timed


def _suffices(interval: Interval, width: float) -> bool:
    """Whether enough is timed, by the number of timings and the interval's width alone."""
    return interval.n >= LEAST and interval.high - interval.low <= width * interval.value


def _timed(
    pipeline: Pipeline,
    group: list[Prompt],
    ar: float | None,
    index: int,
    warm: set[bool],
    clock: Clock | None,
) -> Row:
    """Time a batch of the kinds that it lacks, which take turns in being the first.

    Args:
        ar: seconds of plain autoregression, if they are known.
        index: of the batch.
        warm: kinds that ran before, by whether they are plain; those that run now are added.
        clock: see `_time_one`.
    """
    method = pipeline.method
    kinds = [method] if method.is_plain or ar is not None else [method.plain, method]
    for kind in kinds:
        if kind.is_plain not in warm:
            _warm_up(pipeline, group, kind)
            warm.add(kind.is_plain)
    row = _time_one(pipeline, group, kinds if index % 2 == 0 else kinds[::-1], clock)
    return row if "ar" in row else row | {"ar": ar}


def _warm_up(pipeline: Pipeline, prompts: list[Prompt], kind: Decoding) -> None:
    """Run the first rounds untimed; where rounds are compiled, whole images."""
    if pipeline.target.compiled:
        pipeline.tokens(prompts, kind)
        return
    target: Any = pipeline.target
    texts = [prompt.text for prompt in prompts]
    for _ in islice(kind.rounds(target, pipeline.streams(prompts), texts), WARM):
        pass


def _name_of(group: Sequence[Prompt]) -> str:
    """A name of a batch of prompts, by their ids and texts."""
    return fingerprint({prompt.id: prompt.text for prompt in group})


def whole_batches(prompts: Sequence[Prompt], count: int, size: int) -> list[Prompt]:
    """At least `count` prompts, in whole batches. If there are too few, prompts repeat under new
    ids, with new random draws.
    """
    rounded = -(-count // size) * size
    chosen = list(prompts[:rounded])
    for number in range(len(prompts), rounded):
        repetition, index = divmod(number, len(prompts))
        prompt = prompts[index]
        chosen.append(Prompt(f"{prompt.id}-again-{repetition}", prompt.text))
    return chosen


def _time_one(
    pipeline: Pipeline, prompts: list[Prompt], kinds: Sequence[Decoding], clock: Clock | None
) -> Row:
    """Time one batch of each kind, in this order, the method with a clock inside where that
    synchronises nothing.
    """
    seconds = {}
    outputs = {}
    inside = None if is_awaited(pipeline.device) else clock
    with pipeline.text_encoded(prompts) as text_seconds:
        for kind in kinds:
            run = inside if inside is not None and kind is pipeline.method else unwrapped
            start = pipeline.now()
            name = "ar" if kind.is_plain else "method"
            outputs[name] = pipeline.tokens(prompts, kind, run=run)
            seconds[name] = pipeline.now() - start
    output = outputs.get("method") or outputs["ar"]
    if "ar" in seconds:
        seconds.setdefault("method", seconds["ar"])  # of plain autoregression, timed once
    return {
        "id": prompts[0].id,
        **seconds,
        "text_encoder": text_seconds,
        "image_decoder": _decoder_seconds(pipeline, output, prompts),
        "rounds": output.trace.rounds.float().mean().item(),
        "load": os.getloadavg()[0],
    }


def _decoder_seconds(pipeline: Pipeline, output: Output, prompts: list[Prompt]) -> float | None:
    """Seconds of the image decoder; None if it fails, which concerns pictures only."""
    start = pipeline.now()
    with suppress(Exception):
        pipeline.pictures(output.tokens, [prompt.text for prompt in prompts])
        return pipeline.now() - start
    return None


def _parts(pipeline: Pipeline, prompts: list[Prompt], clock: Clock) -> Row:
    """Seconds of each part of the method's rounds, from a decode with the clock inside: a separate
    one if it was in none yet.
    """
    if not clock.rounds:
        pipeline.tokens(prompts, run=clock)
    row: Row = {f"part_{part}": spent for part, spent in clock.seconds.items()}
    row["clocked"] = clock.rounds
    return row


def efficiency(rows: Sequence[Mapping[str, Any]], length: int) -> Interval:
    """Speed-up ÷ accepted length of timed images of `length` tokens: the median of the pairs."""
    speedups = _column(rows, "ar") / _column(rows, "method")
    return bootstrap.median(speedups / (length / _column(rows, "rounds")))


def speed(
    rows: Sequence[Mapping[str, Any]], length: int, accepted_length: Interval
) -> dict[str, Interval]:
    """The metrics `latency_ar` and `latency`, medians; `efficiency`; and `speedup`.

    Args:
        rows: timings at batch 1.
        length: tokens of an image.
        accepted_length: of all images, timed or not.
    """
    of_a_round = efficiency(rows, length)
    return {
        "latency_ar": bootstrap.median(_column(rows, "ar")),
        "latency": bootstrap.median(_column(rows, "method")),
        "speedup": bootstrap.product(of_a_round, accepted_length),
        "efficiency": of_a_round,
    }


def breakdown(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the time goes.

    Returns:
        `text_encoder` and `image_decoder`: median seconds. `parts`: for each part of a round its
        share of all clocked time and its median milliseconds per round. `load`: the most processes
        that ran, on how many `cores`.
    """
    clocked = [row for row in rows if row.get("clocked")]
    parts = {part: _column(clocked, f"part_{part}") for part in PARTS}
    total = np.sum(list(parts.values()))
    rounds = _column(clocked, "clocked")
    times = {}
    for part, seconds in parts.items():
        times[part] = {
            "share": float(seconds.sum() / total),
            "ms_per_round": float(np.median(1000 * seconds / rounds)),
        }
    return {
        "text_encoder": float(np.median(_column(rows, "text_encoder"))),
        "image_decoder": float(np.median(_column(rows, "image_decoder"))),
        "parts": times,
        "load": max((row.get("load") or 0.0 for row in rows), default=0.0),
        "cores": os.cpu_count() or 1,
    }


def batch_speedups(timings: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Interval]:
    """The metrics `speedup_<batch size>`: medians over batches."""
    metrics = {}
    for size, rows in timings.items():
        if rows:
            ratios = _column(rows, "ar") / _column(rows, "method")
            metrics[f"speedup_{size}"] = bootstrap.median(ratios)
    return metrics


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> bootstrap.Array:
    return np.array([row[name] for row in rows], np.float64)


def timing_name(machine: str, batch_size: int) -> str:
    """The name of the directory of a machine's timings."""
    return machine if batch_size == 1 else f"{machine}-batch-{batch_size}"


def machine(device: torch.device) -> str:
    """The machine that was timed, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name_of(device))
