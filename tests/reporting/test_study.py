"""The study's tables: arms of equal length, paired by prompt and seed."""

import numpy as np
import pytest
from report_runs import finished

from tempera.reporting import study
from tempera.reporting.finished_run import Run
from tempera.reporting.tables import Section, long, texts

PROMPTS = 60
CLIP = np.random.default_rng(0).normal(0.9, 0.05, (3, PROMPTS))
"""Of plain autoregression, by seed and prompt."""


def run(method: str, loss: float = 0.0, tv: float = 0.0, wanted: float | None = None,
        seed: int = 0) -> Run:  # fmt: skip
    """A run whose CLIP score is AR's less a loss, with some noise of its own."""
    rng = np.random.default_rng([seed, len(method), round(1000 * loss)])
    clip = CLIP[seed] - loss + rng.normal(0, 0.002, PROMPTS) * (method != "ar")
    length = 1.0 if method == "ar" else wanted or 3.0
    values = {"clip_score": clip, "accepted_length": [length] * PROMPTS}
    values |= {"tv_bound": [tv] * PROMPTS, "kl_per_token": [tv**2] * PROMPTS}
    matched = None if wanted is None else {"option": "delta", "value": 1 + tv, "length": wanted}
    return finished(
        method,
        values | {"logprob_per_token": [-2 - tv] * PROMPTS},
        {"fid": {"value": 5 + 10 * loss}},
        seed=seed,
        matched=matched,
        expected_length=wanted,
    )


def runs(seed: int = 0) -> list[Run]:
    return [
        run("ar", seed=seed),
        run("eagle", seed=seed),
        run("uniform_rsd", 0.01, 0.2, 3.5, seed),
        run("coolsd", 0.02, 0.3, 3.5, seed),
        run("lantern", 0.06, 0.9, 3.5, seed),
        run("gsd", 0.5, 0.9, seed=seed),  # not of the study: its length is not matched
    ]


def lines(found: Section) -> dict[str, dict[str, str]]:
    shown = texts(found)
    first = shown.columns[0]
    return {line.pop(first): line for line in shown.to_dict("records")}


def test_tables_of_one_seed() -> None:
    overview, losses, differences, correlations = study.tables(runs())
    assert "60 images per run, seed 0" in overview.text
    assert [*lines(overview)] == ["ar", "eagle", *(f"{one} at 3.5" for one in (
        "uniform_rsd", "coolsd", "lantern"))]  # fmt: skip
    assert [*lines(overview)["coolsd at 3.5"].values()][:4] == [
        "delta",
        "1.3",
        "3.500",
        "3.500",
    ]

    assert [*texts(losses)] == ["run", "CLIP score ↑"] and "1 − 0.05 / 4" in losses.text
    cells = {name: cells["CLIP score ↑"] for name, cells in lines(losses).items()}
    assert cells["lantern at 3.5"].startswith("-0.06") and "*" in cells["lantern at 3.5"]
    assert "*" not in cells["eagle"]

    assert differences.title == "Study: difference from uniform_rsd at equal length"
    assert [*lines(differences)] == ["coolsd at 3.5", "lantern at 3.5"]
    cells = lines(differences)["coolsd at 3.5"]
    assert cells["summed TV bound ↓"] == "+0.10* (+0.10 … +0.10)"
    assert cells["accepted length"] == "+0.00 (+0.00 … +0.00)"

    assert len(correlations.numbers) == 3  # all three divergences grow with the loss
    for found in lines(correlations).values():
        assert found == {"loss of CLIP score": "+1.00 (+1.00 … +1.00)"}


def test_arms_are_compared_at_their_length_with_those_of_their_model_and_sampling() -> None:
    longer = [run("uniform_rsd", 0.03, 0.4, 4.0), run("coolsd", 0.04, 0.5, 4.0)]
    differences = study.tables([*runs(), *longer])[2]
    cells = [cells["accepted length"] for cells in lines(differences).values()]
    assert cells == ["+0.00 (+0.00 … +0.00)"] * 3
    warm = [one.model_copy(update={"settings": one.settings | {"top_k": 5}}) for one in runs()]
    both = study.tables([*runs(), *warm])
    assert len(both) == 2 * len(study.tables(runs()))
    assert [one.title.rpartition(", ")[2] for one in both[::4]] == ["top_k=None", "top_k=5"]


