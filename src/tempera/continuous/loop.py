"""Decoding continuous tokens: MAR's parallel prediction in any number of steps, and continuous
speculative decoding (CSpD, Algorithm 1: `Speculative.rounds`).

Every row decodes its tokens in its own random order; the first `lengths` places of the order have
tokens. A *round* is a pass of the target that emits tokens. Rows advance and finish independently.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from typing_extensions import override

from tempera.continuous.diffusion import Denoiser, DenoisingPath, Kernel, denoise
from tempera.continuous.noise import Noise, normal_of
from tempera.continuous.rules import ContinuousVerdict, DensityRule, Proposal
from tempera.decoding.compiled import Run
from tempera.decoding.compiled import plain as unwrapped
from tempera.decoding.interfaces import BONUS, ImageModel
from tempera.decoding.loop import Decoding, Output
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.rows import Rows
from tempera.decoding.sequences import Sequences
from tempera.decoding.trace import Trace
from tempera.errors import TemperaError


@dataclass(frozen=True)
class Context:
    """The input of a network: R partly decoded batch, several of which may belong to one image.

    Attributes:
        rows: image of each sequence, int64 [R].
        tokens: in decoding order, float32 [R, T or more, D]; undefined from `lengths` on.
        order: position in the image of each place of the order, int64 [R, T].
        lengths: number of decoded tokens, int64 [R].
        reach: upper bound of `lengths`, on the host.
    """

    rows: Tensor
    tokens: Tensor
    order: Tensor
    lengths: Tensor
    reach: int


class Model(ImageModel, Protocol):
    """A masked autoregressive model with a diffusion head: target or draft."""

    channels: int
    """D, channels of a token."""
    denoiser: Denoiser

    def begin(self, prompts: list[str], rows: Tensor | None) -> None:
        """Start one image per prompt: in a new batch, or in these rows of the running one, int64
        [M].
        """

    def conditions(self, context: Context, indices: Tensor, after: Tensor) -> Tensor:
        """Conditions of the diffusion head for tokens to be drawn.

        Args:
            context: R sequences.
            indices: places of the order to predict, not decoded yet, int64 [R, M].
            after: number of known tokens once they are emitted, which guidance may depend on,
                int64 [R, M].

        Returns:
            [R, M, C].
        """


@dataclass(kw_only=True)
class ContinuousTrace(Trace):
    """Record of a batch in decoding order: `step` and `origin` as in `Trace`. Continuous tokens
    have no probabilities.

    Attributes:
        order: position in the image of each place of the order, int64 [B, T].
        trials: proposals of the residual sampler for each token, int64 [B, T].
        failures: 1 if it gave up and the target drew the token instead, int64 [B, T].
        passes: sequences that the target's network ran on, int64 [B]: one per step of the target
            alone, one per context that a round verifies.
        proposed: how many tokens were drafted in the round that emitted it, int64 [B, T].
    """

    order: Tensor
    trials: Tensor
    failures: Tensor
    passes: Tensor
    proposed: Tensor

    @property
    def depth(self) -> Tensor:
        """For each token of the image its place in the accepted draft, 0 for a token that the
        target drew, int32 [B, T].
        """
        return torch.zeros_like(self.step).scatter(1, self.order, super().depth)

    def summary(self) -> dict[str, Tensor]:
        """Statistics by name, each float32 [B]."""
        return {
            "rounds": self.rounds.float(),
            "accepted_length": self.accepted_length,
            "tau": self.tau,
            "target_passes": self.passes.float(),
            "residual_trials": self.trials.sum(-1).float(),
            "residual_failures": self.failures.sum(-1).float(),
        }

    @override
    def columns(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("origin", "order", "proposed")}
        return {"place": self.step, **named}


@dataclass(frozen=True)
class ContinuousRound:
    """One round, as `Decoding.rounds` yields it: `interfaces.Round` for continuous tokens. It is
    valid until the next one is asked for.

    Attributes:
        sequences: all tokens so far, in the order of decoding.
        order: position in the image of each place of the order, int64 [B, T].
        draft: what was proposed; None if one model drew the tokens alone.
        scores: the target's conditions for the drafted tokens (`DensityRule.verify`); None without
            a draft.
        verdict: what was emitted.
        passes: sequences that the target's network ran on, per row.
    """

    sequences: Sequences
    order: Tensor
    draft: Proposal | None
    scores: Tensor | None
    verdict: ContinuousVerdict
    passes: int

    @property
    def tokens(self) -> Tensor:
        """The images so far in raster order, float32 [B, T, D]; 0 where there is no token yet."""
        sequences = self.sequences
        indices = torch.arange(sequences.length, device=sequences.device)
        written = (indices < sequences.lengths.unsqueeze(1)).unsqueeze(-1)
        tokens = torch.where(written, sequences.tokens[:, : sequences.length], 0.0)
        index = self.order.unsqueeze(-1).expand_as(tokens)
        return torch.zeros_like(tokens).scatter(1, index, tokens)


class ContinuousRecorded:
    """A watcher: what `ContinuousTrace` has of every token."""

    def __call__(self, round: ContinuousRound) -> None:
        """Record a round."""
        verdict = round.verdict
        origin = verdict.origin
        indices = torch.arange(1, 1 + origin.shape[1], dtype=torch.int32, device=origin.device)
        proposed = 0 if round.draft is None else round.draft.path.token.shape[1]
        columns = {
            "step": indices.expand_as(origin),
            "origin": origin,
            "trials": verdict.trials,
            "failures": verdict.failures,
            "proposed": torch.full_like(verdict.trials, proposed),
            "passes": torch.where(indices == 1, round.passes, 0).expand_as(verdict.trials),
        }
        round.sequences.record(columns)
        self.names = list(columns)

    def output(self, last: ContinuousRound) -> Output:
        """The tokens that the last round completed, [M, T, D], and their trace."""
        sequences = last.sequences
        done = torch.tensor(sequences.finished, device=sequences.device)
        columns: dict[str, Any] = sequences.recorded(self.names, done)
        order = last.order[done]
        passes = columns.pop("passes").sum(-1)
        trace = ContinuousTrace(
            max_depth=sequences.depth,
            logprob=torch.zeros_like(order[:, :0]),
            order=order,
            passes=passes,
            **columns,
        )
        return Output(last.tokens[done], trace)


class ContinuousRows(Rows):
    """The rows of a batch, each in a random order of its own.

    Args:
        models: the target, and a draft if there is one.
        streams, prompts, count: see `Rows`.
        depth: most drafted tokens of a round.
        prefill: tokens that the target draws alone at the beginning, one per step.
        who: draws the tokens that no draft is verified for, the target or the draft.

    Attributes:
        sequences: the decoded tokens, in the order of decoding.
        order: position in the image of each place of the order, int64 [B, T].
        noise: the rows' random draws, the first of which are the orders of decoding.
        started: rows that have begun, int64 [M], and the draws of their prefill, [M, ...];
            `prefilled` takes them.
    """

    order: Tensor
    noise: Noise
    started: list[tuple[Tensor, Tensor]]

    def __init__(
        self,
        models: Sequence[Model],
        streams: RandomStreams,
        prompts: Sequence[str],
        count: int | None = None,
        depth: int = 0,
        prefill: int = 0,
        who: str = "target",
    ) -> None:
        super().__init__(streams, prompts, count)
        self.models = models
        self.depth = depth
        self.prefill = prefill
        self.who = who

    @override
    def new_sequences(self, rows: int) -> Sequences:
        target = self.models[0]
        device = self.streams.device
        self.started = []  # of a batch that failed
        self.noise = Noise(self.streams, rows)
        self.order = torch.zeros(rows, target.length, dtype=torch.int64, device=device)
        return Sequences(rows, target.length, self.depth, device, target.channels)

    @override
    def start(self, prompts: list[int], rows: Tensor | None) -> None:
        target = self.models[0]
        for model in self.models:
            model.begin([self.prompts[prompt] for prompt in prompts], rows)
        steps = self.prefill, 1, target.denoiser.stages + 1, target.channels
        draws = self.noise.begin(prompts, target.length + math.prod(steps), rows)
        order, prefill = draws.tensor_split([target.length], 1)
        rows = torch.arange(len(prompts), device=self.order.device) if rows is None else rows
        self.order[rows] = order.argsort(stable=True)
        self.started.append((rows, normal_of(prefill.reshape(len(rows), *steps))))

    @property
    def context(self) -> Context:
        """All that is decoded, one sequence per image: R = B."""
        rows = torch.arange(len(self.order), device=self.order.device)
        sequences = self.sequences
        return Context(rows, sequences.tokens, self.order, sequences.lengths, max(sequences.counts))

    def drawn(self, model: Model, rows: Tensor, noise: Tensor, run: Run) -> ContinuousRound:
        """Append the next tokens of some rows, int64 [M], drawn by one model alone with noise [M,
        K, S + 1, D]. Other rows emit nothing.
        """
        whole = self.context
        tokens, order, lengths = (of[rows] for of in (whole.tokens, whole.order, whole.lengths))
        context = Context(rows, tokens, order, lengths, whole.reach)
        _, path = run(draw, "target")(model, context, noise)
        count = noise.shape[1]
        drawn = whole.tokens.new_zeros(len(whole.rows), count, model.channels)
        drawn[rows] = path.token
        zeros = torch.zeros_like(drawn[..., 0], dtype=torch.int64)
        origin = torch.full_like(zeros, BONUS, dtype=torch.int8)
        emitted = zeros[:, 0].index_fill(0, rows, count)
        verdict = ContinuousVerdict(drawn, origin, emitted, zeros, zeros)
        return self.append(verdict, passes=int(self.who == "target"))

    def alone(
        self, model: Model, sizes: Sequence[int], run: Run = unwrapped
    ) -> Iterator[ContinuousRound]:
        """The steps of one model alone in all rows, of so many tokens each."""
        rows = torch.arange(len(self.order), device=self.order.device)
        for size in sizes:
            noise = self.noise.normal(size, model.denoiser.stages + 1, model.channels)
            yield self.drawn(model, rows, noise, run)

    def prefilled(self, run: Run = unwrapped) -> Iterator[ContinuousRound]:
        """The steps that the target draws alone in the rows that have begun."""
        for rows, noise in self.started:
            for step in range(self.prefill):
                yield self.drawn(self.models[0], rows, noise[:, step], run)
        self.started.clear()

    def append(
        self,
        verdict: ContinuousVerdict,
        passes: int,
        draft: Proposal | None = None,
        scores: Tensor | None = None,
    ) -> ContinuousRound:
        """Append each row's emitted tokens, up to the end of the image. For the arguments see
        `ContinuousRound`.
        """
        sequences = self.sequences
        ahead = torch.arange(1, 1 + verdict.tokens.shape[1], device=sequences.device)
        counts = torch.minimum(verdict.emitted, sequences.length - sequences.lengths)
        undefined = ahead > counts.unsqueeze(1)
        broken = ~(verdict.tokens.isfinite().all(-1) | undefined).all(-1)
        if draft is not None:  # NaN in tokens that the target drew was found a round ago
            by_draft = ~draft.path.token.isfinite().flatten(1).all(-1)
            broken = torch.stack([broken & ~by_draft, by_draft])
        elif self.who == "target":
            broken = torch.stack([broken, torch.zeros_like(broken)])
        else:
            broken = torch.stack([torch.zeros_like(broken), broken])
        sequences.check()
        report = sequences.append(verdict.tokens, counts, broken)
        sequences.tell(report, verdict.tokens.shape[1])
        return ContinuousRound(sequences, self.order, draft, scores, verdict, passes)


@dataclass(frozen=True)
class Parallel(Decoding):
    """MAR (Li et al. 2024): one network alone, in any number of steps. MaskGIT's cosine schedule
    sets how many tokens each step draws in parallel.

    With one token per step this is plain autoregression. With fewer steps the law is another one,
    because the tokens of a step are drawn independently of each other.

    Args:
        steps: 1 to the number of tokens of an image; None draws one token per step.
        model: a draft that draws the images in the target's place, without verification (CSpD,
            Figure 9); None is the target.
    """

    steps: PositiveInt | None = None
    model: Model | None = field(default=None, repr=False)

    @property
    @override
    def plain(self) -> "Parallel":
        """The target alone, one token per step."""
        return Parallel()

    @property
    @override
    def exact(self) -> bool:
        """With one token per step of the target."""
        return self.is_plain

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "method": "parallel" if self.model is None else "draft",
            "draft": None if self.model is None else self.model.identity,
            "branching": None,
        }

    @override
    def recorder(self, target: Model, diagnostics: bool) -> ContinuousRecorded:
        """There are no diagnostics."""
        return ContinuousRecorded()

    @override
    @torch.no_grad()
    def rounds(
        self,
        target: Model,
        streams: RandomStreams,
        prompts: Sequence[str],
        run: Run = unwrapped,
        rows: int | None = None,
    ) -> Iterator[ContinuousRound]:
        """A round is a step."""
        model = self.model or target
        who = "target" if self.model is None else "draft"
        batch = ContinuousRows([target, model], streams, prompts, rows, who=who)
        sizes = counts(target.length, self.steps or target.length)
        while batch.begin():
            yield from batch.alone(model, sizes, run)
            batch.refill()


def draft_alone(drafter: Model, steps: int | None = None) -> Parallel:
    """The draft's own images, which nothing verifies."""
    return Parallel(steps, drafter)


