"""The decoding loop: every discrete method is a drafter and an acceptance rule on one target.

All rounds are alike: the *root* of the first round is the last token of the prompt, so every image
token is emitted by a round, and plain autoregression is the empty draft. Rows advance and finish
independently; a row that has finished takes the next prompt. Every prompt has its own random
stream, so an image does not depend on its neighbours.

`rounds` yields every round; whoever wants to see one looks at it. `finished` yields the images as
they are completed, and `decode` all of them, with their trace.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding import verification
from tempera.decoding.checks import check_draft, check_parts, check_scores
from tempera.decoding.compiled import Buffers, Run, Settling, compiled, plain
from tempera.decoding.compiled import plain as unwrapped
from tempera.decoding.diagnostics import Diagnosed
from tempera.decoding.interfaces import Draft, Drafter, Round, Rule, Target, Verdict, Watcher
from tempera.decoding.random_streams import Draws, RandomStreams
from tempera.decoding.rows import Rows
from tempera.decoding.sequences import Sequences
from tempera.decoding.trace import Trace


@dataclass(frozen=True)
class Output:
    """Finished images: tokens int64 [B, T] with T = `target.length`, and their trace."""

    tokens: Tensor
    trace: Trace

    def cpu(self) -> "Output":
        """A copy on the host."""
        return Output(self.tokens.cpu(), self.trace.cpu())

    @classmethod
    def collected(cls, finished: "Iterable[tuple[list[int], Output]]") -> "Output":
        """All images of `finished`, in the order of the prompts."""
        numbers, outputs = zip(*finished, strict=True)
        order = torch.tensor([number for group in numbers for number in group]).argsort()
        tokens = torch.cat([output.tokens for output in outputs])
        trace = Trace.joined([output.trace for output in outputs])
        return cls(tokens[order.to(tokens.device)], trace.rows(order))


@torch.no_grad()
def rounds(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    streams: RandomStreams,
    prompts: Sequence[str],
    run: Run = plain,
    rows: int | None = None,
) -> Iterator[Round]:
    """Generate one image per prompt: Cool-SD, Algorithm 1, until every image is complete.

    Args:
        target: the model to accelerate.
        drafter: proposes tokens; `drafters.none.NoDraft` for plain autoregression.
        rule: the acceptance rule.
        streams: one stream of uniform draws per prompt, in the prompts' order.
        prompts: texts.
        run: wraps each part of a round, such as a clock. The parts are compiled if the target is,
            but for the two of a drafter that works on the host (`Drafter.compiles`).
        rows: B, how many images are decoded together; by default all.

    Yields:
        each round, which is valid until the next one is asked for.

    Raises:
        TemperaError: the target or the draft gave NaN, prompts and streams differ in number, or a
            prompt was refused; a prompt that is refused while others are decoded is told at the
            end.
    """
    check_parts(target, drafter, rule, rows)
    batch = _Rows(target, drafter, streams, prompts, rows)
    make: Run = partial(compiled, rounds=batch.settling) if target.compiled else plain
    own = make if drafter.compiles else plain
    does_observe = getattr(drafter.observe, "__func__", None) is not Drafter.observe
    while batch.begin():
        sequences = batch.sequences
        propose = run(own(drafter.propose, "draft"), "draft")
        score = run(make(target.score, "target"), "target")
        verify = run(make(verification.verify, "verify"), "verify")
        commit = run(make(MethodType(append, target), "commit"), "commit")
        observe = run((own if does_observe else plain)(drafter.observe, "commit"), "commit")
        while sequences.live:
            batch.settling.begin_round(rule, *[drafter] * drafter.compiles)
            u_draft, u_tests = batch.next_uniforms()
            is_first, longest = sequences.rounds == 0, batch.longest
            draft = propose(sequences, u_draft)  # 1-2: x̃ ~ q
            if is_first:
                check_draft(drafter, draft, target, sequences)
            draft = batch.in_place(draft)
            scores = score(draft, longest)  # 3-4: p after the root and every node
            if is_first:
                check_scores(target, rule, draft, scores, u_tests)
            verdict = verify(draft, scores, rule, sequences, u_tests)  # 5-16: accept, or resample
            sequences.check()
            report = commit(sequences, draft, verdict)  # 17
            sequences.tell(report, verdict.tokens.shape[1])
            observe(sequences, draft, verdict, scores)
            yield Round(sequences, draft, scores, verdict)
            batch.refill()


def append(target: Target, sequences: Sequences, draft: Draft, verdict: Verdict) -> Tensor:
    """Append a round's tokens and commit them; see `Sequences.append`."""
    report = sequences.append(verdict.tokens, verdict.accepted + 1, verdict.broken)
    sequences.record({"origin": verdict.origin, "logprob": verdict.logprob})
    target.commit(draft, verdict, sequences.emitted)
    return report