def test_another_reference() -> None:
    titles = [one.title for one in study.tables(runs(), "lantern")]
    assert "Study: difference from lantern at equal length" in titles
    assert len(study.tables(runs(), "none")) == 3


def test_an_infinite_divergence_has_no_difference_and_the_highest_rank() -> None:
    found = runs()
    found[4].values.loc[found[4].values.index[:9], "kl_per_token"] = np.inf
    found[4].metrics["kl_per_token"]["value"] = np.inf
    overview, _, differences, correlations = study.tables(found)
    assert lines(overview)["lantern at 3.5"]["KL bound per token"] == "infinite"
    assert lines(differences)["lantern at 3.5"]["KL bound per token ↓"] == "–"
    cells = lines(correlations)["KL bound per token, all lengths"]
    assert cells["loss of CLIP score"] == "+1.00 (+1.00 … +1.00)"


def test_seeds_of_an_arm_are_pooled() -> None:
    both = [*runs(0), *runs(1)]
    overview, losses = study.tables(both)[:2]
    assert "seed 0, 1" in overview.text and len(overview.numbers) == 5
    assert "seed 0." in study.tables(both[:10])[0].text  # one arm lacks the other seed
    both[4].weights["accepted_length"] = 3.0
    both[10].values["accepted_length"] = 5.5
    lantern = study._pooled([both[4], both[10]])
    assert {*lantern.values["accepted_length"]} == {(3 * 3.5 + 5.5) / 4}
    assert lantern.value("clip_score") == pytest.approx(lantern.values["clip_score"].mean())
    assert lines(losses)["lantern at 3.5"]["CLIP score ↑"].startswith("-0.06")


def test_fid_is_paired_by_its_pseudovalues_over_equal_sets() -> None:
    noise, found = np.random.default_rng(7).normal(0, 3, PROMPTS), runs()
    for place, one in enumerate(found):  # pseudo-values share most of their noise
        own = noise + np.random.default_rng(place).normal(0, 0.05, PROMPTS)
        one.values["fid"] = one.value("fid") + own - own.mean()
        one.weights["fid"] = 1.0
    _, losses, differences, correlations = study.tables(found)
    assert "1 − 0.05 / 8" in losses.text and "FID ↓" in differences.numbers
    cells = {name: cells["FID ↓"] for name, cells in lines(losses).items()}
    assert cells["lantern at 3.5"].startswith("+0.60* (") and "*" not in cells["eagle"]
    assert lines(correlations)["summed TV bound, all lengths"]["loss of FID"].startswith("+1.00 (")
    found[4].values = found[4].values.iloc[1:]
    _, losses, _, correlations = study.tables(found)
    assert lines(losses)["lantern at 3.5"]["FID ↓"] == "–"
    assert lines(losses)["coolsd at 3.5"]["FID ↓"].startswith("+0.20*")
    assert "loss of FID" not in correlations.numbers


def test_no_study_without_two_relaxations_of_one_length() -> None:
    assert study.tables(runs()[:3]) == []
    assert study.tables([runs()[0], run("coolsd", wanted=3.5), run("gsd", wanted=4.0)]) == []


def test_the_numbers_of_all_tables_are_in_one_frame() -> None:
    found = long(study.tables(runs())).set_index(["table", "row", "column"])
    title = "Study: difference from uniform_rsd at equal length"
    cell = found.loc[title, "coolsd at 3.5", "summed TV bound ↓"]
    assert cell["significant"] and cell["value"] == pytest.approx(0.1)
    assert [cell["low"], cell["high"], cell["n"]] == pytest.approx([0.1, 0.1, PROMPTS])
    overview = "Study: relaxations at equal accepted length"
    assert found.loc[overview, "coolsd at 3.5", "option"]["text"] == "delta"
