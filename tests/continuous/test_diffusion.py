"""Diffusion schedules and kernels against independent computations in float64."""

import math

import pytest
import torch
from torch import Tensor

from tempera.continuous.diffusion import (
    Denoiser,
    DiffusionSampling,
    Kernel,
    NoiseSchedule,
    betas,
    denoise,
    kernels_along,
    respaced,
    resume,
)
from tempera.continuous.noise import normal_of
from tempera.errors import TemperaError
from tempera.exactness.gaussians import Linear


def test_the_cosine_schedule_follows_its_formula() -> None:
    kept = torch.cumprod(1 - betas("cosine"), 0)
    for t in (0, 1, 500, 998):
        wanted = (
            math.cos(((t + 1) / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2
            / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
        )
        assert float(kept[t]) == pytest.approx(wanted, rel=1e-9)
    assert float(betas("cosine")[-1]) == 0.999


def test_the_linear_schedule_is_ho_et_al_s() -> None:
    assert [float(betas("linear")[t]) for t in (0, 999)] == pytest.approx([1e-4, 0.02])


def test_a_hundred_of_a_thousand_steps() -> None:
    times = respaced(1000, 100).tolist()
    assert times[:7] == [0, 10, 20, 30, 40, 50, 61] and times[-1] == 999 and len(set(times)) == 100


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("t", [0, 1, 13, 24])
def test_the_kernel_is_the_posterior_by_bayes(name: str, t: int) -> None:
    """Prior N(√ᾱ_{t−1} x₀, 1 − ᾱ_{t−1}) times likelihood N(x_t; √α x_{t−1}, β), with x₀ from the
    predicted noise.
    """
    schedule = NoiseSchedule(25, name)  # type: ignore[arg-type]
    kept = torch.cumprod(1 - betas(name), 0)[respaced(1000, 25)]  # type: ignore[arg-type]
    x, noise, place = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    kernel = schedule.kernel(torch.cat([noise, place], -1), x, torch.full((4,), t))
    now, before = float(kept[t]), float(kept[t - 1]) if t else 1.0
    alpha, start = now / before, (x - math.sqrt(1 - now) * noise) / math.sqrt(now)
    if t:
        variance = 1 / (1 / (1 - before) + alpha / (1 - alpha))
        mean = variance * (
            math.sqrt(before) * start / (1 - before) + math.sqrt(alpha) * x / (1 - alpha)
        )
    else:
        mean, variance = start, _posterior_variance(kept, 1)
    assert torch.allclose(kernel.mean, mean, atol=1e-9)
    log_std = 0.5 * ((1 + place) / 2 * math.log(1 - alpha) + (1 - place) / 2 * math.log(variance))
    assert torch.allclose(kernel.std.log(), log_std, atol=1e-9)


def _posterior_variance(kept: Tensor, t: int) -> float:
    return float((1 - kept[t] / kept[t - 1]) * (1 - kept[t - 1]) / (1 - kept[t]))


def test_ancestral_sampling_with_the_true_noise_draws_the_data() -> None:
    """Data N(3, ½²): E[noise | x_t] is linear in x_t, and the kernels carry N(0, 1) to the data."""
    schedule, stages = NoiseSchedule(100), 100

    class Known(Denoiser):
        channels, last_noise = 1, False
        stages = 100

        def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
            t = stages - 1 - stage
            kept = schedule.kept[t].unsqueeze(-1)
            noise = (1 - kept).sqrt() * (x - kept.sqrt() * 3) / (kept / 4 + 1 - kept)
            return schedule.kernel(torch.cat([noise, torch.zeros_like(noise)], -1), x, t)

    drawn = denoise(
        Known(), torch.zeros(20000, 0), torch.randn(20000, 101, 1, dtype=torch.float64)
    ).token
    assert float(drawn.mean()) == pytest.approx(3, abs=0.02)
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.02)


def test_resuming_anywhere_gives_the_same_token() -> None:
    head, condition, noise = Linear(4, 2), torch.randn(3, 2), torch.randn(3, 5, 2)
    path = denoise(head, condition, noise)
    done = torch.tensor([0, 2, 4])
    assert torch.allclose(
        resume(head, condition, path.states[torch.arange(3), done], done, noise[:, 1:]), path.token
    )
    along = kernels_along(head, condition, path.states[:, :-1])
    assert torch.allclose(along.mean, path.kernels.mean, atol=1e-6) and torch.allclose(
        along.std, path.kernels.std
    )


def test_completed_stages_are_not_computed_again() -> None:
    asked = []

    class Counting(Linear):
        def kernel(self, condition: Tensor, x: Tensor, stage: Tensor) -> Kernel:
            asked.append(int(stage[0]))
            return super().kernel(condition, x, stage)

    head = Counting(4, 2)
    resume(head, torch.randn(2, 2), torch.randn(2, 2), torch.tensor([2, 3]), torch.randn(2, 4, 2))
    assert asked == [2, 3]
    resume(head, torch.randn(2, 2), torch.randn(2, 2), torch.tensor([4, 4]), torch.randn(2, 4, 2))
    assert asked == [2, 3]


def test_the_last_stage_without_noise_gives_its_mean() -> None:
    path = denoise(Linear(3, 2, last_noise=False), torch.zeros(2, 2), torch.randn(2, 4, 2))
    assert torch.equal(path.token, path.kernels.mean[:, -1])


def test_densities_are_normal() -> None:
    kernel = Kernel(torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]]))
    x = torch.tensor([[0.3, 4.0]])
    wanted = sum(
        torch.distributions.Normal(kernel.mean[:, i], kernel.std[:, i]).log_prob(x[:, i])
        for i in range(2)
    )
    assert torch.allclose(kernel.log_density(x).float(), wanted)


