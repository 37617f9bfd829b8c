"""A model with a method: prompts in, pictures and their per-prompt records out."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.decoding.compiled import Run
from tempera.decoding.compiled import plain as unwrapped
from tempera.decoding.diagnostics import Diagnosed
from tempera.decoding.interfaces import (
    ACCEPTED,
    BONUS,
    Drafter,
    ImageModel,
    Round,
    Rule,
    Target,
    Watcher,
)
from tempera.decoding.loop import Decoding, Output, Recording, rounds
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.timing import now
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.image_tokenizers.interface import to_pictures
from tempera.rules.standard import Exact
from tempera.runtime.row_store import Numbers, Row, rows_of


class ImageDecoder(Protocol):
    """The decoding half of an image tokenizer. If it has `reads_prompts = True`, `decode_codes`
    takes the texts of the prompts, too.
    """

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, h, w], or vectors [B, h, w, D] -> images [B, 3, H, W] in [−1, 1]."""


@dataclass(frozen=True)
class NoPictures:
    """In place of an `ImageDecoder` where a model has none; `advice` says what to do."""

    advice: str

    @property
    def refusal(self) -> TemperaError:
        """The error for whoever asks for pictures."""
        return TemperaError(f"this model has no image decoder: {self.advice}")

    def decode_codes(self, codes: Tensor) -> Tensor:
        """See `ImageDecoder`.

        Raises:
            TemperaError: always.
        """
        raise self.refusal


@dataclass(frozen=True)
class Method(Decoding):
    """How discrete tokens are decoded: a drafter and a rule."""

    drafter: Drafter
    rule: Rule

    @cached_property
    @override
    def plain(self) -> "Method":
        return Method(NoDraft(), Exact())

    @property
    @override
    def is_plain(self) -> bool:
        return self.drafter.nodes == 0

    @property
    @override
    def exact(self) -> bool:
        return self.rule.exact

    @override
    def describe(self) -> dict[str, Any]:
        tree = self.drafter.tree
        return {
            "method": type(self.rule).__name__.lower(),
            "draft": self.drafter.identity,
            "branching": tree.parents.tolist() if tree is not None and tree.nodes else None,
        }

    @override
    def rounds(
        self,
        target: Target,
        streams: RandomStreams,
        prompts: Sequence[str],
        run: Run = unwrapped,
        rows: int | None = None,
    ) -> Iterator[Round]:
        return rounds(target, self.drafter, self.rule, streams, prompts, run, rows)

    @override
    def recorder(self, target: Target, diagnostics: bool) -> Recording:
        return Recording(Diagnosed(self.rule, target.compiled) if diagnostics else None)


@dataclass(frozen=True)
class Decoded:
    """Images that were completed in one round.

    Attributes:
        indices: of their prompts in the list that was decoded.
        prompts: their prompts.
        output: their tokens and trace.
        seconds: what each took, with its text encoder but not the image decoder: its shares of the
            time of its rounds, which the images that are decoded together share equally.
        batch: how many are decoded together at most.
    """

    indices: list[int]
    prompts: Sequence[Prompt]
    output: Output
    seconds: list[float]
    batch: int


