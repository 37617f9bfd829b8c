"""Decoding continuous tokens: MAR's parallel prediction in any number of steps, and continuous
speculative decoding (CSpD).

Every row decodes its tokens in its own random order; the first `known` places of the order have
tokens. A *step* is a forward pass of the target that emits tokens. Rows advance and finish
independently.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tempera.continuous.diffusion import Denoiser, DenoisingPath, Kernel, denoise_all
from tempera.continuous.noise import Noise
from tempera.continuous.rules import ContinuousVerdict, DensityRule, Proposal
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
        tokens: in decoding order, float32 [R, T or more, D]; undefined from `known` on.
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


class _Images:
    """The images of a batch as far as they are decoded, in buffers that rounds write in place.

    Args:
        model: the target, for its sizes.
        noise: the rows' random draws, the first of which are the orders of decoding.
        depth: most drafted tokens of a round.
        device: device of the images.

    Attributes:
        context: the decoded tokens, one sequence per image, R = B.
        columns: of the trace, [B, T + 1 + L].
        passes: see `ContinuousTrace`.
        sound: rows for which the drafts of the last round were finite, bool [B].
    """

    def __init__(self, model: Model, noise: Noise, depth: int, device: torch.device) -> None:
        self.ids, self.length, self.depth = noise.ids, model.length, depth
        order = noise.uniform(model.length).argsort(stable=True)
        rows = torch.arange(noise.batch, device=device)
        width = model.length + 1 + depth  # the last columns are for tokens past the image
        tokens = torch.zeros(noise.batch, width, model.channels, device=device)
        self.context = Context(rows, tokens, order, torch.zeros_like(rows), 0)
        dtypes = {"place": torch.int16, "origin": torch.int8}
        self.columns = {
            name: torch.zeros(
                noise.batch, width, dtype=dtypes.get(name, torch.int64), device=device
            )
            for name in ("place", "origin", "trials", "failures", "proposed")
        }
        self.passes, self.sound = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)

    def append(
        self, verdict: ContinuousVerdict, passes: int, drafted: Tensor | None = None
    ) -> None:
        """Append each row's emitted tokens, up to the end of the image.

        Args:
            verdict: of the round.
            passes: sequences that the target ran on, per row.
            drafted: the drafted tokens, [B, M, D], if a draft was verified.
        """
        context, count = self.context, verdict.tokens.shape[1]
        unfinished = context.known < self.length
        if drafted is not None:  # NaN in tokens that the target drew reaches the drafts
            finite = drafted.isfinite().flatten(1).all(-1)
            self.sound = finite | ~unfinished | ~self._finite()
        ahead = torch.arange(1, 1 + count, device=context.known.device)
        slots = context.known.unsqueeze(1) + ahead - 1
        # later rounds overwrite what follows the emitted tokens
        context.tokens.scatter_(1, slots.unsqueeze(-1).expand_as(verdict.tokens), verdict.tokens)
        proposed = torch.full_like(slots, 0 if drafted is None else drafted.shape[1])
        values = (ahead.expand_as(slots), *verdict[1:2], *verdict[3:], proposed)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.scatter_(1, slots, value.to(column.dtype))
        self.passes += passes * unfinished
        known = (context.known + verdict.emitted).clamp(max=self.length)
        reach = min(context.reach + count, self.length)
        self.context = replace(context, known=known, reach=reach)

    def least(self) -> int:
        """The number of tokens of the slowest row: the host read that ends a round.

        Raises:
            TemperaError: target or draft gave NaN or infinity; the message names the prompt.
        """
        known, *sound = torch.stack([self.context.known, self.sound, self._finite()]).tolist()
        self._check(dict(zip(("draft", "target"), sound, strict=True)))
        self.context = replace(self.context, reach=max(known))
        return int(min(known))

    def output(self, who: str) -> Output:
        """The tokens in raster order, [B, T, D], and their trace; `who` drew them, the target or
        the draft.

        Raises:
            TemperaError: a token is not finite; the message names the prompt.
        """
        self._check({who: self._finite().tolist()})
        tokens, order = self.context.tokens[:, : self.length], self.context.order
        trace = ContinuousTrace(
            max_depth=self.depth,
            logprob=torch.zeros_like(order[:, :0]),
            order=order,
            passes=self.passes,
            **{name: column[:, : self.length] for name, column in self.columns.items()},
        )
        index = order.unsqueeze(-1).expand_as(tokens)
        return Output(torch.zeros_like(tokens).scatter(1, index, tokens), trace)

    def _finite(self) -> Tensor:
        """Rows whose tokens are all finite, bool [B]."""
        tokens, known = self.context.tokens, self.context.known.unsqueeze(1)
        undefined = torch.arange(tokens.shape[1], device=tokens.device) >= known
        return (tokens.isfinite().all(-1) | undefined).all(-1)

    def _check(self, sound: dict[str, list[Any]]) -> None:
        for who, rows in sound.items():
            for name, fine in zip(self.ids, rows, strict=True):
                if not fine:
                    raise TemperaError(
                        f"the {who} gave NaN or infinite tokens for prompt '{name}'; check its "
                        "weights and the guidance, and try dtype=float32"
                    )


@dataclass(frozen=True)
class Parallel:
    """MAR (Li et al. 2024): one network alone, in any number of steps. MaskGIT's cosine schedule
    sets how many tokens each step draws in parallel.

    With one token per step this is plain autoregression. With fewer steps the law is another one,
    because the tokens of a step are drawn independently of each other.

    Args:
        steps: 1 to the number of tokens of an image; None draws one token per step.
        model: a draft that draws the images in the target's place, without verification (CSpD,
            Figure 9); None is the target.
    """

    steps: int | None = None
    model: Model | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise TemperaError(f"steps={self.steps} makes no image; give 1 or more.")

    @property
    def is_plain(self) -> bool:
        """Whether this is the baseline for speed-ups."""
        return self.steps is None and self.model is None

    @property
    def plain(self) -> "Parallel":
        """The baseline: the target alone, one token per step."""
        return Parallel()

    def describe(self) -> dict[str, Any]:
        """The options that results depend on; see `tempera.evaluation.pipeline.DecodingMethod`."""
        return {
            "method": "parallel" if self.model is None else "draft",
            "draft": None if self.model is None else self.model.identity,
            "verification": repr(self) if self.model is None else None,
            "branching": None,
        }

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
        """Generate one image per prompt; see `Speculative.decode`."""
        model = self.model or target
        _check_tokens(model, target)
        streams.check(prompts)
        for network in (target, model):
            network.begin(prompts)
        noise = Noise(streams)
        images = _Images(target, noise, 0, streams.device)
        for step, size in enumerate(counts(target.length, self.steps or target.length), start=1):
            with clock("target"):
                drawn = _predicted(model, images.context, size, noise)
            with clock("commit"):
                images.append(drawn, passes=int(self.model is None))
            if progress is not None:
                progress(step, images.context.reach * len(prompts))
        return images.output("target" if self.model is None else "draft")


def draft_alone(drafter: Model, steps: int | None = None) -> Parallel:
    """The draft's own images, which nothing verifies."""
    return Parallel(steps, drafter)


