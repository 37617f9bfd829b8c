"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently.
"""

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
        tokens: int64 [B, T + 1]; the last column is for tokens past the image.
        lengths: tokens that each row has, int64 [B].
        faults: rows for which the target, and those for which the draft, has given NaN, bool
            [2, B].
        trace: with a spare column, as `tokens`.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, faults: Tensor, trace: Trace) -> None:
        self.tokens, self.lengths, self.faults, self.trace = tokens, lengths, faults, trace
        self.length = tokens.shape[1] - 1
        self._offsets = torch.arange(trace.max_depth + 1, device=tokens.device)

    @classmethod
    def blank(
        cls, batch: int, length: int, depth: int, device: torch.device, diagnostics: bool
    ) -> "Images":
        """Images without a token, for drafts of this depth."""
        return cls(
            torch.zeros(batch, length + 1, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(2, batch, dtype=torch.bool, device=device),
            Trace.blank(batch, length, depth, device, diagnostics),
        )

    def add(self, draft: Draft, verdict: Verdict, scores: Scores, rule: Rule | JointRule) -> Tensor:
        """Add a round; returns how many tokens each row emits, see `Target.commit`."""
        emitted = torch.minimum(verdict.accepted + 1, self.length - self.lengths)
        ahead = self._offsets[: verdict.tokens.shape[1]]
        places = self.lengths.unsqueeze(1) + ahead
        slots = torch.where(ahead < emitted.unsqueeze(1), places, self.length)
        self.tokens.scatter_(1, slots, verdict.tokens)
        self.trace.record(draft, verdict, scores, rule, slots)
        # `probabilities`: a NaN makes the whole distribution NaN
        sick = scores.p[..., 0].isnan().any(-1)
        both = torch.stack([sick, draft.sick if draft.tree.nodes else sick])
        self.faults |= both & (emitted > 0)
        self.lengths += emitted
        return emitted

    def written(self) -> Tensor:
        """Tokens so far over all rows, int64 []; -1 after a NaN."""
        return torch.where(self.faults.any(), -1, self.lengths.sum())

    def check(self, written: int, ids: list[str]) -> int:
        """The number of tokens; raise NaNProbabilities if it is -1."""
        if written < 0:
            who = "target" if bool(self.faults[0].any()) else "draft"
            raise NaNProbabilities(who, ids[int(self.faults.any(0).int().argmax())])
        return written

    def carried(self) -> tuple[Tensor, ...]:
        """Everything."""
        return self.tokens, self.lengths, self.faults, self._offsets, *self.trace.tensors()

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """See `interfaces.RoundState`."""
        self.tokens, self.lengths, self.faults, self._offsets, *columns = tensors
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
    """Play rounds until all images are complete; yields the tokens written so far, the one number
    that is read from the device in each round.
    """
    written, total = 0, len(streams.ids) * images.length
    while written < total:
        play(streams.next(drafter.uniforms + drafter.nodes + 1))
        with clock("commit"):
            written = images.check(int(images.written()), streams.ids)
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
        with clock("commit"):
            return torch.stack([images.written(), images.lengths.max()])

    parts: list[RoundState] = [images, draws, *states]
    size = BatchSize(len(streams.ids), images.length, drafter.depth + 1)
    for written in graphs.play(one_round, parts, (drafter, rule), size, clock):
        rounds += 1
        yield images.check(written, streams.ids)
    streams.skip(first + (rounds - 1) * count())
    images.carry([column.clone() for column in images.carried()])  # not the graphs' memory