@dataclass(frozen=True)
class Pipeline:
    """A target with a method, an image decoder and a seed."""

    target: ImageModel
    method: Decoding
    image_decoder: ImageDecoder
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    device: torch.device

    def streams(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> RandomStreams:
        """The random draws of prompts; `seeds` are of each, in place of the pipeline's."""
        ids = [prompt.id for prompt in prompts]
        return RandomStreams(self.seed if seeds is None else seeds, ids, self.device)

    def tokens(
        self,
        prompts: Sequence[Prompt],
        method: Decoding | None = None,
        *,
        seeds: Sequence[int] | None = None,
        diagnostics: bool = False,
        watch: Sequence[Watcher] = (),
        run: Run = unwrapped,
    ) -> Output:
        """Decode one image per prompt, by `method` or else by the pipeline's own.

        Args:
            seeds: of each prompt, in place of the pipeline's.
            diagnostics: of discrete tokens; see `decoding.loop.decode`. Others have none.
            watch, run: see `decoding.loop.decode`.
        """
        method = method or self.method
        target: Any = self.target
        texts = [prompt.text for prompt in prompts]
        streams = self.streams(prompts, seeds)
        return method.decode(target, streams, texts, diagnostics=diagnostics, watch=watch, run=run)

    def decoded(
        self,
        prompts: Sequence[Prompt],
        rows: int,
        *,
        seeds: Sequence[int] | None = None,
        diagnostics: bool = False,
        watch: Sequence[Watcher] = (),
    ) -> Iterator[Decoded]:
        """Decode one image per prompt, `rows` of them at a time, and take the time.

        Args:
            prompts: all prompts.
            rows: how many images are decoded together.
            seeds, diagnostics, watch: see `tokens`.

        Yields:
            the images as they are completed.
        """
        target: Any = self.target
        texts = [prompt.text for prompt in prompts]
        clock = _ImageClock()
        streams = self.streams(prompts, seeds)
        watchers: list[Watcher] = [clock, *watch]
        finished = self.method.finished(
            target, streams, texts, diagnostics=diagnostics, watch=watchers, rows=rows
        )
        for indices, output in finished:
            seconds = [clock.seconds.pop(index) for index in indices]
            done = [prompts[index] for index in indices]
            yield Decoded(indices, done, output, seconds, rows)
            clock.restart()

    def pictures(self, tokens: Tensor, prompts: Sequence[str] = ()) -> NDArray[np.uint8]:
        """Pictures of tokens and their prompts; see `pictures_of`."""
        return pictures_of(self.image_decoder, self.target.grid, self.device, tokens, prompts)

    def now(self) -> float:
        """The time in seconds, after all work on the device has finished."""
        return now(self.device)

    @contextmanager
    def text_encoded(self, prompts: Sequence[Prompt]) -> Iterator[float]:
        """Run the text encoder now, and reuse its output inside the `with` block so that timings
        exclude it. Yields the seconds that it took.
        """
        start = self.now()
        with self.target.encoded([prompt.text for prompt in prompts]):
            yield self.now() - start


@torch.no_grad()  # a decoder may keep tensors, and be trained later
def pictures_of(
    decoder: ImageDecoder,
    grid: tuple[int, int],
    device: torch.device,
    tokens: Tensor,
    prompts: Sequence[str] = (),
) -> NDArray[np.uint8]:
    """Tokens [B, T], or [B, T, D] with D channels -> pictures uint8 [B, 3, H, W], made of the last
    grid of tokens: a preview before it (`ModelSpec.preview`) is dropped. The decoder takes one
    image at a time: a picture does not depend on others, not even by rounding, and the activations
    of a large one take gigabytes. Where memory runs out it moves to the CPU.

    Args:
        decoder: makes the images.
        grid: rows and columns of an image's tokens.
        device: for a decoder without weights; others have their own.
        tokens: of the images.
        prompts: their texts, for a decoder that reads them.
    """
    codes = tokens[:, -math.prod(grid) :].unflatten(1, grid)
    alone = [slice(index, index + 1) for index in range(len(codes))]
    return np.concatenate([_decoded(decoder, device, codes[one], prompts[one]) for one in alone])


def _decoded(
    decoder: Any, device: torch.device, codes: Tensor, prompts: Sequence[str]
) -> NDArray[np.uint8]:
    """Pictures of codes [B, h, w, …]; see `pictures_of`."""
    if isinstance(decoder, nn.Module):
        indices = (weight.device for weight in decoder.parameters())
        device = next((index for index in indices if index.type != "meta"), device)  # offloaded
    try:
        texts = [prompts] if getattr(decoder, "reads_prompts", False) else []
        images: Tensor = decoder.decode_codes(codes.to(device), *texts)
        return to_pictures(images)
    except RuntimeError as problem:
        from accelerate.utils.memory import should_reduce_batch_size  # half a second to import

        if not should_reduce_batch_size(problem) or device.type == "cpu":
            raise
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"an image takes more memory than {device} has free: the CPU decodes the images.")
    decoder.to("cpu")
    return _decoded(decoder, device, codes, prompts)


