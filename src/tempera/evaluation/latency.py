"""The latency protocol: seconds per image at batch 1, after a warm-up, on a synchronised device,
for plain autoregression and the method in turn, or for plain autoregression once in a sweep. Larger
batches can be timed in the same way.

The text encoder and the image decoder are excluded and reported separately. The speed-up is the
median of the paired ratios. Separate decodes, of the first prompts, measure the parts of a round,
because their clock synchronises the device around each part.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Round
from tempera.decoding.loop import Output
from tempera.decoding.timing import PARTS, Clock
from tempera.decoding.verification import TokenRule, drafted_keep_probs
from tempera.evaluation.pipeline import DecodingMethod, Pipeline
from tempera.metrics import bootstrap
from tempera.metrics.bootstrap import Interval
from tempera.rules.neighbourhood import Lantern, LanternPP
from tempera.runtime.files import fingerprint
from tempera.runtime.processor import name_of
from tempera.runtime.row_store import Numbers, Row, Store

TEST = "test"
"""LANTERN's tests of drafted tokens, a part of `verify`."""
COLUMNS = {
    **dict.fromkeys(("ar", "method", "rounds"), Numbers(positive=True)),
    "text_encoder": Numbers(0),
    "image_decoder": Numbers(0, needed=False),
    "clocked": Numbers(0, needed=False),
    "load": Numbers(0, needed=False),
}
"""Columns of a timing, besides the parts of a round."""
PLAIN = {"ar": Numbers(positive=True)}
"""Columns of a timing of plain autoregression alone."""
AtLeast0 = Annotated[int, Field(ge=0)]
MOST = 10**6
"""Prompts that can be timed."""
CLOCKED = 2
"""Prompts whose parts of a round are measured. Their shares vary little between prompts."""


@dataclass(frozen=True)
class SpeedProtocol:
    """How speed is measured.

    Args:
        prompts: number of timed prompts, the first ones of the run; 0 skips timing.
        warmup: number of untimed images of each kind before the first timed one, per process; of
            larger batches only one.
        batches: larger batch sizes to time as well, that metrics have; each with the same number of
            prompts, rounded up to whole batches.
        paired: time plain autoregression in turn with each method; False: the jobs of a sweep time
            it once a model and machine. None: so in a sweep.
    """

    prompts: Annotated[int, Field(ge=0, le=MOST)]
    warmup: AtLeast0
    batches: list[Literal[8, 32, 128, 256]]
    paired: bool | None = None


def measure(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    store: Store,
    warmup: int = 1,
    progress: Callable[[Prompt], object] = lambda prompt: None,
    batch_size: int = 1,
    plain: Store | None = None,
) -> list[Row]:
    """Time each batch of prompts that has no timing in the store yet.

    Args:
        plain: timings of plain autoregression (`PLAIN`) that several methods share: what lacks
            there is timed and added, and not timed in turn with the method.

    Returns:
        One row per batch, in the prompts' order, under the id of its first prompt: seconds of `ar`
        and `method` (equal for plain autoregression, which is timed once), of `text_encoder` and
        `image_decoder`; `rounds` (mean over images); and for the first `CLOCKED` prompts at batch
        size 1, `clocked` (rounds of a decode with a clock) and `part_<name>` (seconds that each
        part of the method took in them). `load` is how many processes ran, our own among them.
    """
    groups = [
        list(prompts[first : first + batch_size]) for first in range(0, len(prompts), batch_size)
    ]
    waiting = set(store.missing([group[0].id for group in groups]))
    method = pipeline.method
    kinds = [method] if method.is_plain else [method.plain, method]
    if plain is not None and not method.is_plain and waiting:
        _share_plain(pipeline, [group for group in groups if group[0].id in waiting], plain, warmup)
        kinds = [method]
    shared = {} if plain is None else plain.rows()
    if waiting:
        for kind in warmup * kinds:
            _decoder_seconds(pipeline, pipeline.tokens(groups[0], kind), groups[0])
    for place, group in enumerate(groups):
        if group[0].id in waiting:
            turn = kinds if place % 2 == 0 else kinds[::-1]
            row = _time_one(pipeline, group, turn)
            if "ar" not in row:
                row["ar"] = shared[_name_of(group)]["ar"]
            elif plain is not None and _name_of(group) not in shared:
                plain.add([{"id": _name_of(group), "ar": row["ar"]}])
            if batch_size == 1 and place < CLOCKED:
                row |= _parts(pipeline, group)
            store.add([row])
            progress(group[0])
    rows = store.rows()
    return [rows[group[0].id] for group in groups]


