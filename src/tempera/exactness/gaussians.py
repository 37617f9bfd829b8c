"""Exactness on Gaussians: does the real decoding loop draw continuous tokens from the claimed law?

Target and draft are toy heads with known kernels, so the law of a token given the tokens before it
is known. The emitted images are whitened. If the claim is true, the result is independent standard
normal, which Kolmogorov-Smirnov tests check for each coordinate and for random projections of whole
images:

    >>> from tempera.continuous.rules import CSpD, PathCoupling
    >>> from tempera.exactness import gaussians
    >>> gaussians.check(PathCoupling(), gaussians.Linear(stages=3, channels=2)).agrees
    True
    >>> gaussians.check(CSpD(), gaussians.Linear(stages=3, channels=2)).agrees
    False

`python docs/continuous_laws.py` prints how biased every rule is.
"""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from scipy.stats import kstest
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, Kernel
from tempera.continuous.loop import Context, ContinuousTrace, Parallel, Speculative
from tempera.continuous.rules import DensityRule
from tempera.decoding.loop import Output
from tempera.exactness.tables import LEVEL, new_streams


class ToyHead(Denoiser, Protocol):
    """A diffusion head whose tokens can be whitened."""

    def whiten(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """Whiten tokens [N, D] with conditions [N, D]: independent standard normal coordinates if
        the tokens have this head's law.
        """

    def imitation(self, spread: float, seed: int = 1) -> "ToyHead":
        """A draft's head: this one with parameters perturbed by about `spread`."""


class Linear(Denoiser):
    """Stage k draws from N(A_k x + c + b_k, σ_k²), c the condition: tokens are normal.

    The parameters are random, mean ± standard deviation: A_k 0.7·I ± 0.15, b_k 0 ± 0.3, log σ_k
    -0.6 ± 0.2.

    Args:
        stages: S; with one, x_S has no effect and the token is normal.
        channels: D.
        last_noise: whether the last stage draws.
        seed: of the parameters.
    """

    def __init__(
        self, stages: int = 3, channels: int = 1, last_noise: bool = True, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.stages = stages
        self.channels = channels
        self.last_noise = last_noise
        change = torch.randn(stages, channels, channels, generator=generator)
        turn = 0.7 * torch.eye(channels) + 0.15 * change
        self.turn = turn * (stages > 1)
        self.shift = 0.3 * torch.randn(stages, channels, generator=generator)
        self.log_std = -0.6 + 0.2 * torch.randn(stages, channels, generator=generator)

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """See `Denoiser`."""
        mean = (self.turn[stage] @ x.unsqueeze(-1)).squeeze(-1) + condition + self.shift[stage]
        return Kernel(mean, self.log_std[stage].exp())

    def whiten(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """See `ToyHead`: the moments are carried through the stages."""
        mean = torch.zeros_like(tokens).double()
        covariance = torch.eye(self.channels, dtype=torch.float64)
        for stage in range(self.stages):
            turn = self.turn[stage].double()
            noise = (2 * self.log_std[stage].double()).exp()
            if stage == self.stages - 1 and not self.last_noise:
                noise = torch.zeros_like(noise)
            mean = mean @ turn.T + condition.double() + self.shift[stage].double()
            covariance = turn @ covariance @ turn.T + noise.diag()
        lower = torch.linalg.cholesky(covariance)
        centred = (tokens.double() - mean).T
        out: Tensor = torch.linalg.solve_triangular(lower, centred, upper=False).T
        return out

    def imitation(self, spread: float, seed: int = 1) -> "Linear":
        """See `ToyHead`."""
        other = copy.copy(self)
        generator = torch.Generator().manual_seed(seed)
        for name in ("turn", "shift", "log_std"):
            value = getattr(self, name)
            setattr(other, name, value + spread * torch.randn(value.shape, generator=generator))
        other.turn = other.turn * (self.stages > 1)
        return other


class Wavy(Denoiser):
    """One channel, and kernels that are not linear: stage k draws from N(a_k x + h_k sin 2x + c,
    (σ_k (1 + 0.4 cos x))²).

    The parameters are random, mean ± standard deviation: a_k 0.8 ± 0.15, h_k 0.6 ± 0.15, log σ_k
    -1 ± 0.15.
    """

    channels = 1
    last_noise = True

    def __init__(self, stages: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.stages = stages
        self.slope = 0.8 + 0.15 * torch.randn(stages, generator=generator)
        self.wave = 0.6 + 0.15 * torch.randn(stages, generator=generator)
        self.log_std = -1.0 + 0.15 * torch.randn(stages, generator=generator)

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """See `Denoiser`."""
        slope = self.slope.to(x.dtype)[stage].unsqueeze(-1)
        wave = self.wave.to(x.dtype)[stage].unsqueeze(-1)
        log_std = self.log_std.to(x.dtype)[stage].unsqueeze(-1)
        mean = slope * x + wave * (2 * x).sin() + condition
        std = log_std.exp() * (1 + 0.4 * x.cos())
        return Kernel(mean, std)

    def whiten(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """See `ToyHead`: the distribution function by quadrature on a grid, for one condition that
        all rows share.
        """
        grid = torch.linspace(-9, 9, 1501, dtype=torch.float64)
        step = grid[1] - grid[0]
        density = torch.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi)
        for stage in range(self.stages):
            index = torch.full((len(grid),), stage)
            conditions = condition[:1].double().expand(len(grid), 1)
            kernel = self.kernel(conditions, grid.unsqueeze(-1), index)
            standard = (grid - kernel.mean) / kernel.std
            before = density.unsqueeze(-1)
            cumulative = (torch.special.ndtr(standard) * before).sum(0) * step
            unscaled = (torch.exp(-0.5 * standard**2) / kernel.std * before).sum(0)
            density = unscaled * step / math.sqrt(2 * math.pi)
        grid_index = ((tokens.double() + 9) / step).clamp(0, len(grid) - 1.001)
        low = grid_index.long()
        share = torch.lerp(cumulative[low], cumulative[low + 1], grid_index - low)
        out: Tensor = torch.special.ndtri(share.clamp(1e-12, 1 - 1e-12))
        return out

    def imitation(self, spread: float, seed: int = 1) -> "Wavy":
        """See `ToyHead`."""
        other = copy.copy(self)
        generator = torch.Generator().manual_seed(seed)
        for name in ("slope", "wave", "log_std"):
            value = getattr(self, name)
            setattr(other, name, value + spread * torch.randn(value.shape, generator=generator))
        return other


class Toy:
    """An autoregressive model with a toy head: a token's condition is an offset of its place in the
    image, and a weighted sum of the tokens that are known. Implements `Model`.

    Args:
        head: draws the tokens.
        length: T.
        coupling: standard deviation of the weights; that of the offsets is 0.5, and 0 without
            coupling.
        seed: of offsets and weights; a target and its draft share them.
    """

    identity = "toy"
    dtype = torch.float32
    compiled = False

    def __init__(
        self, head: ToyHead, length: int = 3, coupling: float = 0.4, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.denoiser: Denoiser = head
        self.head = head
        self.length = length
        self.grid = 1, length
        self.channels = head.channels
        offsets = 0.5 * torch.randn(length, head.channels, generator=generator)
        self.offsets = offsets * (coupling > 0)
        self.weights = coupling * torch.randn(length, length, generator=generator)

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """There is no text encoder."""
        return nullcontext()

    def begin(self, prompts: list[str], rows: Tensor | None = None) -> None:
        """Every prompt has the same law."""

    def conditions(self, context: Context, indices: Tensor, after: Tensor) -> Tensor:
        """See `Model`."""
        is_decoded = torch.arange(self.length) < context.lengths.unsqueeze(1)
        tokens = context.tokens[:, : self.length]
        decoded = torch.where(is_decoded.unsqueeze(-1), tokens, torch.zeros(()))
        positions = context.order.gather(1, indices)
        return self.offsets[positions] + self.weights[positions] @ decoded

    def whiten(self, output: Output) -> Tensor:
        """What an output's tokens must be if the model's head drew them one after the other:
        standard normal, float64 [B, T · D].
        """
        trace = output.trace
        assert isinstance(trace, ContinuousTrace)
        tokens = output.tokens.gather(1, trace.order.unsqueeze(-1).expand_as(output.tokens))
        rows = torch.arange(len(tokens))
        whitened = []
        for index in range(self.length):
            context = Context(rows, tokens, trace.order, torch.full_like(rows, index), index)
            indices = torch.full_like(rows, index).unsqueeze(1)
            conditions = self.conditions(context, indices, indices + 1)
            whitened.append(self.head.whiten(conditions[:, 0], tokens[:, index]))
        return torch.cat(whitened, dim=1)


@dataclass(frozen=True)
class SampleComparison:
    """Observed numbers against the standard normal law.

    Attributes:
        distance: Kolmogorov-Smirnov, the largest over coordinates and projections.
        margin: half the width of its 95 % confidence band (Dvoretzky, Kiefer, Wolfowitz and
            Massart), tests taken one by one.
        p_value: of the smallest of the tests, times their number.
        rows: images.
        accepted_length: mean tokens per round.
        trials: mean proposals of the residual sampler per image.
    """

    distance: float
    margin: float
    p_value: float
    rows: int
    accepted_length: float
    trials: float

    @property
    def agrees(self) -> bool:
        """Whether the law is not rejected at the level 10⁻⁴."""
        return self.p_value > LEVEL

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        return (
            f"{verdict}: p = {self.p_value:.2g} (rejects below {LEVEL:g}), "
            f"KS {self.distance:.4f} ± {self.margin:.4f}, {self.rows} rows, "
            f"accepted length {self.accepted_length:.2f}, {self.trials:.2f} residual trials per "
            "image"
        )


def compare(whitened: Tensor, output: Output, projections: int = 8) -> SampleComparison:
    """Test columns [B, K] that should be independent standard normal: each alone, and some random
    directions of all.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(
        torch.randn(whitened.shape[1], projections, generator=generator, dtype=torch.float64), dim=0
    )
    columns = torch.cat([whitened, whitened @ directions], 1) if whitened.shape[1] > 1 else whitened
    test = kstest(columns.numpy(), "norm", method="asymp", axis=0)
    trace = output.trace
    rows = len(columns)
    assert isinstance(trace, ContinuousTrace)
    return SampleComparison(
        float(test.statistic.max()),
        math.sqrt(math.log(2 / 0.05) / (2 * rows)),
        min(1.0, columns.shape[1] * float(test.pvalue.min())),
        rows,
        float(trace.accepted_length.mean()),
        float(trace.trials.sum(-1).double().mean()),
    )


def check(
    rule: DensityRule | None,
    head: ToyHead,
    *,
    spread: float = 0.25,
    draft: ToyHead | None = None,
    gamma: int = 2,
    prefill: float = 0.0,
    steps: int | None = None,
    length: int = 3,
    rows: int = 200_000,
    seed: int = 0,
) -> SampleComparison:
    """Decode toy images with a rule and compare them with the target's law.

    Args:
        rule: the acceptance rule; without one the target decodes alone, or the draft if given.
        head: the target's.
        spread: how far the draft's parameters are from it.
        draft: the draft's head; by default an imitation of the target's.
        gamma: drafted tokens per round.
        prefill: share of the tokens that the target draws first.
        steps: drafting steps per image; none for one token a step.
        length: tokens per image; with 1 the tokens do not depend on their place.
        rows: images.
        seed: of the draws.
    """
    coupling = 0.4 if length > 1 else 0.0
    target = Toy(head, length, coupling)
    drafter = Toy(draft or head.imitation(spread), length, coupling)
    method = Parallel() if rule is None else Speculative(drafter, rule, gamma, prefill, steps)
    if rule is None and draft is not None:
        method = Parallel(model=drafter)
    streams = new_streams(rows, seed)
    output = method.decode(target, streams, streams.ids)
    return compare(target.whiten(output), output)
