"""The verdict of a report: what is fast, what is exact, and what it calls a loss."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_runs import finished

from tempera.reporting.baseline import compare
from tempera.reporting.finished_run import Run
from tempera.reporting.verdict import FEWEST, verdict


def run_at(speed: float | None, bound: float, length: float = 1.0, **quality: Any) -> Run:
    """A run of this speed-up, or untimed with this accepted length, and of this KL bound."""
    metrics = {"kl_per_token": {"value": bound}, "accepted_length": {"value": length}}
    if speed is not None:
        metrics["speedup"] = {"value": speed}
    return finished("coolsd", quality, metrics, delta=speed or length)


def test_how_fast_each_run_is_and_what_that_costs() -> None:
    noise = np.random.default_rng(0).random(FEWEST)
    plain = finished("ar", {"clip_score": noise})
    runs = [
        plain,
        run_at(0.82, 0.0, clip_score=noise),
        run_at(1.81, 0.0647, clip_score=noise - 0.25),
        run_at(2.5, np.inf),
        finished("eagle", {"accepted_length": [3.0]}, exact=True),
    ]
    compare(runs)
    assert verdict(runs) == (
        "coolsd δ=2.5: 2.5 times as fast, KL infinite; "
        "coolsd δ=1.81: 1.8 times as fast, KL at most 0.065 nats per token, CLIP score -0.2500; "
        "coolsd δ=0.82: slower, 0.8 times as fast, no significant loss in 64 pictures; "
        "eagle: 3.00 tokens per round, not timed, exact: same distribution."
    )
    assert verdict([plain]) == ""
    assert verdict([run_at(1.1, 3.4e-8)]) == "coolsd δ=1.1: 1.1 times as fast."  # a rounding error


def test_of_many_runs_those_that_no_other_beats_are_named() -> None:
    speeds = ((1.0, 0.0), (1.5, 0.1), (1.5, 0.05), (1.4, 0.06), (2.0, 0.2))
    runs = [run_at(*one) for one in speeds]
    assert verdict(runs) == (
        "coolsd δ=2: 2.0 times as fast, KL at most 0.2 nats per token; coolsd δ=1.5: 1.5 times as "
        "fast, KL at most 0.05 nats per token; coolsd δ=1: 1.0 times as fast; 2 other runs, each "
        "no faster than one of these and no closer to the target."
    )


def test_accepted_lengths_do_not_beat_speed_ups() -> None:
    """An untimed run of three tokens is not faster than a timed one at 2.1 times the speed; among
    themselves untimed runs are judged. Neither are two machines.
    """
    timed = [run_at(2.1, 0.2), run_at(1.8, 0.1)]
    untimed = [run_at(None, 0.05, 3.0), run_at(None, 0.06, 2.0)]
    elsewhere = finished("gsd", metrics=timed[1].metrics, machine="another")
    assert verdict([*untimed, *timed, elsewhere]) == (
        "coolsd δ=2.1: 2.1 times as fast, KL at most 0.2 nats per token; coolsd δ=1.8: 1.8 times "
        "as fast, KL at most 0.1 nats per token; gsd: 1.8 times as fast, KL at most 0.1 nats per "
        "token; coolsd δ=3: 3.00 tokens per round, not timed, KL at most 0.05 nats per token; "
        "1 other run, each no faster than one of these and no closer to the target."
    )


def test_an_exact_rule_loses_nothing_whatever_its_pictures_are() -> None:
    """Unless its bound says that it is not exact."""
    noise = np.random.default_rng(0).random(FEWEST)
    worse = {"clip_score": noise - 0.1, "broken": np.ones(FEWEST)}
    runs = [
        finished("ar", {"clip_score": noise, "broken": np.zeros(FEWEST)}),
        finished("parallel_block", worse, {"speedup": {"value": 1.8}}, exact=True),
        finished("mine", worse, {"kl_per_token": {"value": 0.03}}, exact=True),
    ]
    compare(runs)
    first, second = verdict(runs).split("; ")
    assert first == "parallel_block: 1.8 times as fast, exact: same distribution"
    assert second.endswith(
        "not timed, KL at most 0.03 nats per token, although its rule says that it is exact."
    )


@pytest.mark.parametrize(
    ("broken", "pictures", "said"),
    [
        (2, 8, "8 pictures are too few to detect a loss (64 are needed)"),
        (63, 63, "63 pictures are too few to detect a loss (64 are needed)"),
        (6, 64, "no significant loss in 64 pictures"),
        (7, 64, "broken pictures +0.109"),
        (40, 512, "broken pictures +0.078"),
    ],
)
def test_broken_pictures_where_the_baseline_has_none(broken: int, pictures: int, said: str) -> None:
    """The test of signs: seven of seven are chance once in 128 times."""
    values = np.arange(pictures) < broken
    runs = [finished("ar", {"broken": np.zeros(pictures)}), finished("gsd", {"broken": values})]
    compare(runs)
    assert verdict(runs).endswith(f"not timed, {said}.")


def test_an_exact_run_beside_it_hides_no_loss() -> None:
    """Nothing is looked for in an exact run, so that the correction is for no more tests."""
    runs = [
        finished("ar", {"broken": np.zeros(64)}),
        finished("gsd", {"broken": np.arange(64) < 7}),
        finished("eagle", {"broken": np.zeros(64)}, exact=True),
    ]
    compare(runs)
    assert "broken pictures +0.109" in verdict(runs)


def test_pictures_that_only_one_run_has_do_not_count() -> None:
    runs = [finished("ar", {"broken": np.zeros(40)}), finished("gsd", {"broken": np.ones(90)})]
    compare(runs)
    assert "40 pictures are too few" in verdict(runs)


@pytest.mark.parametrize("pictures", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_few_sweeps_of_equal_distributions_are_told_to_lose_anything(pictures: int) -> None:
    """Four runs with the law of plain autoregression, of whose rules nothing is known, in three
    metrics: skewed, rare and of the whole set. At most 2.5% of 512 such sweeps may name a loss.
    """
    rng = np.random.default_rng(20261128)
    runs = [finished(method) for method in ("coolsd", "gsd", "lantern", "uniform_rsd")]
    alarms = 0
    for _ in range(512):
        prompts = rng.normal(0, 0.03, pictures)  # some are hard for every method
        plain, *others = [
            pd.DataFrame({
                "clip_score": 0.3 + prompts - rng.gamma(0.5, 0.05, pictures),
                "broken": 1.0 * (rng.random(pictures) < 0.04),
                "fid": 20 + rng.normal(0, 30, pictures),
            }) for _ in range(5)
        ]  # fmt: skip
        for run, values in zip(runs, others, strict=True):  # as `compare`, without intervals
            run.images = pictures
            run.gaps = values - plain
            run.differences = {key: {"value": gap} for key, gap in run.gaps.mean().items()}
        said = verdict(runs)
        alarms += "+" in said or "-" in said
    assert alarms <= 0.025 * 512
