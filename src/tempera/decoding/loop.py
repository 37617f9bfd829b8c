"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tempera.decoding.interfaces import (
    Draft,
    Drafter,
    JointRule,
    RoundState,
    Rule,
    Scores,
    StaticRounds,
    Target,
    Verdict,
)
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.round_graph import BatchSize, RoundGraphs
from tempera.decoding.running_trace import RunningTrace, put_flat
from tempera.decoding.timing import PartTimer, no_clock
from tempera.decoding.trace import Trace
from tempera.decoding.verification import verify
from tempera.errors import NaNProbabilities


@dataclass(frozen=True)
class Output:
    """Finished images: tokens int64 [B, T] with T = `target.length`, and their trace."""

    tokens: Tensor
    trace: Trace


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule | JointRule,
    streams: RandomStreams,
    prompts: list[str],
    *,
    diagnostics: bool = False,
    clock: PartTimer = no_clock,
    progress: Callable[[int, int], None] | None = None,
    graphs: RoundGraphs | None = None,
) -> Output:
    """Generate one image per prompt (Cool-SD, Algorithm 1, repeated until every image is complete).

    Args:
        target: the model to accelerate.
        drafter: proposes tokens; `drafters.none.NoDraft` for plain autoregression.
        rule: the acceptance rule.
        streams: one stream of uniform draws per prompt, in the prompts' order.
        prompts: texts, B of them.
        diagnostics: also record TV(p, q) and the terms of the bounds on TV and KL (costs passes
            over the vocabulary; see `tempera.decoding.diagnostics.diagnose`).
        clock: times the parts draft, target, verify and commit.
        progress: called after each round with (rounds so far, tokens so far over all rows).
        graphs: record whole rounds and replay them, if `drafter` has `StaticRounds`, and they can
            be timed if a clock is given. The images are the same.

    Raises:
        NaNProbabilities: the target or the draft gave NaN.
        TemperaError: prompts and streams differ in number.
    """
    streams.check(prompts)
    target.begin(prompts, drafter.nodes)
    drafter.begin(prompts)
    images = Images.blank(len(prompts), target.length, drafter.depth, streams.device, diagnostics)
    play = partial(play_round, target, drafter, rule, images)
    states = _states(target, drafter)
    if graphs is None or states is None or not graphs.can_time(clock):
        rounds = _rounds(partial(play, clock=clock), drafter, images, streams, clock)
    else:
        rounds = _recorded_rounds(graphs, play, drafter, rule, images, streams, states, clock)
    for number, written in enumerate(rounds, start=1):
        target.longest = images.longest
        if progress is not None:
            progress(number, written)
    return Output(images.tokens[:, : target.length], images.trace.finished())


def play_round(
    target: Target,
    drafter: Drafter,
    rule: Rule | JointRule,
    images: "Images",
    uniforms: Tensor,
    clock: PartTimer = no_clock,
) -> None:
    """One round: draft, score, verify, commit. `uniforms` float32 [B, U + N + 1], with U =
    `drafter.uniforms`.
    """
    with clock("draft"):
        draft = drafter.propose(uniforms[:, : drafter.uniforms])
    with clock("target"):
        scores = target.score(draft)
    with clock("verify"):
        verdict = verify(draft, scores.p, rule, uniforms[:, drafter.uniforms :], scores.soft)
    with clock("commit"):
        emitted = images.add(draft, verdict, scores, rule)
        target.commit(draft, verdict, emitted)
        drafter.observe(draft, verdict, scores, emitted)