@dataclass(frozen=True)
class Speculative(Decoding):
    """Continuous speculative decoding (CSpD, Algorithm 1): a smaller model drafts γ steps, and the
    target verifies all their tokens at once.

    Args:
        drafter: the smaller model.
        rule: the acceptance rule (`tempera.continuous.rules`).
        gamma: drafting steps per round, γ.
        prefill: share of an image that the target draws alone first, 0 ≤ `prefill` < 1.
        steps: drafting steps per image, each of which drafts several tokens in parallel (64 for 256
            tokens in the public code); None drafts one token per step.
    """

    drafter: Model
    rule: DensityRule
    gamma: PositiveInt = 8
    prefill: Annotated[float, Field(ge=0, lt=1)] = 0.05
    steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, DensityRule):
            raise TemperaError(
                f"{type(self.rule).__name__} is not a rule for continuous tokens: choose "
                "rule=density or coupling",
                option="rule",
            )

    @property
    @override
    def plain(self) -> Parallel:
        """The target alone, one token per step."""
        return Parallel()

    @property
    @override
    def exact(self) -> bool:
        return self.rule.exact

    def prefilled(self, length: int) -> list[int]:
        """Tokens of each step of the target alone before the first round: one per step."""
        return [1] * math.ceil(self.prefill * length)

    def ahead(self, length: int) -> list[int]:
        """Tokens of each drafting step of a round: the mean size, rounded up, γ times, but not more
        often than an image has steps.
        """
        steps = self.steps or length
        return [math.ceil(length / steps)] * min(self.gamma, steps)

    def depth(self, length: int) -> int:
        """L, most drafted tokens of a round, for images of `length` tokens."""
        return sum(self.ahead(length))

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "method": type(self.rule).__name__.lower(),
            "draft": self.drafter.identity,
            "branching": None,
        }

    @override
    def recorder(self, target: Model, diagnostics: bool) -> ContinuousRecorded:
        """There are no diagnostics."""
        return ContinuousRecorded()

    @override
    @torch.no_grad()
    def rounds(
        self,
        target: Model,
        streams: RandomStreams,
        prompts: Sequence[str],
        run: Run = unwrapped,
        rows: int | None = None,
    ) -> Iterator[ContinuousRound]:
        """CSpD, Algorithm 1."""
        length = target.length
        batch = ContinuousRows(
            [target, self.drafter],
            streams,
            prompts,
            rows,
            depth=self.depth(length),
            prefill=len(self.prefilled(length)),
        )
        ahead = self.ahead(length)
        proposed = run(propose, "draft")
        scored = run(score, "target")
        verified = run(self.rule.verify, "verify")
        while batch.begin():
            yield from batch.prefilled()
            while batch.sequences.live:
                noise = batch.noise
                noise.next_round()
                context = batch.context
                draft = proposed(self.drafter, context, ahead, noise)  # x̃ ~ q
                scores = scored(target, context, draft.path.token)  # of p at the drafts
                verdict = verified(draft, target.denoiser, scores, noise)  # or resample
                yield batch.append(verdict, 1 + sum(ahead), draft, scores)
                batch.refill()
                yield from batch.prefilled()


