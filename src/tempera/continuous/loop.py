"""Decoding continuous tokens: MAR's parallel prediction in any number of steps, and continuous
speculative decoding (CSpD).

Every row decodes its tokens in its own random order; the first `known` places of the order have
tokens. A *step* is a forward pass of the target that emits tokens. Rows advance and finish
independently.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tempera.continuous.diffusion import Denoiser, DenoisingPath, Kernel, denoise_all
from tempera.continuous.noise import Noise
from tempera.continuous.rules import ContinuousVerdict, DensityRule, Proposal, Unfinished
from tempera.decoding.interfaces import ImageModel
from tempera.decoding.loop import Output
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.replay import DraftLog
from tempera.decoding.timing import PartTimer, no_clock
from tempera.decoding.trace import BONUS, Trace
from tempera.errors import EmptyDraft, NotADensityRule, TemperaError


@dataclass(frozen=True)
class Context:
    """The input of a network: R partly decoded sequences, several of which may belong to one image.

    Attributes:
        rows: image of each sequence, int64 [R].
        tokens: in decoding order, float32 [R, T, D]; undefined from `known` on.
        order: position in the image of each place of the order, int64 [R, T].
        known: number of decoded tokens, int64 [R].
        reach: upper bound of `known`, on the host.
    """

    rows: Tensor
    tokens: Tensor
    order: Tensor
    known: Tensor
    reach: int


class Model(ImageModel, Protocol):
    """A masked autoregressive model with a diffusion head: target or draft."""

    channels: int
    """D, channels of a token."""
    denoiser: Denoiser

    def begin(self, prompts: list[str]) -> None:
        """Start a batch with one image per prompt."""

    def conditions(self, context: Context, places: Tensor, after: Tensor) -> Tensor:
        """Conditions of the diffusion head for tokens to be drawn.

        Args:
            context: R sequences.
            places: places of the order to predict, not decoded yet, int64 [R, M].
            after: number of known tokens once they are emitted, which guidance may depend on,
                int64 [R, M].

        Returns:
            [R, M, C].
        """


@dataclass(kw_only=True)
class ContinuousTrace(Trace):
    """Record of a batch in decoding order: `place` and `origin` as in `Trace`. Continuous tokens
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

    @classmethod
    def begin(cls, order: Tensor, max_depth: int) -> "ContinuousTrace":
        """An empty record for images decoded in this order, int64 [B, T]."""
        none = torch.zeros_like(order)
        place, origin = (
            torch.zeros_like(order, dtype=dtype) for dtype in (torch.int16, torch.int8)
        )
        return cls(
            max_depth=max_depth,
            place=place,
            origin=origin,
            logprob=torch.zeros_like(order[:, :0]),
            order=order,
            trials=none,
            failures=none,
            passes=torch.zeros_like(order[:, 0]),
            proposed=none,
        )

    @property
    def depth(self) -> Tensor:
        """For each token of the image its place in the accepted draft, 0 for a token that the
        target drew, int16 [B, T].
        """
        return torch.zeros_like(self.place).scatter(1, self.order, super().depth)

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
        return {name: getattr(self, name) for name in ("place", "origin", "order", "proposed")}


