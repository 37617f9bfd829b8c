"""Continuous speculative decoding as its public code computes it, beside the paper's in
`tempera.continuous.rules.CSpD`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from typing_extensions import override

from tempera.continuous.diffusion import Denoiser, denoise
from tempera.continuous.loop import (
    Context,
    ContinuousRecorded,
    ContinuousRound,
    ContinuousRows,
    Model,
    Parallel,
    counts,
    next_indices,
    propose,
)
from tempera.continuous.noise import Noise
from tempera.continuous.residual_sampler import reject_until
from tempera.continuous.rules import ContinuousVerdict, Proposal, Trials
from tempera.decoding.compiled import Run
from tempera.decoding.compiled import plain as unwrapped
from tempera.decoding.interfaces import ACCEPTED, RESAMPLED
from tempera.decoding.loop import Decoding
from tempera.decoding.random_streams import RandomStreams


@dataclass(frozen=True)
class CSpDReferenceCode(Decoding):
    """CSpD as its public code computes it, which departs from the paper.

    Σ is inverted. A temperature (42 in the code) multiplies σ in the exponents of both densities of
    the acceptance test, and only there; with 1 almost nothing is accepted. The residual uses the
    densities without it; after `trials` failures a token becomes zeros. The draft's last stage adds
    no noise (`last_noise`). The target does not see the drafts that it tests, and all of them have
    the guidance of the round's last step. Nothing is rolled back: the tokens drafted after a
    rejected one stay. The prefill has ⌊share · steps⌋ + 1 steps, and rounds end at multiples of γ.

    Its law is far from the target's (docs/results/continuous.md).

    Args:
        drafter: the smaller model.
        gamma: drafting steps per round, γ.
        prefill: share of the drafting steps that the target draws alone first.
        steps: drafting steps per image; None drafts one token per step.
        exponent_temperature: see above.
        trials: most trials of the residual sampler.
        alignment: whether the target denoises with the draft's noise (the paper's Table 3).
    """

    drafter: Model = field(repr=False)
    gamma: PositiveInt = 8
    prefill: Annotated[float, Field(ge=0, lt=1)] = 0.05
    steps: PositiveInt | None = None
    exponent_temperature: PositiveFloat = 42.0
    trials: Trials = 100
    alignment: bool = True

    @property
    @override
    def plain(self) -> Parallel:
        return Parallel()

    @property
    @override
    def exact(self) -> bool:
        """No."""
        return False

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "method": type(self).__name__.lower(),
            "draft": self.drafter.identity,
            "verification": repr(self),
            "branching": None,
        }

    def sizes(self, length: int) -> list[int]:
        """Tokens of each drafting step of an image of `length` tokens."""
        return counts(length, self.steps or length)

    def prefilled(self, length: int) -> Sequence[int]:
        """Tokens of each step of the target alone before the first round: ⌊share · steps⌋ + 1."""
        sizes = self.sizes(length)
        return sizes[: math.floor(self.prefill * len(sizes)) + 1]

    def ahead(self, decoded: int, length: int) -> Sequence[int]:
        """Tokens of each drafting step of a round after `decoded` tokens: those of the steps up to
        the next multiple of γ, counted from 0.
        """
        sizes = self.sizes(length)
        step = bisect_right(list(accumulate(sizes)), decoded)
        return sizes[step : step + self.gamma - (step - 1) % self.gamma]

    def depth(self, length: int) -> int:
        """Most drafted tokens of a round, for images of `length` tokens."""
        return max(sum(self.ahead(decoded, length)) for decoded in range(length))

    @override
    def recorder(self, target: Model, diagnostics: bool) -> ContinuousRecorded:
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
        length = target.length
        models = [target, self.drafter]
        batch = ContinuousRows(models, streams, prompts, rows, self.depth(length))
        proposed = run(propose, "draft")
        scored = run(score, "target")
        verified = run(self.verify, "verify")
        while batch.begin():
            sequences = batch.sequences
            noise = batch.noise
            yield from batch.alone(target, self.prefilled(length))
            while sequences.live:  # all rows have the same length
                noise.next_round()
                context = batch.context
                ahead = self.ahead(sequences.counts[0], length)
                draft = proposed(self.drafter, context, ahead, noise)
                scores = scored(target, context, sum(ahead))
                verdict = verified(draft, target.denoiser, scores, noise)
                yield batch.append(verdict, 1, draft, scores)
                batch.refill()

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """Accept drafted tokens, or replace each alone.

        Args:
            proposal: the draft.
            denoiser: the target's head.
            conditions: the target's conditions for the drafted tokens, [B, M, C].
            noise: the round's random draws.
        """
        own = proposal.noise
        if not self.alignment:
            own = noise.normal(*own.shape[1:])
        target = denoise(denoiser, conditions, own).kernels
        draft = proposal.path.kernels
        before = target.std[..., :-1, :].double().log() - draft.std[..., :-1, :].double().log()
        inverted = before.sum((-2, -1))
        p, q = (one.map(lambda leaf: leaf[..., -1, :]) for one in (target, draft))
        token = proposal.path.token
        # normalisation is widened too, but equally in both densities, so that this cancels
        above = p.widened(self.exponent_temperature).log_density(token)
        below = q.widened(self.exponent_temperature).log_density(token)
        ratio = inverted + above - below
        kept = noise.uniform(token.shape[1]).double().log() <= ratio
        p, q = (one.map(lambda leaf: leaf.flatten(0, 1)) for one in (p, q))
        redrawn = reject_until(p, q, inverted.flatten(), ~kept.flatten(), noise, self.trials)
        drawn = redrawn.x.masked_fill(redrawn.failed.unsqueeze(-1), 0.0).view_as(token)
        drawn = drawn.masked_fill(ratio.isnan().unsqueeze(-1), torch.nan)  # not zeros: an error
        return ContinuousVerdict(
            tokens=torch.where(kept.unsqueeze(-1), token, drawn),
            origin=torch.where(kept, ACCEPTED, RESAMPLED).to(torch.int8),
            emitted=torch.full_like(kept[:, 0], token.shape[1], dtype=torch.int64),
            trials=redrawn.trials.view_as(kept),
            failures=redrawn.failed.view_as(kept).long(),
        )


def score(target: Model, context: Context, count: int) -> Tensor:
    """The target's conditions for `count` drafted tokens, of which it sees none; all have the
    guidance of the last one: [B, M, C].
    """
    places = next_indices(context, count, target.length)
    return target.conditions(context, places, places[:, -1:].expand_as(places) + 1)
