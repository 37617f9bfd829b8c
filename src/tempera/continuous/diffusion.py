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
from typing import Literal, NamedTuple, Protocol

import torch
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
        mean, std = self.mean.double(), self.std.double()
        return -(0.5 * ((x.double() - mean) / std) ** 2 + std.log() + _HALF_LOG_TAU).sum(-1)

    def widened(self, factor: float) -> "Kernel":
        """The same mean, `factor` times the standard deviation."""
        return Kernel(self.mean, self.std * factor)

    def pick(self, index: Tensor) -> "Kernel":
        """Select one kernel per row: leaves [B, N, D], index int64 [B] -> leaves [B, D]."""
        return Kernel(*(pick(leaf, index) for leaf in self))


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

    def steps(self, condition: Tensor, first: int = 0) -> Iterator[Callable[[Tensor], Kernel]]:
        """For each stage from `first` on, a function from x [N, D] to the stage's kernel. A head
        may compute in advance what does not depend on x.
        """
        for stage in range(first, self.stages):
            yield partial(
                self.kernel,
                condition,
                stage=torch.full((len(condition),), stage, device=condition.device),
            )


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
        TemperaError: a value is impossible.
    """

    guidance: float = 1.0
    guidance_schedule: Literal["linear", "constant"] = "linear"
    temperature: float = 1.0
    denoising_steps: int = 100
    denoising_start: int = TRAINING_STEPS - 1
    last_noise: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.guidance < math.inf:
            raise TemperaError(
                f"guidance={self.guidance} is not possible; give 0 or more (1 is no guidance)."
            )
        if not 0 < self.temperature < math.inf:
            raise TemperaError(
                f"temperature={self.temperature} is not possible for continuous tokens; give a "
                "number above 0."
            )
        if not 1 <= self.denoising_start < TRAINING_STEPS:
            raise TemperaError(
                f"denoising_start={self.denoising_start} is no time step of the process; give 1 "
                f"to {TRAINING_STEPS - 1}."
            )
        if not 2 <= self.denoising_steps <= self.denoising_start + 1:
            raise TemperaError(
                f"denoising_steps={self.denoising_steps} is not possible; give 2 to "
                f"{self.denoising_start + 1}."
            )

    @property
    def rows(self) -> int:
        """Rows of the network per image: 2 with guidance, otherwise 1."""
        return 1 if self.guidance == 1 else 2

    def scale(self, known: Tensor, length: int) -> Tensor:
        """Guidance scale of a step after which `known` [...] of `length` tokens are decoded. As in
        MAR, the last token is not counted.
        """
        if self.guidance_schedule == "constant":
            return torch.full_like(known, self.guidance, dtype=torch.float32)
        return 1 + (self.guidance - 1) * known.clamp(max=length - 1).float() / length


def betas(name: Literal["cosine", "linear"], steps: int = TRAINING_STEPS) -> Tensor:
    """β of each step of the forward process, float64 [steps]."""
    if name == "linear":
        scale = 1000 / steps
        return torch.linspace(scale * 1e-4, scale * 0.02, steps, dtype=torch.float64)
    ends = torch.arange(steps + 1, dtype=torch.float64) / steps
    kept = torch.cos((ends + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


def respaced(steps: int, wanted: int) -> Tensor:
    """Select `wanted` of `steps` time steps, evenly spaced, including the first and the last:
    int64 [wanted].
    """
    return torch.tensor([round(i * (steps - 1) / (wanted - 1)) for i in range(wanted)])


class NoiseSchedule:
    """The tables of a respaced process with S steps; t counts them from 0, near the data, to S − 1.

    Args:
        steps: S.
        name: noise schedule of the training process.
        training_steps: number of its steps.
        start: time step at which denoising begins; by default the last one.

    Attributes:
        times: training time step of each step, int64 [S], the network's input.
        kept: ᾱ_t, float64 [S].
    """

    def __init__(
        self,
        steps: int,
        name: Literal["cosine", "linear"] = "cosine",
        training_steps: int = TRAINING_STEPS,
        start: int | None = None,
    ) -> None:
        self.times = respaced(training_steps if start is None else start + 1, steps)
        self.kept = torch.cumprod(1 - betas(name, training_steps), 0)[self.times]
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.kept[:-1]])
        beta = 1 - self.kept / before
        posterior = beta * (1 - before) / (1 - self.kept)
        # the first variance is 0 and has no finite logarithm to interpolate
        posterior[0] = posterior[1]
        clean = beta * before.sqrt() / (1 - self.kept)
        current = (1 - before) * (1 - beta).sqrt() / (1 - self.kept)
        middle, slope = (beta.log() + posterior.log()) / 4, (beta.log() - posterior.log()) / 4
        self._tables = torch.stack(
            [
                clean * self.kept.rsqrt() + current,
                clean * (1 / self.kept - 1).sqrt(),
                slope,
                middle,
            ],
            -1,
        )
        self._there: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def kernel(self, output: Tensor, x: Tensor, t: Tensor | int) -> Kernel:
        """The reverse kernel of a network's output (Nichol and Dhariwal, Eq. 15). The mean is
        linear in x and the predicted noise; the log standard deviation is interpolated.

        Args:
            output: predicted noise, and the variance's position between its bounds, −1 … 1:
                [N, 2D].
            x: x_{t+1}, [N, D].
            t: int64 [N], or one step for all rows.
        """
        noise, place = output.chunk(2, -1)
        keep, remove, slope, middle = self._on(x)[t].split(1, -1)
        return Kernel(
            torch.addcmul(keep * x, remove, noise, value=-1),
            torch.addcmul(middle, slope, place).exp(),
        )

    def _on(self, like: Tensor) -> Tensor:
        """The tables [S, 4] on the device of `like`, moved once."""
        place = like.device, like.dtype
        if place not in self._there:
            self._there[place] = self._tables.to(like.device, like.dtype)
        return self._there[place]


def denoise(denoiser: Denoiser, condition: Tensor, noise: Tensor) -> DenoisingPath:
    """Draw tokens: condition [N, C], standard normal noise [N, S + 1, D] (x_S first) -> their
    paths, leaves [N, …].
    """
    states, kernels = [noise[:, 0]], []
    for stage, kernel_at in enumerate(denoiser.steps(condition)):
        kernel = kernel_at(states[-1])
        kernels.append(kernel)
        states.append(_draw(denoiser, kernel, noise[:, stage + 1], stage))
    means, stds = (torch.stack(leaves, 1) for leaves in zip(*kernels, strict=True))
    return DenoisingPath(torch.stack(states, 1), Kernel(means, stds))


def denoise_all(denoiser: Denoiser, conditions: Tensor, noise: Tensor) -> DenoisingPath:
    """Draw several tokens per row: conditions [B, M, C], noise [B, M, S + 1, D] -> paths, leaves
    [B, M, …].
    """
    batch = len(conditions)
    states, kernels = denoise(denoiser, conditions.flatten(0, 1), noise.flatten(0, 1))
    return DenoisingPath(
        states.unflatten(0, (batch, -1)),
        Kernel(*(leaf.unflatten(0, (batch, -1)) for leaf in kernels)),
    )


def resume(denoiser: Denoiser, condition: Tensor, x: Tensor, done: Tensor, noise: Tensor) -> Tensor:
    """Run the remaining stages of partly denoised tokens.

    Args:
        condition: [N, C].
        x: the states reached, [N, D].
        done: number of completed stages, int64 [N] in 0 … S.
        noise: standard normal, [N, S, D]; stage k uses entry k.

    Returns:
        the tokens, [N, D].
    """
    first = int(done.min())
    for stage, kernel_at in enumerate(denoiser.steps(condition, first), start=first):
        x = torch.where(
            (done <= stage).unsqueeze(-1), _draw(denoiser, kernel_at(x), noise[:, stage], stage), x
        )
    return x


def kernels_along(denoiser: Denoiser, condition: Tensor, states: Tensor) -> Kernel:
    """The kernels of every stage at given states, all at once: condition [N, C], states x_S … x₁
    [N, S, D] -> leaves [N, S, D].
    """
    count, stages, channels = states.shape
    stage = torch.arange(stages, device=states.device).expand(count, -1)
    kernel = denoiser.kernel(
        condition.repeat_interleave(stages, 0), states.reshape(-1, channels), stage.reshape(-1)
    )
    return Kernel(*(leaf.reshape(states.shape) for leaf in kernel))


def kernels_of_paths(denoiser: Denoiser, conditions: Tensor, states: Tensor) -> Kernel:
    """The kernels of all stages at the states of paths: conditions [B, M, C], states x_S … x₀ [B,
    M, S + 1, D] -> leaves [B, M, S, D].
    """
    along = kernels_along(denoiser, conditions.flatten(0, 1), states[:, :, :-1].flatten(0, 1))
    return Kernel(*(leaf.view_as(states[:, :, 1:]) for leaf in along))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Select one entry per row: values [B, N, …], index int64 [B] -> [B, …]."""
    return values[torch.arange(len(values), device=values.device), index]


def _draw(denoiser: Denoiser, kernel: Kernel, noise: Tensor, stage: int) -> Tensor:
    return kernel.at(noise) if stage < denoiser.stages - 1 or denoiser.last_noise else kernel.mean
