"""Acceptance rules and residuals for tokens drawn by a diffusion head.

B rows, M drafted tokens per round, S stages, D channels. A drafted token is a path x_S … x₀ of the
draft's head. q is the draft's density, p the target's (Wang et al., "Continuous speculative
decoding for autoregressive image generation", CSpD). docs/results/continuous.md has the equations.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from tempera.continuous.diffusion import (
    Denoiser,
    DenoisingPath,
    Kernel,
    denoise,
    kernels_along,
)
from tempera.continuous.noise import Noise
from tempera.continuous.residual_sampler import (
    ConditionedHead,
    path_ratio,
    redraw_paths,
    reject_until,
)
from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.trees import take_one

Trials = Annotated[int, Field(ge=1, le=1 << 20)]
"""Most trials of a residual sampler."""


class Proposal(NamedTuple):
    """The draft of a round.

    Attributes:
        path: denoising paths of the drafted tokens, leaves [B, M, …].
        noise: standard normal noise of the paths, [B, M, S + 1, D].
        denoiser: the draft's head.
        conditions: conditions of the draft's head, [B, M, C].
    """

    path: DenoisingPath
    noise: Tensor
    denoiser: Denoiser
    conditions: Tensor


class ContinuousVerdict(NamedTuple):
    """The outcome of verifying a draft.

    Attributes:
        tokens: [B, M + 1, D]; undefined after the emitted ones.
        origin: origin of each token (`tempera.decoding.trace`), int8 [B, M + 1].
        emitted: number of emitted tokens, int64 [B].
        trials: proposals of the residual sampler for each token, int64 [B, M + 1].
        failures: 1 if it gave up, int64 [B, M + 1].
    """

    tokens: Tensor
    origin: Tensor
    emitted: Tensor
    trials: Tensor
    failures: Tensor


class DensityRule(ABC):
    """Accepts or rejects the drafted tokens of a round, given the target's conditions for them.

    Rules roll back: no image depends on the others of its batch.
    """

    @property
    def exact(self) -> bool:
        """Whether the emitted tokens have the target's law, whatever the draft."""
        return False

    @abstractmethod
    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """Verify a draft.

        Args:
            proposal: the draft.
            denoiser: the target's head.
            conditions: the target's conditions for the drafted tokens, each after those before it,
                and for the token after all of them, [B, M + 1, C].
            noise: the round's random draws.
        """


@dataclass(frozen=True)
class CSpD(DensityRule):
    """CSpD as in its paper (Eqs. 1–11, Algorithm 1). Its law is the target's if Σ = 1, but not in
    general.

    The target denoises its own path, with the draft's noise (`alignment`, Eq. 3) or with
    independent noise. A token is accepted with probability min(1, Σ · p(x₀ | x₁ᵖ) / q(x₀ | x₁^q)),
    where Σ is the density ratio of the stages before the last (Eqs. 4 and 5; without alignment it
    includes the densities of the two noises). After a rejection, tokens are proposed from
    p(· | x₁ᵖ) and accepted with probability [Σ p − q]₊ / (Σ p) (Eq. 11), at most `trials` times;
    after that the token is drawn from p(· | x₁ᵖ).

    Given the noise, the aligned target's token has the distribution p(· | x₁ᵖ), and with Σ = 1
    acceptance and residual give exactly that. Σ scales p alone, which no later step corrects:
    docs/results/continuous.md has the measured distance from the target's law.

    Args:
        alignment: denoising trajectory alignment.
        trials: most trials of the residual sampler.
    """

    alignment: bool = True
    trials: Trials = 1000

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        _, count, stages, channels = proposal.path.kernels.mean.shape
        if self.alignment:
            target_noise = proposal.noise
        else:
            target_noise = noise.normal(count, stages + 1, channels)
        last_noise = noise.normal(stages + 1, channels)  # for the token after the draft
        all_noise = torch.cat([target_noise, last_noise.unsqueeze(1)], dim=1)
        paths = denoise(denoiser, conditions, all_noise)
        kernels = paths.kernels.map(lambda leaf: leaf[:, :count])
        target = DenoisingPath(paths.states[:, :count], kernels)
        before = _log_ratio_before(target, proposal.path, target_noise, proposal.noise)
        p = _last(target)
        q = _last(proposal.path)
        ratio = before + p.log_density(proposal.path.token) - q.log_density(proposal.path.token)
        passed = noise.uniform(count).log() < ratio
        accepted = passed.int().cumprod(-1).sum(-1)
        rejected = accepted < count
        at = accepted.clamp(max=count - 1)
        p = p.map(lambda leaf: take_one(leaf, at))
        q = q.map(lambda leaf: take_one(leaf, at))
        redrawn = reject_until(p, q, take_one(before, at), rejected, noise, self.trials)
        fresh = p.at(noise.normal(channels))
        resampled = torch.where(redrawn.failed.unsqueeze(-1), fresh, redrawn.x)
        drawn = torch.where(rejected.unsqueeze(-1), resampled, paths.token[:, count])
        return _cut(proposal.path.token, accepted, drawn, redrawn.trials, redrawn.failed)


