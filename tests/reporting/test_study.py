"""The study's tables: arms of equal length, paired by prompt and seed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from paths import CONF

from tempera.config.compose import composed
from tempera.metrics import table
from tempera.reporting import study

PROMPTS = 60
CLIP = np.random.default_rng(0).normal(0.9, 0.05, (3, PROMPTS))
"""Of plain autoregression, by seed and prompt."""


def run(
    family: str, loss: float = 0.0, tv: float = 0.0, wanted: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """A row whose CLIP score is AR's less a loss, with some noise of its own."""
    rng = np.random.default_rng([seed, len(family), round(1000 * loss)])
    clip = CLIP[seed] - loss + rng.normal(0, 0.002, PROMPTS) * (family != "ar")
    length = 1.0 if family == "ar" else wanted or 3.0
    values = {
        "clip_score": clip,
        "accepted_length": np.full(PROMPTS, length),
        "tv_bound": np.full(PROMPTS, tv),
        "kl_per_token": np.full(PROMPTS, tv**2),
        "logprob_per_token": np.full(PROMPTS, -2 - tv),
    }
    matched = None if wanted is None else {"option": "delta", "value": 1 + tv, "length": wanted}
    settings = {"method": family.split()[0], "model": "shapes", "seed": seed}
    return {
        "family": family,
        "delta": None if matched is None else matched["value"],
        "settings": settings | ({} if wanted is None else {"expected_length": wanted}),
        "matched": matched,
        "images": PROMPTS,
        "metrics": {
            key: {"value": float(one.mean()), "low": 0.0, "high": 9.0}
            for key, one in values.items()
        }
        | {"fid": {"value": 5 + 10 * loss}},
        "prompts": {
            f"p{place}": {key: (float(one[place]), 1.0) for key, one in values.items()}
            for place in range(PROMPTS)
        },
    }


def rows(seed: int = 0) -> list[Mapping[str, Any]]:
    return [
        run("ar", seed=seed),
        run("eagle", seed=seed),
        run("uniform_rsd", 0.01, 0.2, 3.5, seed),
        run("coolsd", 0.02, 0.3, 3.5, seed),
        run("lantern", 0.06, 0.9, 3.5, seed),
        run("coolsd delta=2", 0.5, 0.9, seed=seed),  # not of the study: its length is not matched
    ]


def lines(found: study.StudyTable) -> dict[str, list[str]]:
    return {line[0]: line[1:] for line in found.lines}


def test_what_was_found_for_each_arm() -> None:
    overview = study.tables(rows())[0]
    assert [line[0] for line in overview.lines] == [
        *("ar", "eagle", "uniform_rsd at 3.5", "coolsd at 3.5", "lantern at 3.5")
    ]
    assert lines(overview)["coolsd at 3.5"][:3] == ["delta=1.3", "3.500", "3.500"]
    assert "60 images a run, seed 0" in overview.text


def test_losses_against_plain_autoregression_are_corrected() -> None:
    found = study.tables(rows())[1]
    assert found.head == ["run", "CLIP score ↑"]
    assert "1 − 0.05 / 4" in found.text
    cells = {name: cells[0] for name, cells in lines(found).items()}
    assert cells["lantern at 3.5"].startswith("-0.06")
    assert "*" in cells["lantern at 3.5"]
    assert "*" not in cells["eagle"]


def test_differences_at_equal_length_have_a_reference() -> None:
    (found,) = (one for one in study.tables(rows()) if "equal length" in one.title[10:])
    assert found.title == "Study: difference from uniform_rsd at equal length"
    assert [line[0] for line in found.lines] == ["coolsd at 3.5", "lantern at 3.5"]
    cells = dict(zip(found.head[1:], lines(found)["coolsd at 3.5"], strict=True))
    assert cells["TV bound ↓"] == "+0.10* (+0.10 … +0.10)"
    assert cells["accepted length"] == "+0.00 (+0.00 … +0.00)"
    others = study.tables(rows(), "lantern")
    assert any(one.title == "Study: difference from lantern at equal length" for one in others)
    assert not any("difference from none" in one.title for one in study.tables(rows(), "none"))


