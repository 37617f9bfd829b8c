"""Ancestral sampling of a token by a diffusion head: noise schedules, respaced steps and learned
variances as in MAR.

Ho et al. 2020 (DDPM); Nichol and Dhariwal 2021 (cosine schedule, learned variances, respacing). The
S respaced steps are numbered by *stage* k = 0 … S − 1 in sampling order: stage k goes from x_{S−k}
to x_{S−k−1}, so the last stage, k = S − 1, gives x₀.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from tempera.errors import TemperaError

TRAINING_STEPS = 1000
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class Kernel(NamedTuple):
    """A Gaussian with independent coordinates, N(mean, std²): both [..., D]."""

    mean: Tensor
    std: Tensor

    def at(self, noise: Tensor) -> Tensor:
        """Map standard normal `noise` [..., D] to a draw."""
        return self.mean + self.std * noise

    def log_density(self, x: Tensor) -> Tensor:
        """Log-density in nats, float64 [...], because rules use ratios of similar densities."""
        std = self.std.double()
        distance = (x.double() - self.mean.double()) / std
        return -(0.5 * distance**2 + std.log() + _HALF_LOG_TAU).sum(-1)

    def widened(self, factor: float) -> "Kernel":
        """The same mean, `factor` times the standard deviation."""
        return Kernel(self.mean, self.std * factor)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Kernel":
        """The same change of both leaves."""
        return Kernel(change(self.mean), change(self.std))


class DenoisingPath(NamedTuple):
    """The denoising path of a token.

    Attributes:
        states: x_S … x₀ in this order, [..., S + 1, D]; the last one is the token.
        kernels: kernel of each stage, leaves [..., S, D].
    """

    states: Tensor
    kernels: Kernel

    @property
    def token(self) -> Tensor:
        """x₀, [..., D]."""
        return self.states[..., -1, :]


class Denoiser(Protocol):
    """A diffusion head. It gives the kernel p(x_{S−k−1} | x_{S−k}, condition) of every stage k."""

    stages: int
    """S."""
    channels: int
    """D."""
    last_noise: bool
    """Whether the last stage draws from its kernel. Otherwise x₀ is the kernel's mean, as in MAR's
    sampler.
    """

    def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
        """Condition [N, C], x [N, D], stage int64 [N] -> leaves [N, D], temperature included."""

    def steps(self, condition: Tensor) -> Iterator[Callable[[Tensor], Kernel]]:
        """For each stage a function from x [N, D] to the stage's kernel. A head may compute in
        advance what does not depend on x.
        """
        for stage in range(self.stages):
            stages = torch.full((len(condition),), stage, device=condition.device)
            yield partial(self.kernel, condition, stage=stages)


@dataclass(frozen=True)
class DiffusionSampling:
    """How tokens are drawn from a network with a diffusion head.

    Attributes:
        guidance: classifier-free guidance scale; 1 is none.
        guidance_schedule: `linear` raises it from 1 at the first token of an image to its full
            value at the last (Muse); or `constant`.
        temperature: multiplies the standard deviation of every stage.
        denoising_steps: S.
        denoising_start: time step of the training process at which denoising begins, 1 to 999. MAR
            begins at the last one, where almost no signal is left (√ᾱ = 5·10⁻⁵) and an error of the
            predicted noise is amplified about 1,000 times. Small networks therefore begin earlier,
            for example at 960 (√ᾱ = 0.06), where a token is still almost pure noise.
        last_noise: whether the last stage adds noise. MAR's own sampler adds none.

    Raises:
        TemperaError: there are more denoising steps than steps up to `denoising_start`.
    """

    guidance: NonNegativeFloat = 1.0
    guidance_schedule: Literal["linear", "constant"] = "linear"
    temperature: PositiveFloat = 1.0
    denoising_steps: Annotated[int, Field(ge=2)] = 100
    denoising_start: Annotated[int, Field(ge=1, lt=TRAINING_STEPS)] = TRAINING_STEPS - 1
    last_noise: bool = False

    def __post_init__(self) -> None:
        if self.denoising_steps > self.denoising_start + 1:
            raise TemperaError(
                f"denoising_steps={self.denoising_steps} is more than the steps up to "
                f"denoising_start={self.denoising_start}: give "
                f"denoising_steps={self.denoising_start + 1} or less",
                option="denoising_steps",
            )

    @property
    def rows(self) -> int:
        """Rows of the network per image: 2 with guidance, otherwise 1."""
        return 1 if self.guidance == 1 else 2

    def scale(self, decoded: Tensor, length: int) -> Tensor:
        """Guidance scale of a step after which `decoded` [...] of `length` tokens are there. As in
        MAR, the last token is not counted.
        """
        if self.guidance_schedule == "constant":
            return torch.full_like(decoded, self.guidance, dtype=torch.float32)
        return 1 + (self.guidance - 1) * decoded.clamp(max=length - 1).float() / length


def betas() -> Tensor:
    """β of each step of the forward process, the cosine schedule, float64 [TRAINING_STEPS]."""
    ends = torch.arange(TRAINING_STEPS + 1, dtype=torch.float64) / TRAINING_STEPS
    alphas_cumprod = torch.cos((ends + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - alphas_cumprod[1:] / alphas_cumprod[:-1]).clamp(max=0.999)


def respaced(steps: int, wanted: int) -> Tensor:
    """Select `wanted` of `steps` time steps, evenly spaced, including the first and the last:
    int64 [wanted].
    """
    return torch.tensor([round(i * (steps - 1) / (wanted - 1)) for i in range(wanted)])


class NoiseSchedule:
    """The tables of a respaced process with S steps; t counts them from 0, near the data, to S − 1.

    Args:
        steps: S.
        start: time step of the training process at which denoising begins; MAR's is the last one.

    Attributes:
        times: training time step of each step, int64 [S], the network's input.
        alphas_cumprod: ᾱ_t, float64 [S].
    """

    def __init__(self, steps: int, start: int = TRAINING_STEPS - 1) -> None:
        self.times = respaced(start + 1, steps)
        self.alphas_cumprod = torch.cumprod(1 - betas(), 0)[self.times]
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.alphas_cumprod[:-1]])
        beta = 1 - self.alphas_cumprod / before
        posterior = beta * (1 - before) / (1 - self.alphas_cumprod)
        # the first variance is 0 and has no finite logarithm to interpolate
        posterior[0] = posterior[1]
        clean = beta * before.sqrt() / (1 - self.alphas_cumprod)
        current = (1 - before) * (1 - beta).sqrt() / (1 - self.alphas_cumprod)
        middle = (beta.log() + posterior.log()) / 4
        slope = (beta.log() - posterior.log()) / 4
        self._tables = torch.stack(
            [
                clean * self.alphas_cumprod.rsqrt() + current,
                clean * (1 / self.alphas_cumprod - 1).sqrt(),
                slope,
                middle,
            ],
            -1,
        )

    def to(self, device: torch.device) -> "NoiseSchedule":
        """The same schedule, its tables on a device."""
        self.times = self.times.to(device)
        self._tables = self._tables.to(device)
        return self

    def kernel(self, output: Tensor, x: Tensor, t: Tensor | int) -> Kernel:
        """The reverse kernel of a network's output (Nichol and Dhariwal, Eq. 15). The mean is
        linear in x and the predicted noise; the log standard deviation is interpolated.

        Args:
            output: predicted noise, and the variance's position between its bounds, −1 … 1:
                [N, 2D].
            x: x_{t+1}, [N, D].
            t: int64 [N], or one step for all rows.
        """
        noise, interpolation = output.chunk(2, -1)
        scale, remove, slope, middle = self._tables[t].to(x.dtype).split(1, dim=-1)
        mean = torch.addcmul(scale * x, remove, noise, value=-1)
        log_std = torch.addcmul(middle, slope, interpolation)
        return Kernel(mean, log_std.exp())


def denoise(denoiser: Denoiser, conditions: Tensor, noise: Tensor) -> DenoisingPath:
    """Draw tokens: conditions [..., C], standard normal noise [..., S + 1, D] (x_S first) -> their
    paths, leaves [..., S, D].
    """
    batch_shape = conditions.shape[:-1]
    noise = noise.flatten(0, -3)
    states = [noise[:, 0]]
    kernels: list[Kernel] = []
    for stage, kernel_at in enumerate(denoiser.steps(conditions.flatten(0, -2))):
        kernel = kernel_at(states[-1])
        draws = stage < denoiser.stages - 1 or denoiser.last_noise
        states.append(kernel.at(noise[:, stage + 1]) if draws else kernel.mean)
        kernels.append(kernel)
    means = torch.stack([kernel.mean for kernel in kernels], dim=1)
    stds = torch.stack([kernel.std for kernel in kernels], dim=1)
    path = torch.stack(states, dim=1)
    return DenoisingPath(
        path.unflatten(0, batch_shape),
        Kernel(means.unflatten(0, batch_shape), stds.unflatten(0, batch_shape)),
    )


def kernels_along(denoiser: Denoiser, conditions: Tensor, states: Tensor) -> Kernel:
    """The kernels of all stages at the states of paths, all at once: conditions [..., C], states
    x_S … x₀ [..., S + 1, D] -> leaves [..., S, D].
    """
    before = states[..., :-1, :]
    stage = torch.arange(denoiser.stages, device=states.device).expand(before.shape[:-1])
    conditions = conditions.unsqueeze(-2).expand(*stage.shape, -1)
    flat = denoiser.kernel(conditions.flatten(0, -2), before.flatten(0, -2), stage.flatten())
    return flat.map(lambda leaf: leaf.view_as(before))
