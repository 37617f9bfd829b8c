import pytest
import torch
from tiny_training import recipe_with

from tempera.errors import TemperaError
from tempera.training.lr_schedules import SCHEDULES, cosine, set_rate, trapezoid


@pytest.mark.parametrize(("parts", "processes"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_a_step_covers_the_same_images_however_it_is_split(parts: int, processes: int) -> None:
    recipe = recipe_with(batch_size=16, gradient_accumulation=parts)
    seen = [
        p
        for part in range(parts)
        for rank in range(processes)
        for p in recipe.positions(3, part, rank, processes)
    ]
    assert seen == list(range(48, 64))
    with pytest.raises(TemperaError, match="batch_size=17 is not divisible by"):
        recipe_with(batch_size=17, gradient_accumulation=2 * parts).part(processes)


def test_noise_is_less_for_longer_sequences_where_its_length_is_told() -> None:
    assert recipe_with(hidden_noise=0.2).noise(128) == pytest.approx(0.2)
    assert recipe_with(hidden_noise=0.2, noise_length=512).noise(1024) == pytest.approx(0.1)


@pytest.mark.parametrize("decay", SCHEDULES)
def test_schedules_warm_up_and_fall_from_one(decay: str) -> None:
    factor = recipe_with(steps=100, warmup_steps=10, decay=decay).schedule
    assert [factor(step) for step in range(10)] == pytest.approx([n / 10 for n in range(1, 11)])
    later = [factor(step) for step in range(9, 120)]
    assert later[:2] == [1.0, 1.0] and later == sorted(later, reverse=True) and later[-1] >= 0
    assert SCHEDULES[decay](0, 100)(0) == 1.0  # type: ignore[index]
    halfway = {"linear": 0.5, "cosine": 0.5, "constant": 1.0, "trapezoid": 1.0}
    assert factor(55) == pytest.approx(halfway[decay])
    assert cosine(10, 100, floor=0.02)(100) == 0.02
    assert trapezoid(10, 100, descent=0.5)(75) == pytest.approx(0.5)


def test_rates_are_multiples_of_the_optimisers_initial_rates() -> None:
    one, two = (torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (1.0, 3.0))
    for factor in (0.5, 0.1):
        set_rate([one, two], factor)
    assert [one.param_groups[0]["lr"], two.param_groups[0]["lr"]] == pytest.approx([0.1, 0.3])