def test_the_divergence_that_ranks_the_losses() -> None:
    found = study.tables(rows())[-1]
    assert found.head == ["divergence, length", "loss of FID", "loss of CLIP score"]
    cells = lines(found)["TV bound, all lengths"]
    assert cells == ["+1.00", "+1.00 (+1.00 … +1.00)"]
    assert [line[0] for line in found.lines] == [
        *("TV bound, all lengths", "KL bound per token, all lengths"),
        "fall of log-probability, all lengths",
    ]


def test_an_infinite_divergence_has_no_difference_and_the_highest_rank() -> None:
    found = rows()
    for prompt in list(found[4]["prompts"])[:9]:
        found[4]["prompts"][prompt]["kl_per_token"] = (float("inf"), 1.0)
    found[4]["metrics"]["kl_per_token"]["value"] = None
    overview, _, differences, correlations = study.tables(found)
    assert lines(overview)["lantern at 3.5"][4] == "infinite"
    cells = dict(zip(differences.head[1:], lines(differences)["lantern at 3.5"], strict=True))
    assert cells["KL bound per token ↓"] == "–"
    assert lines(correlations)["KL bound per token, all lengths"] == [
        *("+1.00", "+1.00 (+1.00 … +1.00)")
    ]


def test_seeds_of_an_arm_are_pooled() -> None:
    both = [*rows(0), *rows(1)]
    overview, losses = study.tables(both)[:2]
    assert "seed 0, 1" in overview.text
    assert len(overview.lines) == 5
    one = study.Arm("lantern", 3.5, [both[4], both[10]])
    found = one.weighted("clip_score", [0, 1], [f"p{place}" for place in range(PROMPTS)])
    assert found.denominators == pytest.approx(2)
    assert found.numerators.sum() / found.denominators.sum() == pytest.approx(
        one.value("clip_score")
    )
    assert lines(losses)["lantern at 3.5"][0].startswith("-0.06")


def with_fid(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with pseudo-values of their FID, which share most of their noise."""
    noise = np.random.default_rng(7).normal(0, 3, PROMPTS)
    for place, row in enumerate(found):
        own = noise + np.random.default_rng(place).normal(0, 0.05, PROMPTS)
        values = row["metrics"]["fid"]["value"] + own - own.mean()
        for prompt, value in zip(row["prompts"].values(), values, strict=True):
            prompt["fid"] = (float(value), 1.0)
    return found


def test_fid_is_paired_by_its_pseudovalues() -> None:
    _, losses, differences, correlations = study.tables(with_fid(rows()))
    assert losses.head == ["run", "FID ↓", "CLIP score ↑"]
    assert "1 − 0.05 / 8" in losses.text
    cells = {name: cells[0] for name, cells in lines(losses).items()}
    assert cells["lantern at 3.5"].startswith("+0.60* (")
    assert "*" not in cells["eagle"]
    assert "FID ↓" in differences.head
    assert lines(correlations)["TV bound, all lengths"][0].startswith("+1.00 (")


def test_fid_of_other_prompts_is_not_compared() -> None:
    found = with_fid(rows())
    del found[4]["prompts"]["p0"]
    _, losses, _, correlations = study.tables(found)
    assert lines(losses)["lantern at 3.5"][0] == "–"
    assert lines(losses)["lantern at 3.5"][1].startswith("-0.06")
    assert lines(losses)["coolsd at 3.5"][0].startswith("+0.20*")
    assert lines(correlations)["TV bound, all lengths"][0] == "+1.00"


def test_no_study_without_two_relaxations_of_one_length() -> None:
    assert study.tables(rows()[:3]) == []
    assert study.tables([rows()[0], run("coolsd", wanted=3.5), run("coolsd", wanted=4.0)]) == []


def test_every_divergence_is_a_paired_metric() -> None:
    assert all(table.find(key).paired for key in study.DIVERGENCES)


# experiment=study


@pytest.mark.slow
def test_the_experiment_composes() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("eval", ["experiment=study"], return_hydra_config=True)
    cases = list(cfg.hydra.sweeper.cases)
    assert cases[2] == "method=uniform_rsd expected_length=3.8,4.2"
    for case in cases[2:]:
        options = [one.split(",")[0] for one in case.split()]
        one = composed("eval", ["experiment=study", *options])
        assert one.free_parameter.option, case
        assert one.tree.length in (5, 7)
        assert (one.expected_length, one.limit, one.speed.prompts) == (3.8, 4096, 0)
        assert one.matching.prompts == 512