class _Canvas:
    """The images of a batch as far as they are decoded.

    Args:
        model: the target, for its sizes.
        noise: the rows' random draws, the first of which are the orders of decoding.
        max_depth: L, most drafted tokens of a round.
        device: device of the images.

    Attributes:
        context: the decoded tokens, one sequence per image, R = B.
        trace: their record.
        faults: rows for which the target, and those for which the draft, has given NaN or infinity,
            bool [2, B].
    """

    def __init__(self, model: Model, noise: Noise, max_depth: int, device: torch.device) -> None:
        self.noise, self.length = noise, model.length
        order = noise.uniform(model.length).argsort(stable=True)
        rows = torch.arange(noise.batch, device=device)
        tokens = torch.zeros(noise.batch, model.length, model.channels, device=device)
        self.context = Context(rows, tokens, order, torch.zeros_like(rows), 0)
        self.trace = ContinuousTrace.begin(order, max_depth)
        self.faults = torch.zeros(2, noise.batch, dtype=torch.bool, device=device)

    def check(self, drafted: Tensor) -> None:
        """Note unfinished rows whose tokens so far, or else whose drafted ones, [B, M, D], are not
        finite; the next `look` raises. Drafts need a check of their own, because the target
        replaces those that are not finite.
        """
        known, new = (_finite(tokens) for tokens in (self.context.tokens, drafted))
        unfinished = self.context.known < self.length
        self.faults |= torch.stack([~known, known & ~new]) & unfinished

    def count_passes(self, sequences: int) -> None:
        """Note that the target runs on so many sequences for each unfinished row."""
        self.trace.passes += sequences * (self.context.known < self.length)

    def emit(self, verdict: ContinuousVerdict, proposed: int = 0) -> None:
        """Append each row's emitted tokens, up to the end of the image; the round drafted
        `proposed`.
        """
        context, count = self.context, verdict.tokens.shape[1]
        ahead = torch.arange(count, device=verdict.tokens.device)
        slots = context.known.unsqueeze(1) + ahead
        slots = torch.where(
            (ahead < verdict.emitted.unsqueeze(1)) & (slots < self.length), slots, self.length
        )

        def put(column: Tensor, values: Tensor) -> Tensor:
            spare = torch.cat([column, column[:, :1]], 1)  # for tokens past the image
            index = slots.view(*slots.shape, *[1] * (column.dim() - 2)).expand(values.shape)
            return spare.scatter(1, index, values.to(column.dtype))[:, :-1]

        trace = self.trace
        trace.place = put(trace.place, (1 + ahead).expand_as(slots))
        trace.origin = put(trace.origin, verdict.origin)
        trace.trials = put(trace.trials, verdict.trials)
        trace.failures = put(trace.failures, verdict.failures)
        trace.proposed = put(trace.proposed, torch.full_like(slots, proposed))
        known = (context.known + verdict.emitted).clamp(max=self.length)
        self.context = replace(context, tokens=put(context.tokens, verdict.tokens), known=known)

    def look(self, unfinished: Unfinished | None) -> tuple[int, list[int]]:
        """The number of tokens of the slowest row, and the rows of incomplete images that a rule
        has not finished. Also stores the number of tokens of the fastest row. This is the only host
        read of a round.

        Raises:
            TemperaError: target or draft gave NaN or infinity; the message names the prompt.
        """
        known = self.context.known
        slowest, fastest = known.aminmax()
        values = torch.stack([torch.where(self.faults.any(), -1, slowest), fastest])
        if unfinished is not None:
            values = torch.cat([values, unfinished.missing & (known < self.length)])
        least, most, *missing = values.tolist()
        if least < 0:
            row = int(self.faults.any(0).int().argmax())
            raise _not_finite("target" if self.faults[0, row] else "draft", self.noise.ids[row])
        self.context = replace(self.context, reach=int(most))
        return int(least), [row for row, waits in enumerate(missing) if waits]

    def images(self, who: str) -> Tensor:
        """The tokens in raster order, [B, T, D]; `who` drew them, the target or the draft.

        Raises:
            TemperaError: a token is not finite; the message names the prompt.
        """
        tokens = self.context.tokens
        sound = _finite(tokens)
        if not bool(sound.all()):
            raise _not_finite(who, self.noise.ids[int(sound.int().argmin())])
        return torch.zeros_like(tokens).scatter(
            1, self.context.order.unsqueeze(-1).expand_as(tokens), tokens
        )


def _finite(tokens: Tensor) -> Tensor:
    """Rows whose tokens [B, M, D] are all finite, bool [B]."""
    return tokens.isfinite().flatten(1).all(-1)


def _not_finite(who: str, prompt: str) -> TemperaError:
    return TemperaError(
        f"the {who} gave NaN or infinite tokens for prompt '{prompt}'; check its weights "
        "and the guidance, and try dtype=float32"
    )