def counts(length: int, steps: int) -> list[int]:
    """Tokens that each of `steps` steps draws: MaskGIT's cosine schedule as in MAR, at least one
    per step.

    Raises:
        TemperaError: there are more steps than tokens.
    """
    if steps > length:
        raise TemperaError(
            f"steps={steps} is more than the {length} tokens of an image; give 1 to {length}."
        )
    drawn = []
    masked = length
    for step in range(steps):
        share = math.cos(math.pi / 2 * (step + 1) / steps)
        still_masked = max(0, min(masked - 1, math.floor(length * share)))
        drawn.append(masked - still_masked)
        masked = still_masked
    return drawn


def propose(draft: Model, context: Context, sizes: Sequence[int], noise: Noise) -> Proposal:
    """Draft `sizes` tokens, one entry per drafting step."""
    drawn = noise.normal(sum(sizes), draft.denoiser.stages + 1, draft.channels)
    conditions = []
    paths = []
    for part in drawn.split(list(sizes), dim=1):
        condition, path = draw(draft, context, part)
        conditions.append(condition)
        paths.append(path)
        context = _with(context, path.token, draft.length)
    means = torch.cat([path.kernels.mean for path in paths], dim=1)
    stds = torch.cat([path.kernels.std for path in paths], dim=1)
    states = torch.cat([path.states for path in paths], dim=1)
    path = DenoisingPath(states, Kernel(means, stds))
    return Proposal(path, drawn, draft.denoiser, torch.cat(conditions, dim=1))