@dataclass(frozen=True)
class PathCoupling(DensityRule):
    """Exact, on whole paths: the emitted tokens have the target's law, whatever the draft.

    Both heads' kernels are evaluated on the draft's path, which is accepted with probability
    min(1, Π_t p_t/q_t). After a rejection, paths of the target are drawn until one is accepted with
    probability [1 − Π_t q_t/p_t]₊: rejection sampling from Norm[p − q]₊ of paths. A rejection has
    probability TV(p, q) and then takes 1/TV paths, which is one path of the target per token on
    average. If every stage adds a little divergence, a whole path is accepted far more often than
    all of its stages would be one by one.

    Without noise in the last stage, the ratio is that of x_S … x₁ and the target's x₀ is emitted.
    The tokens drafted after it depend on the draft's x₀, so the round ends there.

    Args:
        trials: most paths of the target, after which the last one is emitted. The law is off by at
            most 1/(e · trials) in total variation per round; failures are counted.
    """

    trials: Trials = 1 << 14

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        """See `DensityRule`."""
        states = proposal.path.states
        drafted = proposal.path.token
        count = drafted.shape[1]
        p = kernels_along(denoiser, conditions[:, :count], states)
        ratio = path_ratio(p, proposal.path.kernels, states, denoiser.last_noise)
        passed = noise.uniform(count).log() < ratio
        tokens = drafted if denoiser.last_noise else p.mean[..., -1, :]
        most = count if denoiser.last_noise else 1
        accepted = passed[:, :most].int().cumprod(-1).sum(-1)
        at = accepted.clamp(max=count - 1)
        redrawn = redraw_paths(
            ConditionedHead(denoiser, take_one(conditions, accepted)),
            ConditionedHead(proposal.denoiser, take_one(proposal.conditions, at)),
            accepted < most,
            noise,
            self.trials,
        )
        verdict = _cut(tokens, accepted, redrawn.x, redrawn.trials, redrawn.failed)
        emitted = accepted + 1 if denoiser.last_noise else torch.ones_like(accepted)
        return verdict._replace(emitted=emitted)


def _log_ratio_before(
    p: DenoisingPath, q: DenoisingPath, p_noise: Tensor, q_noise: Tensor
) -> Tensor:
    """log Σ: log density of the target's path minus that of the draft's path, each without its last
    stage, float64 [B, M] (CSpD, Eqs. 1 and 4).

    Equal noises have equal densities, so for aligned paths only the standard deviations remain.
    """
    p_log_std = p.kernels.std[..., :-1, :].double().log()
    q_log_std = q.kernels.std[..., :-1, :].double().log()
    scales = (q_log_std - p_log_std).sum((-2, -1))
    p_squares = p_noise[..., :-1, :].double().square().sum((-2, -1))
    q_squares = q_noise[..., :-1, :].double().square().sum((-2, -1))
    return scales - 0.5 * (p_squares - q_squares)


def _last(path: DenoisingPath) -> Kernel:
    """The kernel of the last stage, leaves [B, M, D]."""
    return path.kernels.map(lambda leaf: leaf[..., -1, :])


def _cut(
    drafted: Tensor, accepted: Tensor, drawn: Tensor, trials: Tensor, failed: Tensor
) -> ContinuousVerdict:
    """The verdict of a round with rollback.

    Args:
        drafted: [B, M, D].
        accepted: number of accepted tokens, int64 [B].
        drawn: the token after them, [B, D].
        trials, failed: of the residual sampler, [B] each.
    """
    tokens = _one_more(drafted)
    indices = torch.arange(tokens.shape[1], device=tokens.device)
    ends = indices == accepted.unsqueeze(1)
    tokens = torch.where(ends.unsqueeze(-1), drawn.unsqueeze(1), tokens)
    after_all = torch.where(accepted < drafted.shape[1], RESAMPLED, BONUS).unsqueeze(1)
    origin = torch.where(ends, after_all, ACCEPTED).to(torch.int8)
    return ContinuousVerdict(
        tokens,
        origin,
        emitted=accepted + 1,
        trials=ends * trials.unsqueeze(1),
        failures=ends * failed.long().unsqueeze(1),
    )


def _one_more(values: Tensor) -> Tensor:
    """Append a zero entry: [B, M, …] -> [B, M + 1, …]."""
    return torch.cat([values, torch.zeros_like(values[:, :1])], 1)