@dataclass(frozen=True)
class Speculative:
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

    is_plain: ClassVar[bool] = False
    plain: ClassVar[Parallel] = Parallel()

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

    def depth(self, length: int) -> int:
        """L, most drafted tokens of a round, for images of `length` tokens."""
        sizes = counts(length, self.steps or length)
        return max(sum(self.rule.drafted(known, self.gamma, sizes)) for known in range(length))

    def describe(self) -> dict[str, Any]:
        """The options that results depend on; see `tempera.evaluation.pipeline.DecodingMethod`."""
        return {
            "method": type(self.rule).__name__.lower(),
            "draft": self.drafter.identity,
            "verification": repr(self.rule),
            "branching": None,
        }

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
        """Generate one image per prompt (CSpD, Algorithm 1).

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
            TemperaError: the numbers of prompts and streams differ, a draft does not fit the
                target, or a network gave NaN or infinity.
        """
        _check_tokens(self.drafter, target)
        _check_denoising(self.drafter, target)
        streams.check(prompts)
        for network in (target, self.drafter):
            network.begin(prompts)
        noise = Noise(streams)
        images = _Images(target, noise, self.depth(target.length), streams.device)
        told = (lambda *_: None) if progress is None else progress
        sizes = counts(target.length, self.steps or target.length)
        step, least = 0, 0
        for step, size in enumerate(self.rule.prefilled(self.prefill, sizes), start=1):
            images.append(_predicted(target, images.context, size, noise), passes=1)
            told(step, (least := images.context.reach) * len(prompts))
        while least < target.length:
            step += 1
            noise.next_round()
            with clock("draft"):  # x̃ ~ q
                ahead = self.rule.drafted(least, self.gamma, sizes)
                proposal = _drafted(self.drafter, images.context, ahead, noise)
                drafted = proposal.path.token
            with clock("target"):  # what p is conditioned on, at all drafted tokens
                conditions = self._conditions(images.context, drafted, target)
            with clock("verify"):  # accepted tokens, then a resampled one
                verdict = self.rule.verify(proposal, target.denoiser, conditions, noise)
            with clock("commit"):
                images.append(verdict, 1 + sum(ahead) * self.rule.sees_drafts, drafted)
                least = images.least()  # the host read of the round
            told(step, least * len(prompts))
        return images.output("target")

    def _conditions(self, context: Context, drafted: Tensor, target: Model) -> Tensor:
        """The target's conditions for the drafted tokens [B, M, D] and, if the rule lets the target
        see drafts, for the token after them. Otherwise all have the guidance of the last one.
        """
        count = drafted.shape[1]
        if not self.rule.sees_drafts:
            places = _next_places(context, count, target.length)
            return target.conditions(context, places, places[:, -1:].expand_as(places) + 1)
        contexts = [context]
        for token in drafted.split(1, 1):
            contexts.append(_with(contexts[-1], token, target.length))
        stacked = _stack(contexts)
        places = _next_places(stacked, 1, target.length)
        conditions = target.conditions(stacked, places, places + 1)
        return conditions.view(len(contexts), len(drafted), -1).transpose(0, 1)


