import pytest

from tempera.errors import TemperaError
from tempera.training.recipe import Recipe


def test_rate_warms_up_then_decays_to_zero() -> None:
    recipe = Recipe(steps=100, warmup_steps=10, lr=1.0)
    assert recipe.rate(0) == pytest.approx(0.1)
    assert recipe.rate(9) == recipe.rate(10) == 1.0
    assert recipe.rate(55) == pytest.approx(0.5)
    assert recipe.rate(99) == pytest.approx(1 / 90)
    assert Recipe(steps=100, warmup_steps=10, lr=1.0, decay="cosine").rate(55) == pytest.approx(0.5)
    assert Recipe(steps=100, warmup_steps=10, lr=1.0, decay="constant").rate(99) == 1.0


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_a_step_covers_the_same_images_whatever_the_parts_and_processes(
    accumulation: int, processes: int
) -> None:
    recipe = Recipe(batch_size=16, gradient_accumulation=accumulation)
    seen = [
        p
        for part in range(accumulation)
        for rank in range(processes)
        for p in recipe.positions(3, part, rank, processes)
    ]
    assert seen == list(range(48, 64))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        TemperaError,
        match="batch_size=16 does not divide into gradient_accumulation=3 × 2 processes: give a "
        "multiple of 6",
    ):
        Recipe(batch_size=16, gradient_accumulation=3).part(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"steps": 0},
        {"drop": 1.5},
        {"decay": "step"},
        {"mixed_precision": "fp8"},
        {"lr": float("nan")},
    ],
)
def test_impossible_values_are_named(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(TemperaError, match=f"{name}={value}"):
        Recipe(**wrong)  # type: ignore[arg-type]