class Decoding(ABC):
    """A decoding method for continuous tokens."""

    _drawn_by: ClassVar[str] = "target"

    @abstractmethod
    def depth(self, length: int) -> int:
        """Most drafted tokens of a round, for images of `length` tokens."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether this is the baseline for speed-ups."""

    @property
    def plain(self) -> "Parallel":
        """The baseline: the target alone, one token per step."""
        return Parallel()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The options that results depend on; see `tempera.evaluation.pipeline.DecodingMethod`."""

    @torch.no_grad()
    def decode(
        self,
        target: Model,
        streams: RandomStreams,
        prompts: list[str],
        diagnostics: bool = False,
        clock: PartTimer = no_clock,
        progress: Callable[[int, int], None] | None = None,
        drafts: DraftLog | None = None,
    ) -> Output:
        """Generate one image per prompt.

        Args:
            target: the target.
            streams: one random stream per prompt.
            prompts: B prompts.
            diagnostics: ignored: continuous tokens have none.
            clock: times the parts of a round.
            progress: called after each step with (steps so far, tokens so far over all rows, as if
                all were as slow as the slowest).
            drafts: stays empty: continuous tokens have no ids.

        Returns:
            tokens float32 [B, T, D] with their trace.

        Raises:
            TemperaError: the numbers of prompts and streams differ, or a draft does not fit the
                target.
        """
        streams.check(prompts)
        canvas = self._start(target, streams, prompts)
        for step, least in enumerate(self._steps(canvas, target, clock)):
            if progress is not None:
                progress(step + 1, least * len(prompts))
        return Output(canvas.images(self._drawn_by), canvas.trace)

    @torch.no_grad()
    def rehearse(self, target: Model, streams: RandomStreams, prompts: list[str]) -> None:
        """The step of `decode` that takes the most memory, with almost whole images; the host reads
        nothing of it.
        """
        canvas = self._start(target, streams, prompts)
        known = torch.full_like(canvas.context.known, target.length - 1)
        canvas.context = replace(canvas.context, known=known, reach=target.length - 1)
        self._largest_step(canvas, target)

    def _start(self, target: Model, streams: RandomStreams, prompts: list[str]) -> _Canvas:
        """Start the networks, on blank images."""
        self._begin(target, prompts)
        return _Canvas(target, Noise(streams), self.depth(target.length), streams.device)

    def _begin(self, target: Model, prompts: list[str]) -> None:
        """Start the networks."""
        target.begin(prompts)

    @abstractmethod
    def _largest_step(self, canvas: _Canvas, target: Model) -> None:
        """See `rehearse`."""

    @abstractmethod
    def _steps(self, canvas: _Canvas, target: Model, clock: PartTimer) -> Iterator[int]:
        """Decode step by step until all images are complete; yields the slowest row's number of
        tokens after each step.
        """


@dataclass(frozen=True)
class Parallel(Decoding):
    """MAR (Li et al. 2024): the target alone, in any number of steps. MaskGIT's cosine schedule
    sets how many tokens each step draws in parallel.

    With one token per step this is plain autoregression. With fewer steps the law is another one,
    because the tokens of a step are drawn independently of each other.

    Args:
        steps: 1 to the number of tokens of an image; None draws one token per step.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise TemperaError(f"steps={self.steps} makes no image; give 1 or more.")

    @override
    def depth(self, length: int) -> int:
        return 0

    @property
    @override
    def is_plain(self) -> bool:
        return self.steps is None

    def describe(self) -> dict[str, Any]:
        """See `Decoding`."""
        return {"method": "parallel", "draft": None, "verification": repr(self), "branching": None}

    def _steps(self, canvas: _Canvas, target: Model, clock: PartTimer) -> Iterator[int]:
        for count in counts(target.length, self.steps or target.length):
            canvas.count_passes(1)
            _predict(canvas, target, count, clock)
            yield canvas.context.reach

    def _largest_step(self, canvas: _Canvas, target: Model) -> None:
        most = max(counts(target.length, self.steps or target.length))
        _predict(canvas, target, most, no_clock)


