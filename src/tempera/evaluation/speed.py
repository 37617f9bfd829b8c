"""The latency protocol: seconds per image at batch 1, after warm-up, device synchronised, plain autoregression and the method in turn.

Text encoder and image decoder are left out and reported apart. The speed-up is the median of the paired ratios. Where the time goes is
measured in a decode of its own, since its clock synchronises the device around each part.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.evaluation import bootstrap
from tempera.evaluation.painter import Method, Painter
from tempera.evaluation.store import Row, Store
from tempera.timing import Clock

PARTS = ("draft", "target", "verify", "commit")


@dataclass(frozen=True)
class SpeedProtocol:
    """How speed is measured.

    Args:
        prompts: how many prompts are timed, the first of the run; 0 leaves speed out.
        warmup: untimed images of each kind before the first timed one, once per process.
    """

    prompts: int = 8
    warmup: int = 1

    def __post_init__(self) -> None:
        if self.prompts < 0 or self.warmup < 0:
            raise TemperaError(f"speed.prompts={self.prompts} and speed.warmup={self.warmup} must not be negative: 0 leaves timing out.")


def measure(
    painter: Painter, prompts: Sequence[Prompt], store: Store, warmup: int = 1, progress: Callable[[Prompt], None] | None = None
) -> list[Row]:
    """Time each prompt that has no timing yet; returns the rows of all, in the prompts' order.

    A row holds `ar` and `method` (seconds; equal for plain autoregression, which is timed once), `text_encoder`, `image_decoder`, `rounds`,
    and under `part_<name>` the seconds of each part of the method in the clocked decode.
    """
    waiting = set(store.missing([prompt.id for prompt in prompts]))
    kinds = [painter.method] if painter.method.is_plain else [painter.method.plain, painter.method]
    if waiting:
        for _ in range(warmup):
            for kind in kinds:
                painter.pictures(painter.tokens([prompts[0]], kind).tokens)
    for place, prompt in enumerate(prompts):
        if prompt.id in waiting:
            store.add([_time_one(painter, prompt, kinds if place % 2 == 0 else kinds[::-1])])
            if progress is not None:
                progress(prompt)
    rows = store.rows()
    return [rows[prompt.id] for prompt in prompts]


def _time_one(painter: Painter, prompt: Prompt, kinds: Sequence[Method]) -> Row:
    """One timed image of each kind, in that order, then the clocked one."""
    seconds, outputs = {}, {}
    with painter.text_encoded([prompt]) as text_seconds:
        for kind in kinds:
            start = painter.now()
            name = "ar" if kind.is_plain else "method"
            outputs[name] = painter.tokens([prompt], kind)
            seconds[name] = painter.now() - start
        clock = Clock(painter.device)
        painter.tokens([prompt], clock=clock)
    output = outputs.get("method", outputs.get("ar"))
    assert output is not None
    start = painter.now()
    painter.pictures(output.tokens)
    return {
        "id": prompt.id,
        "ar": seconds["ar"],
        "method": seconds.get("method", seconds["ar"]),
        "text_encoder": text_seconds,
        "image_decoder": painter.now() - start,
        "rounds": int(output.trace.rounds[0]),
        **{f"part_{part}": clock.seconds.get(part, 0.0) for part in PARTS},
    }


def summary(rows: Sequence[Mapping[str, Any]], length: int, resamples: int = 1000) -> dict[str, Any]:
    """Medians with their interval and quartiles, and where the time goes.

    Returns:
        Under `latency_ar`, `latency` and `speedup` the median, its bootstrap interval and the quartiles `q25`, `q75`;
        under `efficiency` the speed-up ÷ accepted length of the timed images, 1 being the limit;
        under `parts` for each part its share of the clocked time and milliseconds a round; `text_encoder`, `image_decoder` median seconds.
    """
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0] if name != "id"}
    ratios = columns["ar"] / columns["method"]
    clocked = {part: columns[f"part_{part}"] for part in PARTS}
    total, rounds = sum(clocked.values()), columns["rounds"]
    return {
        "latency_ar": _spread(columns["ar"], resamples),
        "latency": _spread(columns["method"], resamples),
        "speedup": _spread(ratios, resamples),
        "efficiency": _spread(ratios / (length / rounds), resamples),
        "text_encoder": float(np.median(columns["text_encoder"])),
        "image_decoder": float(np.median(columns["image_decoder"])),
        "parts": {
            part: {"share": float(np.median(values / total)), "ms_per_round": float(np.median(1000 * values / rounds))}
            for part, values in clocked.items()
        },
    }


def _spread(values: bootstrap.Array, resamples: int) -> dict[str, float]:
    low, high = np.quantile(values, [0.25, 0.75])
    return {**bootstrap.median(values, resamples).as_dict(), "q25": float(low), "q75": float(high)}


def machine(device: torch.device) -> str:
    """What timings were taken on, as a file name: the GPU, or the number of CPU threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{torch.get_num_threads()}-threads"
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