Decoding = Parallel | Speculative
"""A decoding method for continuous tokens."""


def _check_tokens(draft: Model, target: Model) -> None:
    """Raise TemperaError unless draft and target have the same tokens."""
    if draft.grid != target.grid:
        raise TemperaError(
            f"the draft generates {draft.grid[0]}×{draft.grid[1]} tokens and the target "
            f"{target.grid[0]}×{target.grid[1]}; take a draft of the target's family."
        )
    if draft.channels != target.channels:
        raise TemperaError(
            f"the draft's tokens have {draft.channels} channels and the target's "
            f"{target.channels}; take a draft that was trained with the same image tokenizer."
        )


def _check_denoising(draft: Model, target: Model) -> None:
    own, other = draft.denoiser, target.denoiser
    if (own.stages, own.last_noise) != (other.stages, other.last_noise):
        raise TemperaError(
            "draft and target must have the same denoising steps; give both the same "
            "denoising_steps and last_noise."
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


def _predicted(model: Model, context: Context, count: int, noise: Noise) -> ContinuousVerdict:
    """The next `count` tokens from one model alone; all rows have the same length."""
    places = _next_places(context, count, model.length)
    after = (context.known + count).unsqueeze(1).expand_as(places)
    drawn = noise.normal(count, model.denoiser.stages + 1, model.channels)
    path = denoise_all(model.denoiser, model.conditions(context, places, after), drawn)
    none = torch.zeros_like(places)
    return ContinuousVerdict(
        path.token, none + BONUS, torch.full_like(context.known, count), none, none
    )


def _drafted(draft: Model, context: Context, sizes: Sequence[int], noise: Noise) -> Proposal:
    """Draft `sizes` tokens, one entry per drafting step."""
    drawn = noise.normal(sum(sizes), draft.denoiser.stages + 1, draft.channels)
    conditions, paths = [], []
    for size, part in zip(sizes, drawn.split(list(sizes), 1), strict=True):
        places = _next_places(context, size, draft.length)
        after = (context.known + size).unsqueeze(1).expand_as(places)
        conditions.append(draft.conditions(context, places, after))
        paths.append(denoise_all(draft.denoiser, conditions[-1], part))
        context = _with(context, paths[-1].token, draft.length)
    kernels = zip(*(path.kernels for path in paths), strict=True)
    path = DenoisingPath(
        torch.cat([path.states for path in paths], 1),
        Kernel(*(torch.cat(leaves, 1) for leaves in kernels)),
    )
    return Proposal(path, drawn, draft.denoiser, torch.cat(conditions, 1))


def _next_places(context: Context, count: int, length: int) -> Tensor:
    """The next `count` places of the order, clamped to the last one, int64 [R, count]."""
    ahead = torch.arange(count, device=context.known.device)
    return (context.known.unsqueeze(1) + ahead).clamp(max=length - 1)


def _with(context: Context, tokens: Tensor, length: int) -> Context:
    """The context with more known tokens, [R, M, D]; tokens past the image are not known."""
    count = tokens.shape[1]
    slots = context.known.unsqueeze(1) + torch.arange(count, device=tokens.device)
    return replace(
        context,
        tokens=context.tokens.scatter(1, slots.unsqueeze(-1).expand_as(tokens), tokens),
        known=(context.known + count).clamp(max=length),
        reach=min(context.reach + count, length),
    )


def _stack(contexts: list[Context]) -> Context:
    """Concatenate contexts along R."""
    rows, tokens, order, known = (
        torch.cat([getattr(context, name) for context in contexts])
        for name in ("rows", "tokens", "order", "known")
    )
    return Context(rows, tokens, order, known, max(context.reach for context in contexts))