@dataclass(frozen=True)
class DraftAlone(Decoding):
    """The draft's own images, which nothing verifies (CSpD, Figure 9).

    Args:
        drafter: the smaller model.
        steps: as in `Parallel`.
    """

    drafter: Model
    steps: int | None = None

    _drawn_by: ClassVar[str] = "draft"

    @override
    def depth(self, length: int) -> int:
        return 0

    @property
    @override
    def is_plain(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        """See `Decoding`."""
        return {
            "method": "draft",
            "draft": self.drafter.identity,
            "verification": None,
            "branching": None,
        }

    def _begin(self, target: Model, prompts: list[str]) -> None:
        _check_tokens(self.drafter, target)
        super()._begin(target, prompts)
        self.drafter.begin(prompts)

    def _steps(self, canvas: _Canvas, target: Model, clock: PartTimer) -> Iterator[int]:
        for count in counts(target.length, self.steps or target.length):
            _predict(canvas, self.drafter, count, clock)
            yield canvas.context.reach

    def _largest_step(self, canvas: _Canvas, target: Model) -> None:
        most = max(counts(target.length, self.steps or target.length))
        _predict(canvas, self.drafter, most, no_clock)


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
    gamma: int = 8
    prefill: float = 0.05
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise EmptyDraft(f"gamma={self.gamma}")
        if not 0 <= self.prefill < 1:
            raise TemperaError(
                f"prefill={self.prefill} is not a share of an image; give 0 or more, and less "
                "than 1."
            )
        if not isinstance(self.rule, DensityRule):
            raise NotADensityRule(type(self.rule).__name__)

    @override
    def depth(self, length: int) -> int:
        return sum(self._longest(length))

    def _longest(self, length: int) -> Sequence[int]:
        """The drafting steps of the round that drafts most, for images of `length` tokens."""
        sizes = counts(length, self.steps or length)
        drafts = (self.rule.drafted(known, self.gamma, sizes) for known in range(length))
        return max(drafts, key=sum)

    @property
    @override
    def is_plain(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        """See `Decoding`."""
        return {
            "method": type(self.rule).__name__.lower(),
            "draft": self.drafter.identity,
            "verification": repr(self.rule),
            "branching": None,
        }

    def _begin(self, target: Model, prompts: list[str]) -> None:
        self._check(target)
        super()._begin(target, prompts)
        self.drafter.begin(prompts)

    def _steps(self, canvas: _Canvas, target: Model, clock: PartTimer) -> Iterator[int]:
        sizes = counts(target.length, self.steps or target.length)
        for size in self.rule.prefilled(self.prefill, sizes):
            canvas.count_passes(1)
            _predict(canvas, target, size, clock)
            yield canvas.context.reach
        least = canvas.context.reach
        while least < target.length:
            least = self._round(canvas, target, self.rule.drafted(least, self.gamma, sizes), clock)
            yield least

    def _largest_step(self, canvas: _Canvas, target: Model) -> None:
        self._verified(canvas, target, self._longest(target.length), no_clock)

    def _round(self, canvas: _Canvas, target: Model, sizes: Sequence[int], clock: PartTimer) -> int:
        """Draft `sizes` tokens, one entry per drafting step; verify and append them. Returns the
        slowest row's number of tokens.
        """
        verdict = self._verified(canvas, target, sizes, clock)
        least, rows = canvas.look(verdict.unfinished)
        while rows and verdict.unfinished is not None:
            with clock("verify"):
                verdict = verdict.unfinished.go_on(rows)
            with clock("commit"):
                canvas.emit(verdict, sum(sizes))
            least, rows = canvas.look(verdict.unfinished)
        return least

    def _verified(
        self, canvas: _Canvas, target: Model, sizes: Sequence[int], clock: PartTimer
    ) -> ContinuousVerdict:
        """The first verdict of `_round`, whose tokens are appended."""
        canvas.noise.next_round()
        with clock("draft"):
            proposal = self._draft(canvas, sizes)
            canvas.check(proposal.path.token)
        canvas.count_passes(1 + sum(sizes) if self.rule.sees_drafts else 1)
        with clock("target"):
            conditions = self._conditions(canvas.context, proposal.path.token, target)
        with clock("verify"):
            verdict = self.rule.verify(proposal, target.denoiser, conditions, canvas.noise)
        with clock("commit"):
            canvas.emit(verdict, sum(sizes))
        return verdict

    def _draft(self, canvas: _Canvas, sizes: Sequence[int]) -> Proposal:
        """Draft `sizes` tokens, one entry per drafting step."""
        draft, context = self.drafter, canvas.context
        noise = canvas.noise.normal(sum(sizes), draft.denoiser.stages + 1, draft.channels)
        conditions, paths = [], []
        for size, drawn in zip(sizes, noise.split(list(sizes), 1), strict=True):
            places, _ = _next_places(context, size, draft.length)
            after = (context.known + size).unsqueeze(1).expand_as(places)
            conditions.append(draft.conditions(context, places, after))
            paths.append(denoise_all(draft.denoiser, conditions[-1], drawn))
            context = _with(context, paths[-1].token, draft.length)
        states = torch.cat([path.states for path in paths], 1)
        means, stds = (
            torch.cat(leaves, 1) for leaves in zip(*(path.kernels for path in paths), strict=True)
        )
        path = DenoisingPath(states, Kernel(means, stds))
        return Proposal(path, noise, draft.denoiser, torch.cat(conditions, 1))

    def _conditions(self, context: Context, drafted: Tensor, target: Model) -> Tensor:
        """The target's conditions for the drafted tokens [B, M, D] and, if the rule lets the target
        see drafts, for the token after them. Otherwise all have the guidance of the last one.
        """
        count = drafted.shape[1]
        if not self.rule.sees_drafts:
            places, after = _next_places(context, count, target.length)
            return target.conditions(context, places, after[:, -1:].expand_as(after))
        contexts, shown = [context], context
        for i in range(count):
            shown = _with(shown, drafted[:, i : i + 1], target.length)
            contexts.append(shown)
        stacked = _stack(contexts)
        conditions = target.conditions(stacked, *_next_places(stacked, 1, target.length))
        return conditions.view(len(contexts), len(drafted), -1).transpose(0, 1)

    def _check(self, target: Model) -> None:
        """Raise TemperaError unless draft and target have the same tokens and denoising steps."""
        _check_tokens(self.drafter, target)
        own, other = (model.denoiser for model in (self.drafter, target))
        if (own.stages, own.last_noise) != (other.stages, other.last_noise):
            raise TemperaError(
                "draft and target must have the same denoising steps; give both the same "
                "denoising_steps and last_noise."
            )


def _check_tokens(draft: Model, target: Model) -> None:
    """Raise TemperaError unless draft and target have the same tokens."""
    if draft.grid != target.grid:
        raise TemperaError(
            f"the draft generates {draft.grid[0]}×{draft.grid[1]} tokens and the target "
            f"{target.grid[0]}×{target.grid[1]}; "
            "take a draft of the target's family."
        )
    if draft.channels != target.channels:
        raise TemperaError(
            f"the draft's tokens have {draft.channels} channels and the target's "
            f"{target.channels}; "
            "take a draft that was trained with the same image tokenizer."
        )


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
    masked, taken = length, []
    for step in range(steps):
        share = math.cos(math.pi / 2 * (step + 1) / steps)
        left = max(1, min(masked - 1, math.floor(length * share))) if step < steps - 1 else 0
        taken.append(masked - left)
        masked = left
    return taken


def _predict(canvas: _Canvas, model: Model, count: int, clock: PartTimer) -> None:
    """One step of one model alone: draw the next `count` tokens; all rows have the same length."""
    context, stages = canvas.context, model.denoiser.stages
    with clock("target"):
        places, _ = _next_places(context, count, model.length)
        after = (context.known + count).unsqueeze(1).expand_as(places)
        conditions = model.conditions(context, places, after)
        noise = canvas.noise.normal(count, stages + 1, model.channels)
        tokens = denoise_all(model.denoiser, conditions, noise).token
    with clock("commit"):
        none = torch.zeros_like(places)
        canvas.emit(
            ContinuousVerdict(
                tokens,
                torch.full_like(places, BONUS),
                torch.full_like(context.known, count),
                none,
                none,
            )
        )
        canvas.context = replace(canvas.context, reach=context.reach + count)


def _next_places(context: Context, count: int, length: int) -> tuple[Tensor, Tensor]:
    """The next `count` places of the order, clamped to the last one, and the number of known tokens
    after each: int64 [R, count] each.
    """
    places = (context.known.unsqueeze(1) + torch.arange(count, device=context.known.device)).clamp(
        max=length - 1
    )
    return places, places + 1


def _with(context: Context, tokens: Tensor, length: int) -> Context:
    """The context with more known tokens, [R, M, D]; tokens past the image are dropped."""
    count = tokens.shape[1]
    places = context.known.unsqueeze(1) + torch.arange(count, device=tokens.device)
    spare = torch.cat([context.tokens, context.tokens[:, :1]], 1)  # for tokens past the image
    index = places.clamp(max=length).unsqueeze(-1).expand_as(tokens)
    return replace(
        context,
        tokens=spare.scatter(1, index, tokens)[:, :-1],
        known=(context.known + count).clamp(max=length),
        reach=min(context.reach + count, length),
    )


def _stack(contexts: list[Context]) -> Context:
    """Concatenate contexts along R."""
    rows, tokens, order, known = (
        torch.cat([getattr(c, name) for c in contexts])
        for name in ("rows", "tokens", "order", "known")
    )
    return Context(rows, tokens, order, known, max(c.reach for c in contexts))
