"""The latency protocol: seconds per image at batch 1, after warm-up, device synchronised, plain
autoregression and the method in turn. Larger batches, where they are asked for, are timed in the
same way, an image's share of each.

Text encoder and image decoder are left out and reported apart. The speed-up is the median of the
paired ratios. Where the time goes is measured in a decode of its own, since its clock synchronises
the device around each part.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.timing import Clock
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Decoding, Pipeline
from tempera.metrics import bootstrap
from tempera.metrics.table import BATCHES
from tempera.runtime.row_store import Row, Store

PARTS = ("draft", "target", "verify", "commit")


@dataclass(frozen=True)
class SpeedProtocol:
    """How speed is measured.

    Args:
        prompts: how many prompts are timed, the first of the run; 0 leaves speed out.
        warmup: untimed images of each kind before the first timed one, once per process.
        batches: sizes of larger batches to time as well, of `BATCHES`; in each so many prompts,
            rounded up to whole batches.
    """

    prompts: int = 8
    warmup: int = 1
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        unknown = [size for size in self.batches if size not in BATCHES]
        if unknown:
            raise TemperaError(
                f"speed.batches={unknown} cannot be timed: give sizes of "
                f"{', '.join(map(str, BATCHES))}."
            )
        if self.prompts < 0 or self.warmup < 0:
            raise TemperaError(
                f"speed.prompts={self.prompts} and speed.warmup={self.warmup} must not be "
                "negative: 0 leaves timing out."
            )


def measure(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    store: Store,
    warmup: int = 1,
    progress: Callable[[Prompt], None] | None = None,
    batch_size: int = 1,
) -> list[Row]:
    """Time each batch of prompts that has no timing yet; returns the rows of all, in the prompts'
    order, each under its first prompt's id.

    A row holds `ar` and `method` (seconds an image; equal for plain autoregression, which is timed
    once), `text_encoder`, `image_decoder`, `rounds` (mean of the images), and under `part_<name>`
    the seconds of each part of the method in the clocked decode.
    """
    groups = [
        list(prompts[first : first + batch_size]) for first in range(0, len(prompts), batch_size)
    ]
    waiting = set(store.missing([group[0].id for group in groups]))
    kinds = (
        [pipeline.method] if pipeline.method.is_plain else [pipeline.method.plain, pipeline.method]
    )
    if waiting:
        for _ in range(warmup):
            for kind in kinds:
                pipeline.pictures(pipeline.tokens(groups[0], kind).tokens)
    for place, group in enumerate(groups):
        if group[0].id in waiting:
            store.add([_time_one(pipeline, group, kinds if place % 2 == 0 else kinds[::-1])])
            if progress is not None:
                progress(group[0])
    rows = store.rows()
    return [rows[group[0].id] for group in groups]


def whole_batches(prompts: Sequence[Prompt], count: int, size: int) -> list[Prompt]:
    """At least `count` prompts in whole batches. Where there are not as many, they come again with
    other ids: other random draws.
    """
    wanted, there = -(-count // size) * size, len(prompts)
    again = [
        Prompt(f"{prompts[i % there].id}-again-{i // there}", prompts[i % there].text)
        for i in range(there, wanted)
    ]
    return [*prompts[:wanted], *again]


def _time_one(pipeline: Pipeline, prompts: list[Prompt], kinds: Sequence[Decoding]) -> Row:
    """One timed batch of each kind, in that order, then the clocked one."""
    seconds, outputs = {}, {}
    with pipeline.text_encoded(prompts) as text_seconds:
        for kind in kinds:
            start = pipeline.now()
            name = "ar" if kind.is_plain else "method"
            outputs[name] = pipeline.tokens(prompts, kind)
            seconds[name] = (pipeline.now() - start) / len(prompts)
        clock = Clock(pipeline.device)
        pipeline.tokens(prompts, clock=clock)
    output = outputs.get("method", outputs.get("ar"))
    assert output is not None
    start = pipeline.now()
    pipeline.pictures(output.tokens)
    return {
        "id": prompts[0].id,
        "ar": seconds["ar"],
        "method": seconds.get("method", seconds["ar"]),
        "text_encoder": text_seconds,
        "image_decoder": pipeline.now() - start,
        "rounds": output.trace.rounds.float().mean().item(),
        **{f"part_{part}": clock.seconds.get(part, 0.0) for part in PARTS},
    }


def summary(
    rows: Sequence[Mapping[str, Any]], length: int, resamples: int = 1000
) -> dict[str, Any]:
    """Medians with their interval and quartiles, and where the time goes.

    Returns:
        Under `latency_ar`, `latency` and `speedup` the median, its bootstrap interval and the
        quartiles `q25`, `q75`; under `efficiency` the speed-up ÷ accepted length of the timed
        images, 1 being the limit; under `parts` for each part its share of all clocked time and
        median milliseconds a round; `text_encoder`, `image_decoder` median seconds.
    """
    columns = {
        name: np.array([row[name] for row in rows], np.float64) for name in rows[0] if name != "id"
    }
    ratios = columns["ar"] / columns["method"]
    clocked = {part: columns[f"part_{part}"] for part in PARTS}
    total, rounds = np.sum(list(clocked.values())), columns["rounds"]
    return {
        "latency_ar": _spread(columns["ar"], resamples),
        "latency": _spread(columns["method"], resamples),
        "speedup": _spread(ratios, resamples),
        "efficiency": _spread(ratios / (length / rounds), resamples),
        "text_encoder": float(np.median(columns["text_encoder"])),
        "image_decoder": float(np.median(columns["image_decoder"])),
        "parts": {
            part: {
                "share": float(values.sum() / total),
                "ms_per_round": float(np.median(1000 * values / rounds)),
            }
            for part, values in clocked.items()
        },
    }


def batch_speedups(
    timings: Mapping[int, Sequence[Mapping[str, Any]]], resamples: int = 1000
) -> dict[str, Any]:
    """`speedup_<batch size>`: median and interval over the batches, as in `summary`."""
    ratios = {
        size: np.array([row["ar"] / row["method"] for row in rows], np.float64)
        for size, rows in timings.items()
        if rows
    }
    return {f"speedup_{size}": _spread(values, resamples) for size, values in ratios.items()}


def _spread(values: bootstrap.Array, resamples: int) -> dict[str, float]:
    low, high = np.quantile(values, [0.25, 0.75])
    return {**bootstrap.median(values, resamples).as_dict(), "q25": float(low), "q75": float(high)}


def machine(device: torch.device) -> str:
    """What timings were taken on, as a file name: the GPU, or the number of CPU threads."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}-{torch.get_num_threads()}-threads"
    )
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