def score(target: Model, context: Context, drafted: Tensor) -> Tensor:
    """The target's conditions for the drafted tokens [B, M, D], each after those before it, and for
    the token after them: [B, M + 1, C].
    """
    count = drafted.shape[1]
    # one context after each number of drafts; tokens are undefined from its `lengths` on
    after_all = _with(context, drafted, target.length)
    ahead = torch.arange(1 + count, device=drafted.device).unsqueeze(1)
    stacked = Context(
        rows=after_all.rows.repeat(1 + count),
        tokens=after_all.tokens.repeat(1 + count, 1, 1),
        order=after_all.order.repeat(1 + count, 1),
        lengths=(context.lengths + ahead).clamp(max=target.length).flatten(),
        reach=after_all.reach,
    )
    indices = next_indices(stacked, 1, target.length)
    conditions = target.conditions(stacked, indices, indices + 1)
    return conditions.view(1 + count, len(drafted), -1).transpose(0, 1)


def draw(model: Model, context: Context, drawn: Tensor) -> tuple[Tensor, DenoisingPath]:
    """Draw the next M tokens independently of each other, with noise [B, M, S + 1, D]: their
    conditions, [B, M, C], and paths.
    """
    indices = next_indices(context, drawn.shape[1], model.length)
    after = (context.lengths + drawn.shape[1]).unsqueeze(1).expand_as(indices)
    conditions = model.conditions(context, indices, after)
    return conditions, denoise(model.denoiser, conditions, drawn)


def next_indices(context: Context, count: int, length: int) -> Tensor:
    """The next `count` places of the order, clamped to the last one, int64 [R, count]."""
    ahead = torch.arange(count, device=context.lengths.device)
    return (context.lengths.unsqueeze(1) + ahead).clamp(max=length - 1)


def _with(context: Context, tokens: Tensor, length: int) -> Context:
    """The context with more known tokens, [R, M, D]; tokens past the image are not known."""
    count = tokens.shape[1]
    slots = context.lengths.unsqueeze(1) + torch.arange(count, device=tokens.device)
    return replace(
        context,
        tokens=context.tokens.scatter(1, slots.unsqueeze(-1).expand_as(tokens), tokens),
        lengths=(context.lengths + count).clamp(max=length),
        reach=min(context.reach + count, length),
    )
