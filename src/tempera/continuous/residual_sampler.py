"""Sampling from the residual Norm[p − q]₊ of two densities, which has no closed form: of Gaussians,
and of denoising paths.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, Kernel, denoise, kernels_along
from tempera.continuous.noise import Noise, normal_of
from tempera.decoding.trees import take_one

FIRST_TRIALS = 16
"""Trials of a density that run at once, at first."""
MOST_TRIALS = 1024
"""Trials of a density that run at once, at most."""
PATHS = 8
"""Most paths that are drawn at once, per row of the batch."""


class ConditionedHead(NamedTuple):
    """A diffusion head with the conditions of some tokens, [B, C]."""

    denoiser: Denoiser
    conditions: Tensor


class Resampled(NamedTuple):
    """Outcome of acceptance–rejection for R tokens.

    Attributes:
        x: the first accepted draws, [R, D]; the last draw if none was accepted, the first one if
            none was wanted.
        trials: number of draws tried, int64 [R].
        failed: a draw was wanted and none of `bound` was accepted, bool [R].
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
    probability (1 − Z)^bound.

    Args:
        p: the proposal, leaves [R, D], with R / B consecutive tokens for each of the B rows.
        q: the draft's kernel, leaves [R, D].
        log_scale: log s, float64 [R].
        wanted: which tokens need a draw, bool [R].
        noise: the trials' random draws.
        bound: most trials per token.
    """
    channels = p.mean.shape[-1]
    tokens_per_row = len(wanted) // noise.batch

    def attempt(left: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
        uniform = noise.trials(left, tokens_per_row, first, size, channels + 1)
        p_left = p.map(lambda leaf: leaf[left].unsqueeze(1))
        q_left = q.map(lambda leaf: leaf[left].unsqueeze(1))
        tried = p_left.at(normal_of(uniform[..., :channels]))
        log_ratio = q_left.log_density(tried) - p_left.log_density(tried)
        threshold = 1 - (log_ratio - log_scale[left].unsqueeze(1)).exp()
        return tried, uniform[..., channels] < threshold

    def grown(size: int, _: int) -> int:
        return min(4 * size, MOST_TRIALS)

    return _first_accepted(attempt, wanted, bound, FIRST_TRIALS, grown)


def redraw_paths(
    target: ConditionedHead,
    draft: ConditionedHead,
    wanted: Tensor,
    noise: Noise,
    bound: int,
) -> Resampled:
    """Draw one token per row as a whole denoising path of the target: from the residual Norm[p −
    q]₊ of paths where `wanted`, else from the target.

    Args:
        target, draft: heads with conditions [B, C].
        wanted: rows that draw from the residual, bool [B].
        noise: the trials' random draws.
        bound: most paths per token, after which the last one is taken.
    """
    head = target.denoiser
    width = (head.stages + 1) * head.channels
    batch = len(wanted)

    def attempt(left: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
        uniform = noise.trials(left, 1, first, size, width + 1)
        drawn = normal_of(uniform[..., :width]).unflatten(-1, (-1, head.channels))
        condition = target.conditions[left].unsqueeze(1).expand(-1, size, -1)
        draft_condition = draft.conditions[left].unsqueeze(1).expand(-1, size, -1)
        path = denoise(head, condition, drawn)
        q = kernels_along(draft.denoiser, draft_condition, path.states)
        ratio = -path_ratio(path.kernels, q, path.states, head.last_noise)  # log q/p
        # a ratio of NaN ends the search: no further path would have another
        return path.token, ~(uniform[..., width] >= 1 - ratio.exp())

    def grown(size: int, left: int) -> int:
        return min(2 * size, PATHS * batch // max(1, left))

    return _first_accepted(attempt, wanted, bound, 1, grown)


def _first_accepted(
    attempt: Callable[[Tensor, int, int], tuple[Tensor, Tensor]],
    wanted: Tensor,
    bound: int,
    size: int,
    grown: Callable[[int, int], int],
) -> Resampled:
    """Try draws until one is accepted. The draws of a trial depend on its number alone, so the
    result does not depend on how many run at once.

    Args:
        attempt: from some tokens, int64 [R'], the number of a first trial and a number of trials
            K to the draws [R', K, D], and which of them are accepted, bool [R', K].
        wanted: which tokens need a draw, bool [R]; the others get that of trial 0.
        bound: most trials per token.
        size: trials at once, at first.
        grown: the next number of trials at once, from the last one and the number of tokens left.
    """
    left = torch.arange(len(wanted), device=wanted.device)
    trials = torch.zeros_like(left)
    missing = wanted.clone()
    x: Tensor | None = None
    done = 0
    size = min(size, bound)
    while done < bound and len(left):
        tried, accepted = attempt(left, done, size)
        x = torch.zeros_like(tried[:, 0]) if x is None else x
        any_accepted = accepted.any(-1)
        first = accepted.int().argmax(-1)
        chosen = torch.where(any_accepted, first, size - 1)
        chosen = torch.where(missing[left], chosen, 0)
        x[left] = take_one(tried, chosen)
        trials[left] += (chosen + 1) * missing[left]
        missing[left] &= ~any_accepted
        done += size
        left = missing.nonzero().squeeze(-1)  # a host read: a batch of trials costs far more
        size = min(grown(size, len(left)), bound - done)
    assert x is not None
    return Resampled(x, trials, missing)


def path_ratio(p: Kernel, q: Kernel, states: Tensor, last_noise: bool) -> Tensor:
    """log Π_t p_t/q_t of paths [..., S + 1, D], without the last stage unless `last_noise`:
    float64 [...].
    """
    ratio = p.log_density(states[..., 1:, :]) - q.log_density(states[..., 1:, :])
    return ratio.sum(-1) if last_noise else ratio[..., :-1].sum(-1)
