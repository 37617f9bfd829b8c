"""Which drafted vectors are kept, and what replaces the first that is not: the acceptance rules for
tokens drawn by a diffusion head.

B rows, M drafted tokens a round, S stages, D channels. A drafted token is a path x_S … x₀ of the
draft's head. q is the draft's density, p the target's (Wang et al., "Continuous speculative
decoding for autoregressive image generation", CSpD). docs/methods.md has the equations.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tempera.continuous.diffusion import (
    Denoiser,
    DenoisingPath,
    Kernel,
    denoise,
    denoise_all,
    kernels_along,
    pick,
    resume,
)
from tempera.continuous.noise import Noise, normal_of
from tempera.continuous.residual_sampler import Resampled, reflected, reject_until
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED
from tempera.errors import TemperaError


class Proposal(NamedTuple):
    """What the draft did in a round.

    Attributes:
        path: leaves [B, M, …].
        noise: what the paths were drawn with, standard normal, [B, M, S + 1, D].
        denoiser: the draft's head.
        conditions: of the draft's head, [B, M, C].
    """

    path: DenoisingPath
    noise: Tensor
    denoiser: Denoiser
    conditions: Tensor


class ContinuousVerdict(NamedTuple):
    """What became of a round's draft.

    Attributes:
        tokens: [B, M + 1, D]; what follows the emitted ones is undefined.
        origin: how each came about (`tempera.decoding.trace`), int8 [B, M + 1].
        emitted: how many there are, int64 [B].
        trials: proposals of the residual sampler for each token, int64 [B, M + 1].
        failures: 1 where it gave up, int64 [B, M + 1].
    """

    tokens: Tensor
    origin: Tensor
    emitted: Tensor
    trials: Tensor
    failures: Tensor


@runtime_checkable
class DensityRule(Protocol):
    """Decides on the drafted tokens of a round, given the target's conditions for them."""

    sees_drafts: ClassVar[bool]
    """Whether the target's condition of a drafted token is computed with the drafted tokens before
    it in place, and one more after all of them: [B, M + 1, C] in M + 1 contexts; else all from what
    was there before the round, [B, M, C] in one.
    """

    def prefilled(self, share: float, sizes: Sequence[int]) -> Sequence[int]:
        """Tokens of each step that the target takes alone first.

        Args:
            share: of the image.
            sizes: tokens of each step of an image by MAR's cosine schedule; all 1 where there are
                as many steps as tokens.
        """

    def drafted(self, known: int, gamma: int, sizes: Sequence[int]) -> Sequence[int]:
        """Tokens of each drafting step of a round, at most γ steps.

        Args:
            known: tokens of the row furthest behind.
            gamma: γ.
            sizes: see `prefilled`.
        """

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """`denoiser` is the target's head."""


class _SeesDrafts:
    """Rules that roll back. The target sees the drafted tokens and draws one token a step itself; a
    round has γ drafting steps of equal size, so that no image depends on the others of its batch.
    """

    sees_drafts: ClassVar[bool] = True

    def prefilled(self, share: float, sizes: Sequence[int]) -> Sequence[int]:
        """One token a step."""
        return [1] * math.ceil(share * sum(sizes))

    def drafted(self, known: int, gamma: int, sizes: Sequence[int]) -> Sequence[int]:
        """The mean size, rounded up, γ times."""
        return [math.ceil(sum(sizes) / len(sizes))] * gamma


