import pytest
import torch

from tempera.training.lr_schedules import (
    SCHEDULES,
    constant,
    cosine,
    linear,
    set_rate,
    trapezoid,
)
from tempera.training.recipe import Recipe


@pytest.mark.parametrize("decay", SCHEDULES)
def test_schedules_warm_up_and_stay_between_zero_and_one(decay: str) -> None:
    factor = Recipe(steps=100, warmup_steps=10, decay=decay).schedule  # type: ignore[arg-type]
    assert [factor(step) for step in range(10)] == pytest.approx([n / 10 for n in range(1, 11)])
    assert factor(10) == 1.0
    later = [factor(step) for step in range(10, 120)]
    assert later == sorted(later, reverse=True)
    assert later[-1] >= 0
    assert SCHEDULES[decay](0, 100)(0) == 1.0  # type: ignore[index]


def test_decay_of_each_schedule() -> None:
    assert linear(10, 100)(55) == pytest.approx(0.5)
    assert linear(10, 100)(99) == pytest.approx(1 / 90)
    assert cosine(10, 100)(55) == pytest.approx(0.5)
    assert cosine(10, 100)(100) == 0
    assert cosine(10, 100, floor=0.02)(100) == 0.02
    assert constant(10, 100)(99) == 1.0
    assert trapezoid(10, 100)(65) == 1.0
    assert trapezoid(10, 100, descent=0.5)(75) == pytest.approx(0.5)


def test_rates_are_multiples_of_the_optimisers_initial_rates() -> None:
    one, two = (torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (1.0, 3.0))
    for factor in (0.5, 0.1):
        set_rate([one, two], factor)
    assert [one.param_groups[0]["lr"], two.param_groups[0]["lr"]] == pytest.approx([0.1, 0.3])