def test_normal_draws_by_inversion() -> None:
    ends = normal_of(torch.tensor([0.0, 0.5, 1 - 2.0**-24]))
    assert ends.isfinite().all() and ends[1].abs() < 1e-6 and torch.allclose(ends[0], -ends[2])


def test_denoising_may_start_at_an_earlier_time_step() -> None:
    whole, part = NoiseSchedule(25), NoiseSchedule(25, start=960)
    assert whole.times[[0, -1]].tolist() == [0, 999] and part.times[[0, -1]].tolist() == [0, 960]
    assert whole.kept[-1].sqrt() < 1e-4 and part.kept[-1].sqrt() > 0.05
    x, t = torch.ones(1, 1), torch.tensor([24])
    wrong = [
        schedule.kernel(torch.tensor([[0.01, 0.0]]), x, t).mean
        - schedule.kernel(torch.zeros(1, 2), x, t).mean
        for schedule in (whole, part)
    ]
    assert (
        wrong[0].abs() > 5 and wrong[1].abs() < 0.05
    )  # what an error of 0.01 in the predicted noise does to the first step


def test_guidance_rises_with_the_tokens() -> None:
    known = torch.tensor([1, 128, 256])
    assert DiffusionSampling(guidance=3.0).scale(known, 256).tolist() == pytest.approx(
        [1 + 2 / 256, 2.0, 1 + 2 * 255 / 256]
    )
    assert DiffusionSampling(guidance=3.0, guidance_schedule="constant").scale(
        known, 256
    ).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": -1.0}, "guidance=-1.0 is not possible; give 0 or more"),
        ({"guidance": math.nan}, "guidance=nan is not possible; give 0 or more"),
        ({"guidance": math.inf}, "guidance=inf is not possible; give 0 or more"),
        ({"temperature": math.nan}, "temperature=nan is not possible for continuous tokens"),
        (
            {"temperature": 0.0},
            "temperature=0.0 is not possible for continuous tokens; give a number above 0",
        ),
        ({"denoising_steps": 1}, "denoising_steps=1 is not possible; give 2 to 1000"),
        (
            {"denoising_steps": 6, "denoising_start": 4},
            "denoising_steps=6 is not possible; give 2 to 5",
        ),
        (
            {"denoising_start": 1000},
            "denoising_start=1000 is no time step of the process; give 1 to 999",
        ),
    ],
)
def test_impossible_diffusion_sampling_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(TemperaError) as problem:
        DiffusionSampling(**options)  # type: ignore[arg-type]
    assert message in str(problem.value) and "\n" not in str(problem.value)