class Images:
    """The images of a batch as far as they are decoded. Implements `interfaces.RoundState`.

    Args:
        tokens: int64 [B, T + 1 + L], with L the depth of drafts; the last 1 + L columns are for
            tokens past the image.
        lengths: tokens that each row has, int64 [B].
        trace: of these tokens.

    Attributes:
        report: what the host reads after a round: the lengths, twice, float32 [2, B].
            `report[0, b]` is NaN if the target, `report[1, b]` if the draft gave NaN for row b in
            this round.
    """

    report: Tensor

    def __init__(self, tokens: Tensor, lengths: Tensor, trace: RunningTrace) -> None:
        self.tokens, self.lengths, self.trace = tokens, lengths, trace
        width, most = tokens.shape[1], trace.max_depth + 1
        self.length = width - most
        self._known = [0] * len(tokens)
        # of a round's tokens in the flat memory of all rows
        starts = torch.arange(0, tokens.numel(), width, device=tokens.device)
        self._offsets = starts.unsqueeze(1) + torch.arange(most, device=tokens.device)

    @classmethod
    def blank(
        cls, batch: int, length: int, depth: int, device: torch.device, diagnostics: bool
    ) -> "Images":
        """Images without a token, for drafts of this depth."""
        return cls(
            torch.zeros(batch, length + 1 + depth, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            RunningTrace.blank(batch, length, depth, device, diagnostics),
        )

    @property
    def longest(self) -> int:
        """Tokens that the longest image had when the host last read."""
        return max(self._known)

    def add(self, draft: Draft, verdict: Verdict, scores: Scores, rule: Rule | JointRule) -> Tensor:
        """Add a round; returns how many tokens each row emits, see `Target.commit`."""
        emitted = torch.minimum(verdict.accepted + 1, self.length - self.lengths)
        # later rounds overwrite what follows the emitted tokens
        ahead = self._offsets[:, : verdict.tokens.shape[1]]
        slots = (self.lengths.unsqueeze(1) + ahead).flatten()
        put_flat(self.tokens, slots, verdict.tokens)
        self.trace.record(draft, verdict, scores, rule, slots)
        self.lengths += emitted
        # `probabilities`: a NaN makes the whole distribution NaN
        self.report = torch.empty(2, len(emitted), dtype=torch.float32, device=emitted.device)
        for row, health in enumerate((scores.p[..., 0].sum(-1), draft.health)):
            torch.add(self.lengths, health, alpha=0, out=self.report[row])
        return emitted

    def read(self, report: list[list[float]], ids: list[str]) -> tuple[int, int]:
        """The tokens so far over all rows, and of the longest row; raise NaNProbabilities after a
        NaN in a row that was not complete.
        """
        for who, numbers in zip(("target", "draft"), report, strict=True):
            for row, number in enumerate(numbers):
                if math.isnan(number) and self._known[row] < self.length:
                    raise NaNProbabilities(who, ids[row])
        self._known = [self.length if math.isnan(number) else int(number) for number in report[0]]
        return sum(self._known), max(self._known)

    def carried(self) -> tuple[Tensor, ...]:
        """Everything."""
        return self.tokens, self.lengths, self._offsets, *self.trace.tensors()

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """See `interfaces.RoundState`."""
        self.tokens, self.lengths, self._offsets, *columns = tensors
        self.trace = self.trace.with_tensors(columns)

    def expect(self, longest: int) -> None:
        """Depend on nothing else."""


def _states(target: Target, drafter: Drafter) -> tuple[RoundState, ...] | None:
    """What carries something from round to round; None if rounds cannot be recorded."""
    if not isinstance(target, RoundState) or not isinstance(drafter, StaticRounds):
        return None
    return None if drafter.states is None else (target, *drafter.states)


def _rounds(
    play: Callable[[Tensor], None],
    drafter: Drafter,
    images: Images,
    streams: RandomStreams,
    clock: PartTimer,
) -> Iterator[int]:
    """Play rounds until all images are complete; yields the tokens written so far. Of a round, the
    host reads the report alone.
    """
    written, total = 0, len(streams.ids) * images.length
    while written < total:
        play(streams.next(drafter.uniforms + drafter.nodes + 1))
        with clock("commit"):
            written, _ = images.read(images.report.tolist(), streams.ids)
        yield written


def _recorded_rounds(
    graphs: RoundGraphs,
    play: Callable[..., None],
    drafter: Drafter,
    rule: Rule | JointRule,
    images: Images,
    streams: RandomStreams,
    states: tuple[RoundState, ...],
    clock: PartTimer,
) -> Iterator[int]:
    """As `_rounds`, with recorded rounds."""

    def count() -> int:
        return drafter.uniforms + drafter.nodes + 1

    draws, first, rounds = streams.by_round(images.length, count), count(), 0

    def one_round(clock: PartTimer) -> Tensor:
        with clock("draft"):
            uniforms = draws.next()
        play(uniforms, clock=clock)
        return images.report

    def read(report: list[list[float]]) -> tuple[int, int]:
        return images.read(report, streams.ids)

    parts: list[RoundState] = [images, draws, *states]
    size = BatchSize(len(streams.ids), images.length, drafter.depth + 1)
    for written in graphs.play(one_round, read, parts, (drafter, rule), size, clock):
        rounds += 1
        yield written
    streams.skip(first + (rounds - 1) * count())
    images.carry([column.clone() for column in images.carried()])  # not the graphs' memory
