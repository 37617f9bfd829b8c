"""Sampling from the residual Norm[p − q]₊ of two Gaussian densities, which has no closed form."""

from typing import NamedTuple

import torch
from torch import Tensor

from tempera.continuous.diffusion import Kernel, pick
from tempera.continuous.noise import Noise, normal_of

_FIRST, _MOST = 16, 1024
"""Trials per batch: of the first batch, and at most."""


class Resampled(NamedTuple):
    """Outcome of acceptance–rejection for R tokens.

    Attributes:
        x: the draws, [R, D]; undefined if the sampler failed or no draw was wanted.
        trials: number of proposals, int64 [R].
        failed: a draw was wanted and none of `bound` proposals was accepted, bool [R].
    """

    x: Tensor
    trials: Tensor
    failed: Tensor


def reject_until(
    p: Kernel,
    q: Kernel,
    log_scale: Tensor,
    wanted: Tensor,
    noise: Noise,
    bound: int,
) -> Resampled:
    """Propose x from p and accept it with probability [1 − q(x)/(s p(x))]₊, at most `bound` times.

    This draws from Norm[s p − q]₊ (CSpD, Eqs. 7–11, with M = 1/Z). The number of trials is
    geometric; for s = 1 a trial succeeds with probability Z = TV(p, q), so all fail with
    probability (1 − Z)^bound. On a CPU, sampling stops when all tokens are drawn; on other devices
    all trials run, without a host read. The result is the same, because the draws of a trial depend
    only on its number.

    Args:
        p: the proposal, leaves [R, D], with R / B consecutive tokens for each of the B rows.
        q: the draft's kernel, leaves [R, D].
        log_scale: log s, float64 [R].
        wanted: which tokens need a draw, bool [R].
        noise: the trials' random draws.
        bound: most trials per token.
    """
    channels, places = p.mean.shape[-1], len(wanted) // noise.batch
    left, done, size = torch.arange(len(wanted), device=wanted.device), 0, min(_FIRST, bound)
    x, trials, missing = p.mean.clone(), torch.zeros_like(left), wanted.clone()
    while done < bound and len(left):
        uniform = noise.trials(left, places, done, size, channels + 1)
        mine, theirs = (Kernel(*(leaf[left].unsqueeze(1) for leaf in kernel)) for kernel in (p, q))
        tried = mine.at(normal_of(uniform[..., :channels]))
        log_ratio = theirs.log_density(tried) - mine.log_density(tried)
        accept = (
            uniform[..., channels].double() < 1 - (log_ratio - log_scale[left].unsqueeze(1)).exp()
        )
        found, first = accept.any(-1) & missing[left], accept.int().argmax(-1)
        trials[left] += torch.where(missing[left], torch.where(found, first + 1, size), 0)
        x[left] = torch.where(found.unsqueeze(-1), pick(tried, first), x[left])
        missing[left] &= ~found
        done += size
        size = min(4 * size, _MOST, bound - done)
        if missing.device.type == "cpu":
            left = missing.nonzero().squeeze(-1)
    return Resampled(x, trials, missing)


def reflected(p: Kernel, q: Kernel, x: Tensor) -> Tensor:
    """The replacement in a reflection coupling of two Gaussians of equal covariance (Bou-Rabee,
    Eberle and Zimmer 2020).

    If x ~ q is accepted with probability min(1, p(x)/q(x)) and otherwise replaced by its mirror
    image in the plane half-way between the means, the result is a draw from p. Kernels and x:
    [..., D].
    """
    whitened = (x - q.mean) / q.std
    difference = (q.mean - p.mean) / q.std
    direction = torch.nn.functional.normalize(difference, dim=-1)
    return p.mean + p.std * (
        whitened - 2 * (direction * whitened).sum(-1, keepdim=True) * direction
    )
