"""Metrics of decoding, from records made up here."""

from typing import Any

import pytest

from tempera.metrics.acceptance import acceptance

ROWS: list[dict[str, Any]] = [
    {"id": "a", "tokens": [0] * 8, "rounds": 4.0, "seconds": 2.0, "accepted": [3, 1],
     "tested": [4, 3], "logprob": -16.0, "logprob_squares": 40.0, "target_passes": 5.0,
     "residual_trials": 6.0, "residual_failures": 1.0, "tv": 0.5, "top1": float("nan")},
    {"id": "b", "tokens": [0] * 8, "rounds": 2.0, "seconds": 1.0, "accepted": [2, 4],
     "tested": [2, 5], "logprob": -8.0, "logprob_squares": 24.0, "target_passes": 3.0,
     "residual_trials": 4.0, "residual_failures": 0.0, "tv": float("nan"), "top1": float("nan")},
]  # fmt: skip


def test_metrics_are_ratios_and_means_over_prompts() -> None:
    found = acceptance(ROWS)
    assert {name: interval.value for name, interval in found.items()} == {
        "accepted_length": pytest.approx(16 / 6),
        "tau": pytest.approx(10 / 6),
        "throughput": pytest.approx(16 / 3),
        "logprob_per_token": pytest.approx(-24 / 16),
        "acceptance_rate": pytest.approx(10 / 14),
        "target_passes": 4.0,
        "residual_trials": 5.0,
        "residual_failures": 0.5,
        "trials_per_rejection": pytest.approx(10 / 4),
        "tv": 0.5,
        "logprob_deviation": pytest.approx((64 / 16 - (24 / 16) ** 2) ** 0.5),
    }
    assert found["tv"].n == 1 and found["accepted_length"].n == 2


def test_what_was_not_recorded_is_left_out() -> None:
    plain = [{name: row[name] for name in ("tokens", "rounds", "seconds")} for row in ROWS]
    found = acceptance([{**row, "accepted": [], "tested": []} for row in plain])
    assert set(found) == {"accepted_length", "tau", "throughput"}
    kept = acceptance([{**row, "accepted": [4, 5], "tested": [4, 5]} for row in ROWS])
    assert kept["acceptance_rate"].value == 1 and "trials_per_rejection" not in kept


def test_rounding_makes_no_deviation_imaginary() -> None:
    flat = [{**row, "logprob": -8.0, "logprob_squares": 7.9} for row in ROWS]
    assert acceptance(flat)["logprob_deviation"].value == 0


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize("name", ["tv", "logprob"])
def test_a_metric_stays_if_the_first_prompt_has_none(name: str, missing: float | None) -> None:
    key = "logprob_per_token" if name == "logprob" else name
    lacking = [{**ROWS[0], name: missing}, {**ROWS[1], name: -4.0}]
    found = acceptance(lacking)[key]
    assert found.value == (-0.5 if name == "logprob" else -4.0) and found.n == 1