def _share_plain(
    pipeline: Pipeline, groups: Sequence[list[Prompt]], plain: Store, warmup: int
) -> None:
    """Time plain autoregression of the batches that have no timing yet."""
    missing = set(plain.missing(map(_name_of, groups)))
    todo = [group for group in groups if _name_of(group) in missing]
    kind = pipeline.method.plain
    for group in todo[:1]:
        for _ in range(warmup):
            pipeline.tokens(group, kind)
    for group in todo:
        row = _time_one(pipeline, group, [kind])
        plain.add([{"id": _name_of(group), "ar": row["ar"]}])


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
        repetition, place = divmod(number, len(prompts))
        prompt = prompts[place]
        chosen.append(Prompt(f"{prompt.id}-again-{repetition}", prompt.text))
    return chosen


def _time_one(pipeline: Pipeline, prompts: list[Prompt], kinds: Sequence[DecodingMethod]) -> Row:
    """Time one batch of each kind, in this order."""
    seconds = {}
    outputs = {}
    with pipeline.text_encoded(prompts) as text_seconds:
        for kind in kinds:
            start = pipeline.now()
            name = "ar" if kind.is_plain else "method"
            outputs[name] = pipeline.tokens(prompts, kind)
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


def _parts(pipeline: Pipeline, prompts: list[Prompt]) -> Row:
    """Seconds of each part of the method's rounds, from a decode with clocks inside."""
    clock = Clock(pipeline.device)
    pipeline.tokens(prompts, run=clock)
    row: Row = {f"part_{part}": spent for part, spent in clock.seconds.items()}
    row["clocked"] = clock.rounds
    rule = getattr(pipeline.method, "rule", None)
    if isinstance(rule, Lantern | LanternPP):
        tests = _TestClock(pipeline, rule)
        pipeline.tokens(prompts, watch=[tests])
        row[f"part_{TEST}"] = tests.seconds
    return row


class _TestClock:
    """A watcher that tests the drafted tokens of every round again and adds up the seconds: of
    gathering the neighbours' probabilities, finding the sets A and adding up their mass.
    """

    def __init__(self, pipeline: Pipeline, rule: TokenRule) -> None:
        self.pipeline = pipeline
        self.rule = rule
        self.seconds = 0.0

    def __call__(self, round: Round) -> None:
        """After each round."""
        start = self.pipeline.now()
        drafted_keep_probs(round.draft, round.scores.p, self.rule)
        self.seconds += self.pipeline.now() - start


def speed(rows: Sequence[Mapping[str, Any]], length: int) -> dict[str, Interval]:
    """The metrics `latency_ar`, `latency`, `speedup` and `efficiency` (speed-up ÷ accepted length
    of the timed images of `length` tokens): medians.
    """
    ar = _column(rows, "ar")
    method = _column(rows, "method")
    rounds = _column(rows, "rounds")
    return {
        "latency_ar": bootstrap.median(ar),
        "latency": bootstrap.median(method),
        "speedup": bootstrap.median(ar / method),
        "efficiency": bootstrap.median(ar / method / (length / rounds)),
    }


def breakdown(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the time goes.

    Returns:
        `text_encoder` and `image_decoder`: median seconds. `parts`: for each part of a round its
        share of all clocked time and its median milliseconds per round. `test_ms`: the same of the
        rule's tests, a part of `verify`; NaN if they were not clocked. `load`: the most processes
        that ran, on how many `cores`.
    """
    clocked = [row for row in rows if row.get("clocked")]
    parts = {part: _column(clocked, f"part_{part}") for part in PARTS}
    tests = [
        1000 * row[f"part_{TEST}"] / row["clocked"] for row in clocked if f"part_{TEST}" in row
    ]
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
        "test_ms": float(np.median(tests)) if tests else math.nan,
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


def place_of(machine: str, batch_size: int) -> str:
    """The name of the directory of a machine's timings."""
    return machine if batch_size == 1 else f"{machine}-batch-{batch_size}"


def machine(device: torch.device) -> str:
    """The machine that was timed, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name_of(device))