@dataclass(frozen=True)
class CSpD(_SeesDrafts):
    """CSpD as its paper has it (Eqs. 1–11, Algorithm 1). Its law is the target's where Σ = 1, and
    in general not.

    The target denoises for itself, with the draft's noise (`alignment`, Eq. 3) or with its own. A
    token is kept with probability min(1, Σ · p(x₀ | x₁ᵖ) / q(x₀ | x₁^q)), Σ being the ratio of what
    precedes the last stage (Eqs. 4 and 5; without alignment the densities of the two noises count
    too). The first rejected one is redrawn from p(· | x₁ᵖ) until one is accepted with probability
    [Σ p − q]₊ / (Σ p) (Eq. 11), at most `trials` times; after that it is drawn from p(· | x₁ᵖ).

    Given the noise, an aligned target's own token has the law p(· | x₁ᵖ): with Σ = 1 accepting and
    redrawing give exactly that. Σ scales p alone, which no later step mends. Measured
    (`exactness.gaussians.biases`: Kolmogorov and Smirnov's distance from the target's law, ± 0.003
    at 95 %, 2·10⁵ images of three tokens, a draft whose parameters are off by about 0.25): 0.003,
    which is nothing, for a head that is one Gaussian in one or two dimensions; 0.068 for three
    linear stages and 0.045 for three stages that are not linear. Without alignment 0.019 and 0.135
    for the Gaussians, 0.096 and 0.017 for three stages.

    Args:
        alignment: denoising trajectory alignment.
        trials: bound of the residual sampler.
    """

    alignment: bool = True
    trials: int = 1000

    def __post_init__(self) -> None:
        _check_trials(self.trials)

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        _, count, stages, channels = proposal.path.kernels.mean.shape
        own = proposal.noise if self.alignment else noise.normal(count, stages + 1, channels)
        spare = noise.normal(stages + 1, channels)  # of the token after the draft
        paths = denoise_all(denoiser, conditions, torch.cat([own, spare.unsqueeze(1)], 1))
        target = DenoisingPath(
            paths.states[:, :count], Kernel(*(leaf[:, :count] for leaf in paths.kernels))
        )
        before = _log_ratio_before(target, proposal.path, own, proposal.noise)
        p, q = (_last(path) for path in (target, proposal.path))
        ratio = before + p.log_density(proposal.path.token) - q.log_density(proposal.path.token)
        kept = noise.uniform(count).double().log() <= ratio
        accepted = kept.int().cumprod(-1).sum(-1)
        rejected, at = accepted < count, accepted.clamp(max=count - 1)
        p, q, before = p.pick(at), q.pick(at), pick(before, at)
        redrawn = reject_until(p, q, before, rejected, noise, self.trials)
        drawn = torch.where(
            rejected.unsqueeze(-1), _or_from(p, redrawn, noise), paths.token[:, count]
        )
        return _cut(proposal.path.token, accepted, drawn, redrawn.trials, redrawn.failed)


@dataclass(frozen=True)
class CSpDReferenceCode:
    """CSpD as its public code computes it, which departs from the paper.

    Σ is inverted. A temperature, 42 there, multiplies σ in the exponents of both densities of the
    acceptance test, and only there: with 1 hardly anything is accepted. Rejected tokens are redrawn
    with the densities as they are; after `trials` failures they become zeros. The draft's last
    stage adds no noise (`last_noise`). The target does not see the drafts that it tests, all with
    the guidance of the round's last step, and nothing is rolled back: what follows a rejected token
    was drafted after it and stays. The target takes ⌊share · steps⌋ + 1 steps alone first, and
    rounds end at multiples of γ.

    Its law is far from the target's; `exactness.gaussians.biases` measures how far.

    Args:
        exponent_temperature: see above.
        trials: bound of the residual sampler.
    """

    exponent_temperature: float = 42.0
    trials: int = 100

    sees_drafts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_trials(self.trials)
        if not 0 < self.exponent_temperature < math.inf:
            raise TemperaError(
                f"exponent_temperature={self.exponent_temperature} is not possible; give a "
                "number above 0."
            )

    def prefilled(self, share: float, sizes: Sequence[int]) -> Sequence[int]:
        """One step more than the share of the steps, rounded down."""
        return sizes[: math.floor(share * len(sizes)) + 1]

    def drafted(self, known: int, gamma: int, sizes: Sequence[int]) -> Sequence[int]:
        """Up to the next step whose number, from 0, is a multiple of γ."""
        step = bisect_right(list(accumulate(sizes)), known)
        return sizes[step : step + gamma - (step - 1) % gamma]

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        target = denoise_all(denoiser, conditions, proposal.noise)
        before = -_log_ratio_before(target, proposal.path, proposal.noise, proposal.noise)
        p, q, token = _last(target), _last(proposal.path), proposal.path.token
        count = token.shape[1]
        wide = [
            kernel.widened(self.exponent_temperature).log_density(token) for kernel in (p, q)
        ]  # the factor's own density cancels
        kept = noise.uniform(count).double().log() <= before + wide[0] - wide[1]
        p, q = (Kernel(*(leaf.flatten(0, 1) for leaf in kernel)) for kernel in (p, q))
        redrawn = reject_until(p, q, before.flatten(), ~kept.flatten(), noise, self.trials)
        drawn = redrawn.x.masked_fill(redrawn.failed.unsqueeze(-1), 0.0).view_as(token)
        trials, failed = redrawn.trials.view_as(kept), redrawn.failed.view_as(kept).long()
        return ContinuousVerdict(
            _one_more(torch.where(kept.unsqueeze(-1), token, drawn)),
            _one_more(torch.where(kept, ACCEPTED, RESAMPLED).to(torch.int8)),
            torch.full_like(failed[:, 0], count),
            _one_more(trials),
            _one_more(failed),
        )