_buffers: WeakKeyDictionary[Target, Buffers] = WeakKeyDictionary()
"""Of targets whose rounds are compiled."""


class _Rows(Rows):
    """The rows of discrete tokens; for the arguments see `rounds`.

    Attributes:
        draws: of the rows.
        settling: of the rounds.
    """

    draws: Draws

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        streams: RandomStreams,
        prompts: Sequence[str],
        count: int | None,
    ) -> None:
        super().__init__(streams, prompts, count, fixed=target.compiled)
        self.target = target
        self.drafter = drafter
        self.settling = Settling()
        self._draft: Draft | None = None
        self.buffers = _buffers.setdefault(target, Buffers()) if target.compiled else Buffers()

    @override
    def new_sequences(self, rows: int) -> Sequences:
        device = self.streams.device
        if self.drafter.tree is not None:
            self.drafter.tree = self.drafter.tree.to(device)
        self.draws = Draws(self.streams, rows)
        drafter = self.drafter
        count = drafter.uniforms + drafter.nodes + 1
        self._uniforms = self.buffers.zeros("uniforms", (count, rows), torch.float64, device)
        self._split = self._uniforms.T.tensor_split([drafter.uniforms], dim=1)
        return Sequences(rows, self.target.length, drafter.depth, device, buffers=self.buffers)

    @property
    def longest(self) -> int:
        """See `Target.score`; one number for all compiled rounds."""
        return self.target.length if self.target.compiled else self.sequences.longest

    def next_uniforms(self) -> tuple[Tensor, ...]:
        """A round's draws for the draft, float64 [B, `drafter.uniforms`], and for the tests, [B,
        N + 1], which the next round overwrites.
        """
        self._uniforms.copy_(self.draws.next(len(self._uniforms)).T)
        return self._split

    @override
    def start(self, prompts: list[int], rows: Tensor | None) -> None:
        self.settling.begin_rows()
        texts = [self.prompts[prompt] for prompt in prompts]
        self.target.begin(texts, self.drafter.nodes, rows)
        uniforms = self.draws.begin(prompts, self.drafter.first_uniforms, rows)
        self.drafter.begin(texts, self.sequences, uniforms, rows)

    def in_place(self, draft: Draft) -> Draft:
        """A draft in memory that graphs know, also if its drafter works on the host: then it is the
        draft of the round before, if it differs in nothing but numbers.
        """
        if self.drafter.compiles or not self.target.compiled:
            return draft
        kept: dict[str, Any] = {
            name: self.buffers.copy(f"draft's {name}", value)
            for name, value in vars(draft).items()
            if isinstance(value, Tensor)
        }
        draft = replace(draft, **kept)
        last = self._draft
        if last is None or any(vars(last)[name] is not it for name, it in vars(draft).items()):
            self._draft = draft
        return self._draft or draft


class Recorder(Protocol):
    """A watcher that keeps what is to be known of images."""

    def __call__(self, round: Any, /) -> object:
        """Record a round."""

    def output(self, round: Any) -> Output:
        """The images that the last round completed."""