class _ImageClock:
    """A watcher that shares the time of each round equally among the images that it decoded.

    Attributes:
        seconds: of each image so far, by the place of its prompt.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last round."""
        self._last = time.perf_counter()

    def __call__(self, round: Any) -> None:
        """After each round; the host waits for one that may have completed an image."""
        sequences = round.sequences
        _ = sequences.finished
        now = time.perf_counter()
        prompts = sequences.prompts_of(sequences.live)
        for prompt in prompts:
            share = (now - self._last) / len(prompts)
            self.seconds[prompt] = self.seconds.get(prompt, 0.0) + share
        self._last = now


class Progress:
    """A watcher that tells how many tokens rounds emitted, over all rows: of every round but the
    one that runs, and of all when an image is complete.

    Args:
        update: called with the number.
    """

    def __init__(self, update: Callable[[int], object]) -> None:
        self._update = update
        self._sequences: Any = None
        self._told = 0

    def __call__(self, round: Any) -> None:
        """After each round."""
        sequences = round.sequences
        _ = sequences.finished  # reads of rounds
        if sequences is not self._sequences:  # a new batch
            self._sequences = sequences
            self._told = 0
        self._update(sequences.known - self._told)
        self._told = sequences.known


def watchers(
    progress: Callable[[int], object] | None, callback: Watcher | None = None
) -> list[Watcher]:
    """What watches the rounds: `Progress` for the first, and the second as it is."""
    watch: list[Watcher] = [] if progress is None else [Progress(progress)]
    return watch if callback is None else [*watch, callback]


def progress_bar(description: str, tokens: int) -> "tqdm[Any]":
    """A bar of so many tokens, which goes when they are there."""
    return tqdm(desc=description, total=tokens, unit="token", unit_scale=True, leave=False)


BY_PLACE = "_by_place"
"""What ends the name of a record's column with a figure of the rule at each place of the image."""


def record_columns(length: int, vocab: int | None) -> dict[str, Numbers | None]:
    """The columns of `records` that every computation needs, as a target can have made them.

    Args:
        length: tokens of an image.
        vocab: number of different tokens; None for continuous ones.
    """
    tokens = (
        Numbers(length=length) if vocab is None else Numbers(0, vocab, whole=True, length=length)
    )
    return {
        "text": None,
        "tokens": tokens,
        "depth": Numbers(0, length + 1, whole=True, length=length),
        "rounds": Numbers(1, length + 1, whole=True),
        "tested": Numbers(0, whole=True),
        "tested_by_tenth": Numbers(0, whole=True),
        "accepted": Numbers(0, whole=True, at_most="tested"),
        "accepted_by_tenth": Numbers(0, whole=True, at_most="tested_by_tenth"),
        "accepted_length": Numbers(positive=True),
        "seconds": Numbers(positive=True),
        "memory": Numbers(0, whole=True, needed=False),
    }


def records(batch: Decoded) -> list[Row]:
    """One row per image; results.parquet and the pictures derive from them.

    Returns:
        Rows with, among others, `depth` (the depth of each token's accepted draft, 0 if the target
        drew the token), `…_by_tenth` (counts in each tenth of the image, in the order of decoding)
        and `…_by_place` (figures of the rule, NaN where it has none).
    """
    prompts = batch.prompts
    trace = batch.output.trace.cpu()
    columns: dict[str, list[Any]] = {
        "id": [prompt.id for prompt in prompts],
        "text": [prompt.text for prompt in prompts],
        **{name: values.double().tolist() for name, values in trace.summary().items()},
        "rounds": trace.rounds.tolist(),
        "batch": [batch.batch] * len(prompts),
        "seconds": batch.seconds,
        "tested": trace.tested.tolist(),
        "accepted": trace.accepted.tolist(),
        "tested_by_tenth": trace.by_tenth(trace.origin != BONUS).tolist(),
        "accepted_by_tenth": trace.by_tenth(trace.origin == ACCEPTED).tolist(),
        "depth": trace.depth.tolist(),
        "logprob_squares": trace.logprob.double().square().sum(-1).tolist(),
        "tokens": batch.output.tokens.cpu().tolist(),
    }
    for name, values in trace.figures.items():
        if not bool(values.isnan().all()):
            columns[name + BY_PLACE] = values.tolist()
    return rows_of(columns)