@dataclass(frozen=True)
class MaximalCoupling(_SeesDrafts):
    """Exact: the emitted tokens have the target's law, whatever the draft.

    The draft's path is verified stage by stage against the target's kernels at the draft's own
    states: given the same x_{t+1}, the draft's x_t is kept with probability min(1, p(x_t)/q(x_t)),
    else replaced by a draw from Norm[p − q]₊: a maximal coupling of two Gaussians. With equal
    covariances the replacement is the reflection; else it takes acceptance–rejection, which costs
    no network. The target goes on from the replaced state with noise of its own, and its token ends
    the round. All paths agree up to that state, so that every state is drawn from the target's
    kernel. All kernels of the target, M · S of them, are one call of its head.

    Without noise in the last stage x₀ is a point that two networks never share: nothing is ever
    accepted. Use `last_noise`.

    Args:
        trials: bound of the residual sampler, after which the replacement is drawn from p. The law
            is off by at most 1/(e · trials) in total variation a round, 2·10⁻⁵ by default; failures
            are counted.
    """

    trials: int = 1 << 14

    def __post_init__(self) -> None:
        _check_trials(self.trials)

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        states, q = proposal.path.states, proposal.path.kernels
        _, count, stages, channels = q.mean.shape
        p = _along(denoiser, conditions[:, :count], states)
        ratio = p.log_density(states[:, :, 1:]) - q.log_density(states[:, :, 1:])
        kept = noise.uniform(count, stages).double().log() <= ratio
        if not denoiser.last_noise:
            kept[..., -1] = (p.mean == q.mean)[..., -1, :].all(-1)
        steps = kept.flatten(1).int().cumprod(-1).sum(-1)  # stages that stand, over the whole draft
        accepted, stage = steps // stages, steps % stages
        stopped = accepted < count
        at = steps.clamp(max=count * stages - 1)
        p, q = (Kernel(*(leaf.flatten(1, 2) for leaf in kernel)).pick(at) for kernel in (p, q))
        replaced, trials, failed = self._replace(
            p, q, pick(states[:, :, 1:].flatten(1, 2), at), stopped, noise
        )
        if not denoiser.last_noise:
            replaced = torch.where((stage == stages - 1).unsqueeze(-1), p.mean, replaced)
        fresh = noise.normal(stages + 1, channels)
        x = torch.where(stopped.unsqueeze(-1), replaced, fresh[:, 0])
        drawn = resume(
            denoiser,
            pick(conditions, accepted),
            x,
            torch.where(stopped, stage + 1, 0),
            fresh[:, 1:],
        )
        return _cut(proposal.path.token, accepted, drawn, trials, failed)

    def _replace(
        self, p: Kernel, q: Kernel, x: Tensor, wanted: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a maximal coupling puts in the place of x ~ q that was not kept, with trials and
        failures: leaves and x [B, D].
        """
        mirror = (p.std == q.std).all(-1)
        redrawn = reject_until(
            p,
            q,
            torch.zeros_like(wanted, dtype=torch.float64),
            wanted & ~mirror,
            noise,
            self.trials,
        )
        return (
            torch.where(mirror.unsqueeze(-1), reflected(p, q, x), _or_from(p, redrawn, noise)),
            redrawn.trials,
            redrawn.failed,
        )


@dataclass(frozen=True)
class PathCoupling(_SeesDrafts):
    """Exact, on whole paths: the emitted tokens have the target's law, whatever the draft.

    Both heads' kernels are evaluated on the draft's own path, which is kept with probability
    min(1, Π_t p_t/q_t). Else paths of the target are drawn until one is kept with probability
    [1 − Π_t q_t/p_t]₊: rejection sampling from Norm[p − q]₊ of paths. A rejection has probability
    TV(p, q), and then takes 1/TV paths: one path of the target a token on average. Where every
    stage adds a little divergence, a whole path is kept far more often than all of its stages one
    by one (`MaximalCoupling`).

    Without noise in the last stage the ratio is that of x_S … x₁, and the target's own x₀ is
    emitted. The tokens drafted after it saw the draft's x₀ instead, so that the round ends there.

    The number of paths that a row needs is random, and the host asks for it once a path.

    Args:
        trials: paths of the target at most, after which its last one is emitted. The law is off by
            at most 1/(e · trials) in total variation a round; failures are counted.
    """

    trials: int = 1 << 14

    def __post_init__(self) -> None:
        _check_trials(self.trials)

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        states, drafted = proposal.path.states, proposal.path.token
        count = drafted.shape[1]
        p = _along(denoiser, conditions[:, :count], states)
        ratio = _log_ratio(p, proposal.path.kernels, states, denoiser.last_noise)
        kept = noise.uniform(count).double().log() <= ratio
        tokens = drafted if denoiser.last_noise else p.mean[..., -1, :]
        most = count if denoiser.last_noise else 1
        accepted = kept[:, :most].int().cumprod(-1).sum(-1)
        at = accepted.clamp(max=count - 1)
        drawn, trials, failed = self._redraw(
            denoiser,
            pick(conditions, accepted),
            proposal.denoiser,
            pick(proposal.conditions, at),
            accepted < most,
            noise,
        )
        verdict = _cut(tokens, accepted, drawn, trials, failed)
        if denoiser.last_noise:
            return verdict
        return verdict._replace(emitted=torch.ones_like(accepted))

    def _redraw(
        self,
        target: Denoiser,
        conditions: Tensor,
        draft: Denoiser,
        draft_conditions: Tensor,
        wanted: Tensor,
        noise: Noise,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token from the residual where it is `wanted` [B], else from the target, [B, D]; with
        the number of paths drawn and failures, [B] each.
        """
        width = (target.stages + 1) * target.channels
        rows = torch.arange(len(wanted), device=wanted.device)
        tokens = conditions.new_zeros(len(wanted), target.channels, dtype=torch.float32)
        trials, missing, left = torch.zeros_like(rows), wanted.clone(), rows
        for trial in range(self.trials):
            uniform = noise.trials(left, 1, trial, 1, width + 1)[:, 0]
            drawn = normal_of(uniform[:, :width]).unflatten(1, (-1, target.channels))
            path = denoise(target, conditions[left], drawn)
            q = kernels_along(draft, draft_conditions[left], path.states[:, :-1])
            ratio = -_log_ratio(path.kernels, q, path.states, target.last_noise)  # log q/p
            found = ~missing[left] | (uniform[:, width].double() < 1 - ratio.exp())
            tokens[left] = path.token
            trials[left] += missing[left].long()
            missing[left] &= ~found
            left = missing.nonzero().squeeze(-1)
            if not len(left):
                break
        return tokens, trials, missing


def exact_rule(coupling: Literal["stage", "path"] = "path", trials: int = 1 << 14) -> DensityRule:
    """The lossless rule that couples every stage, or whole paths."""
    return MaximalCoupling(trials) if coupling == "stage" else PathCoupling(trials)


def _along(denoiser: Denoiser, conditions: Tensor, states: Tensor) -> Kernel:
    """The kernels of all stages at the states of paths [B, M, S + 1, D]: leaves [B, M, S, D]."""
    along = kernels_along(denoiser, conditions.flatten(0, 1), states[:, :, :-1].flatten(0, 1))
    return Kernel(*(leaf.view_as(states[:, :, 1:]) for leaf in along))


def _log_ratio(p: Kernel, q: Kernel, states: Tensor, last_noise: bool) -> Tensor:
    """log Π_t p_t/q_t of paths [..., S + 1, D], without the last stage where it has no noise:
    float64 [...].
    """
    ratio = p.log_density(states[..., 1:, :]) - q.log_density(states[..., 1:, :])
    return ratio.sum(-1) if last_noise else ratio[..., :-1].sum(-1)


def _log_ratio_before(
    p: DenoisingPath, q: DenoisingPath, p_noise: Tensor, q_noise: Tensor
) -> Tensor:
    """Log of the target's density of all but the last stage of its path ÷ the draft's of its own,
    float64 [B, M] (CSpD, Eqs. 1 and 4).

    Equal noise has equal density, so that an aligned path leaves the standard deviations alone.
    """
    scales = (
        q.kernels.std[..., :-1, :].double().log() - p.kernels.std[..., :-1, :].double().log()
    ).sum((-2, -1))
    squares = [noise[..., :-1, :].double().square().sum((-2, -1)) for noise in (p_noise, q_noise)]
    return scales - 0.5 * (squares[0] - squares[1])


def _or_from(p: Kernel, redrawn: Resampled, noise: Noise) -> Tensor:
    """What the residual sampler drew, [B, D]; where it failed, a draw from p."""
    fresh = p.at(noise.normal(p.mean.shape[-1]))
    return torch.where(redrawn.failed.unsqueeze(-1), fresh, redrawn.x)


def _last(path: DenoisingPath) -> Kernel:
    """The kernel of the last stage, leaves [B, M, D]."""
    return Kernel(*(leaf[..., -1, :] for leaf in path.kernels))


def _cut(
    drafted: Tensor, accepted: Tensor, drawn: Tensor, trials: Tensor, failed: Tensor
) -> ContinuousVerdict:
    """The accepted tokens of [B, M, D] and the one drawn after them, [B, D], in so many trials or
    in vain, [B] each.
    """
    tokens = _one_more(drafted)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    ends = places == accepted.unsqueeze(1)
    tokens = torch.where(ends.unsqueeze(-1), drawn.unsqueeze(1), tokens)
    after_all = torch.where(accepted < drafted.shape[1], RESAMPLED, BONUS).unsqueeze(1)
    origin = torch.where(ends, after_all, ACCEPTED).to(torch.int8)
    return ContinuousVerdict(
        tokens, origin, accepted + 1, ends * trials.unsqueeze(1), ends * failed.long().unsqueeze(1)
    )


def _one_more(values: Tensor) -> Tensor:
    """[B, M, …] -> [B, M + 1, …], the last one empty."""
    return torch.cat([values, torch.zeros_like(values[:, :1])], 1)


def _check_trials(trials: int) -> None:
    if not 1 <= trials <= 1 << 20:
        raise TemperaError(f"trials={trials} is not possible; give 1 to {1 << 20}.")
