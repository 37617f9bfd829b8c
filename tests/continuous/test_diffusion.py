"""Diffusion schedules and kernels against independent computations in float64."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from tempera.config.instantiate import instantiate
from tempera.continuous.diffusion import (
    TRAINING_STEPS,
    Denoiser,
    DiffusionSampling,
    Kernel,
    NoiseSchedule,
    betas,
    denoise,
    kernels_along,
    respaced,
)
from tempera.continuous.noise import normal_of
from tempera.errors import TemperaError
from tempera.exactness.gaussians import Linear


def test_the_cosine_schedule_follows_its_formula() -> None:
    kept = torch.cumprod(1 - betas(), 0)
    ends = torch.tensor([0.0, 1, 2, 501, 999], dtype=torch.float64) / TRAINING_STEPS
    waves = ((ends + 0.008) / 1.008 * math.pi / 2).cos() ** 2
    torch.testing.assert_close(kept[[0, 1, 500, 998]], waves[1:] / waves[0])
    assert float(betas()[-1]) == 0.999


def test_a_hundred_of_a_thousand_steps() -> None:
    times = respaced(1000, 100).tolist()
    assert times[:7] == [0, 10, 20, 30, 40, 50, 61] and times[-1] == 999 and len(set(times)) == 100


@pytest.mark.parametrize("t", [0, 1, 13, 24])
def test_the_kernel_is_the_posterior_by_bayes(t: int) -> None:
    """Prior N(√ᾱ_{t−1} x₀, 1 − ᾱ_{t−1}) times likelihood N(x_t; √α x_{t−1}, β), with x₀ from the
    predicted noise. The first step has the second one's variance.
    """
    schedule = NoiseSchedule(25)
    kept = torch.cumprod(1 - betas(), 0)[respaced(1000, 25)].tolist()
    x, noise, place = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    kernel = schedule.kernel(torch.cat([noise, place], -1), x, torch.full((4,), t))

    def variance(t: int) -> float:
        alpha = kept[t] / kept[t - 1]
        return 1 / (1 / (1 - kept[t - 1]) + alpha / (1 - alpha))

    now, before = kept[t], kept[t - 1] if t else 1.0
    alpha, mean = now / before, (x - math.sqrt(1 - now) * noise) / math.sqrt(now)
    if t:
        prior, likelihood = math.sqrt(before) * mean / (1 - before), math.sqrt(alpha) * x
        mean = variance(t) * (prior + likelihood / (1 - alpha))
    bounds = math.log(1 - alpha), math.log(variance(t or 1))
    torch.testing.assert_close(kernel.mean, mean)
    log_std = ((1 + place) * bounds[0] + (1 - place) * bounds[1]) / 4
    torch.testing.assert_close(kernel.std.log(), log_std)


def test_ancestral_sampling_with_the_true_noise_draws_the_data() -> None:
    """Data N(3, ½²): E[noise | x_t] is linear in x_t, and the kernels carry N(0, 1) to the data."""
    schedule = NoiseSchedule(100)

    class Known(Denoiser):
        channels, last_noise, stages = 1, False, 100

        def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
            t = self.stages - 1 - stage
            kept = schedule.alphas_cumprod[t].unsqueeze(-1)
            noise = (1 - kept).sqrt() * (x - kept.sqrt() * 3) / (kept / 4 + 1 - kept)
            return schedule.kernel(torch.cat([noise, torch.zeros_like(noise)], -1), x, t)

    noise = torch.randn(8000, 101, 1, dtype=torch.float64)
    drawn = denoise(Known(), torch.zeros(8000, 0), noise).token
    assert float(drawn.mean()) == pytest.approx(3, abs=0.03)
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("last_noise", [True, False])
def test_tokens_of_several_rows_are_those_of_each(last_noise: bool) -> None:
    head, conditions = Linear(4, 2, last_noise), torch.randn(3, 5, 2)
    noise = torch.randn(3, 5, 5, 2)
    paths = denoise(head, conditions, noise)
    for row in range(3):
        alone = denoise(head, conditions[row], noise[row])
        torch.testing.assert_close(alone.states, paths.states[row])
    along = kernels_along(head, conditions, paths.states)
    torch.testing.assert_close(along, paths.kernels)
    drawn = along.at(noise[:, :, 1:])
    if not last_noise:
        drawn[:, :, -1] = along.mean[:, :, -1]
    torch.testing.assert_close(paths.states[:, :, 1:], drawn)


def test_densities_and_draws_are_normal() -> None:
    kernel = Kernel(torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]]))
    x = torch.tensor([[0.3, 4.0]])
    wanted = torch.distributions.Normal(kernel.mean.double(), kernel.std).log_prob(x).sum(-1)
    torch.testing.assert_close(kernel.log_density(x), wanted)
    ends = normal_of(torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert ends.isfinite().all() and ends[2] == 0 and ends[1] == -ends[3] and ends[0] < ends[1]


def test_denoising_may_start_at_an_earlier_time_step() -> None:
    """An error of 0.01 in the predicted noise matters less in its first step."""
    schedules, errors = [NoiseSchedule(25), NoiseSchedule(25, start=960)], list[float]()
    for schedule in schedules:
        wrong, right = (
            schedule.kernel(torch.tensor([[noise, 0.0]]), torch.ones(1, 1), 24).mean.item()
            for noise in (0.01, 0.0)
        )
        errors.append(abs(wrong - right))
    assert [schedule.times[[0, -1]].tolist() for schedule in schedules] == [[0, 999], [0, 960]]
    assert errors[0] > 5 and errors[1] < 0.05


def test_guidance_rises_with_the_tokens() -> None:
    known = torch.tensor([1, 128, 256])
    rising = DiffusionSampling(guidance=3.0).scale(known, 256)
    assert rising.tolist() == pytest.approx([1 + 2 / 256, 2.0, 1 + 2 * 255 / 256])
    assert DiffusionSampling(3.0, "constant").scale(known, 256).tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("target", "option", "value"),
    [
        ("diffusion.DiffusionSampling", "guidance", math.nan),
        ("diffusion.DiffusionSampling", "temperature", 0),
        ("diffusion.DiffusionSampling", "denoising_steps", 1001),
        ("diffusion.DiffusionSampling", "denoising_start", 1000),
        ("loop.Parallel", "steps", 0),
        ("loop.Speculative", "gamma", 0),
        ("loop.Speculative", "prefill", 1.0),
        ("rules.PathCoupling", "trials", 0),
    ],
)
def test_an_impossible_value_is_refused_by_its_option(
    target: str, option: str, value: float
) -> None:
    node = OmegaConf.create({"_target_": f"tempera.continuous.{target}", option: value})
    extra = {"drafter": None, "rule": None} if target.endswith("Speculative") else {}
    with pytest.raises(TemperaError) as problem:
        instantiate(node, **extra)
    assert problem.value.option == option and "\n" not in str(problem.value)
