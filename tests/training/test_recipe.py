import pytest

from tempera.errors import TemperaError
from tempera.training.recipe import Recipe


def test_weights_of_unrolled_steps_decay_and_sum_to_one() -> None:
    assert Recipe().step_weights(1) == [1.0]
    assert Recipe(ttt_steps=3).step_weights(4) == [0.25] * 4
    weights = Recipe(ttt_steps=2, ttt_decay=0.8).step_weights(3)
    assert weights == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_a_step_covers_the_same_images_however_it_is_split(
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
        {"cfg_dropout": 1.5},
        {"ttt_decay": 0.0},
        {"decay": "step"},
        {"mixed_precision": "fp8"},
        {"lr": float("nan")},
    ],
)
def test_impossible_values_are_named(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(TemperaError, match=f"{name}={value}"):
        Recipe(**wrong)  # type: ignore[arg-type]