class Recording:
    """A `Recorder` of discrete tokens.

    Args:
        diagnosed: records also TV(p, q) and the terms of the bounds on TV and KL (costs passes over
            the vocabulary), or None.
    """

    def __init__(self, diagnosed: Diagnosed | None = None) -> None:
        self._diagnosed = diagnosed

    def __call__(self, round: Round) -> None:
        """Record a round."""
        if self._diagnosed is not None:
            self._diagnosed(round)

    def output(self, round: Round) -> Output:
        """The images that the last round completed, and their trace."""
        sequences = round.sequences
        done = torch.tensor(sequences.finished, device=sequences.device)
        names = [] if self._diagnosed is None else self._diagnosed.names
        recorded = sequences.recorded(["origin", "logprob", *names], done)
        return Output(
            sequences.tokens[done, : sequences.length], Trace.of(sequences.depth, recorded)
        )


def finished(
    rounds: Iterable[Any], recorder: Recorder, watch: Sequence[Watcher] = ()
) -> Iterator[tuple[list[int], Output]]:
    """Give each image away when it is complete.

    Args:
        rounds: of all images.
        recorder: records them.
        watch: called with each round after it, for progress, replays and measurements.

    Yields:
        after a round that completed images, the numbers of their prompts, and the images.
    """
    watchers: list[Watcher] = [recorder, *watch]
    for round in rounds:
        for watcher in watchers:
            watcher(round)
        if done := round.sequences.finished:
            yield round.sequences.prompts_of(done), recorder.output(round)


def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    streams: RandomStreams,
    prompts: Sequence[str],
    *,
    diagnostics: bool = False,
    watch: Sequence[Watcher] = (),
    run: Run = plain,
    rows: int | None = None,
) -> Output:
    """Generate one image per prompt, as `rounds` does; all images, in the order of the prompts.

    Args:
        target, drafter, rule, streams, prompts, run, rows: see `rounds`.
        diagnostics: also record what `tempera.decoding.diagnostics.Diagnosed` does.
        watch: see `finished`.

    Raises:
        TemperaError: see `rounds`.
    """
    recorder = Recording(Diagnosed(rule, target.compiled) if diagnostics else None)
    every_round = rounds(target, drafter, rule, streams, prompts, run, rows)
    return Output.collected(finished(every_round, recorder, watch))


class Decoding(ABC):
    """How a model's images are decoded, be their tokens discrete (`tempera.evaluation.pipeline`) or
    continuous (`tempera.continuous.loop`).
    """

    @property
    @abstractmethod
    def plain(self) -> "Decoding":
        """Plain autoregression, the baseline of speed-ups."""

    @property
    def is_plain(self) -> bool:
        """Whether this is plain autoregression."""
        return self == self.plain

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether images have the law of plain autoregression, whatever the draft."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What results depend on that no option says: `method` (the name to use without a preset),
        `draft` (the identity of its weights) and `branching` (the parents of the draft tree's
        nodes); the last two are None without a draft.
        """

    @abstractmethod
    def rounds(
        self,
        target: Any,
        streams: RandomStreams,
        prompts: Sequence[str],
        run: Run = unwrapped,
        rows: int | None = None,
    ) -> Iterator[Any]:
        """Generate one image per prompt, until every image is complete.

        Args:
            target: the model.
            streams: one random stream per prompt.
            prompts: texts.
            run: see `tempera.decoding.loop.rounds`.
            rows: B, how many images are decoded together; by default all.

        Raises:
            TemperaError: the numbers of prompts and streams differ, or a network gave NaN or
                infinity.
        """

    @abstractmethod
    def recorder(self, target: Any, diagnostics: bool) -> Recorder:
        """What records the rounds of a target; `diagnostics` as in `decode`."""

    def finished(
        self,
        target: Any,
        streams: RandomStreams,
        prompts: Sequence[str],
        *,
        diagnostics: bool = False,
        watch: Sequence[Watcher] = (),
        run: Run = unwrapped,
        rows: int | None = None,
    ) -> Iterator[tuple[list[int], Output]]:
        """The images of `rounds` as they are completed; see `tempera.decoding.loop.finished`."""
        every_round = self.rounds(target, streams, prompts, run, rows)
        return finished(every_round, self.recorder(target, diagnostics), watch)

    def decode(
        self, target: Any, streams: RandomStreams, prompts: Sequence[str], **options: Any
    ) -> Output:
        """All images of `finished`, in the order of the prompts."""
        return Output.collected(self.finished(target, streams, prompts, **options))
