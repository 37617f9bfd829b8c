"""Schedules from recorded chains: what is recorded is what theory expects, and a schedule solved
for it keeps its promise in the loop.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from paths import ROOT

from tempera.config.build import build_rule
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation.calibration import (
    Recorder,
    Statistics,
    calibrated,
    conditions,
    load_statistics,
    optimal,
    record,
    save_statistics,
)
from tempera.exactness.tables import FirstRoundOnly, TableDraft, TableTarget, emit
from tempera.exactness.theory import expected_emitted, kl_bound, tv_bound
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import GRID, PricedRounds, reachable_by_price
from tempera.rules.schedules import Prices
from tempera.rules.standard import Exact, Relaxed
from tempera.shapes.scenes import world_prompts

LENGTH = 3
NOW = {"model": "tables", "draft": None, "guidance": 1.0}


@cache
def first_rounds(rows: int = 4_000) -> tuple[Statistics, TableTarget, TableDraft]:
    """The first rounds of many images, by the recorder in the real loop."""
    target = TableTarget(3, LENGTH + 1)
    draft = TableDraft(target)
    recorder = Recorder(StaticTreeDrafter(draft, Tree.chain(LENGTH)))
    emit(target, recorder, Exact(), rows=rows)
    found = recorder.statistics(LENGTH)  # only chains that begin with the image are within these
    assert found.chains.ratios.shape == (rows, LENGTH)  # one whole chain a row: the first round's
    return found, target, draft


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (1.2, 5.0, 2.0)])
def test_recorded_statistics_agree_with_theory(schedule: tuple[float, ...]) -> None:
    found, target, draft = first_rounds()
    p, q, chains = target.conditionals(), draft.conditionals(), found.chains
    assert chains.expected_emitted(schedule) == pytest.approx(
        expected_emitted(p, q, Relaxed(schedule), LENGTH), abs=0.03
    )
    assert chains.tv_bound(schedule) == pytest.approx(
        tv_bound(p, q, Relaxed(schedule), LENGTH), abs=0.02
    )


@pytest.mark.slow
def test_recorded_prices_agree_with_theory() -> None:
    found, target, draft = first_rounds()
    p, q, prices = target.conditionals(), draft.conditionals(), Prices((1.1, 0.6, 0.3))
    emitted, nats = found.rounds.expected(prices)
    assert emitted == pytest.approx(expected_emitted(p, q, Priced(prices), LENGTH), abs=0.03)
    assert nats == pytest.approx(kl_bound(p, q, Priced(prices), LENGTH), abs=0.01)


@pytest.mark.slow
def test_rounds_of_whole_images_and_none_past_their_end() -> None:
    target = TableTarget(3, 7)
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(LENGTH))
    ratios = record(
        target, drafter, world_prompts(300), seed=0, device=torch.device("cpu"), batch_size=64
    ).ratios
    trace = emit(target, drafter, Exact(), rows=300).trace
    assert ratios is not None and ratios.shape[1] == LENGTH
    assert 300 < len(ratios) < float(trace.rounds.sum())
    again = record(
        target, drafter, world_prompts(300), seed=0, device=torch.device("cpu"), batch_size=300
    ).ratios
    assert again is not None
    assert sorted(again.flatten().tolist()) == sorted(
        ratios.flatten().tolist()
    )  # prompts decide, batches do not


@pytest.mark.slow
def test_the_loop_reaches_the_expected_length(tmp_path: Path) -> None:
    found, target, draft = first_rounds()
    path = str(tmp_path / "s.safetensors")
    save_statistics(Path(path), found, NOW)
    for rule in (
        Relaxed(calibrated(LENGTH, path, 3.4, NOW)),
        Priced(optimal(LENGTH, Tree.chain(LENGTH), path, 3.4, NOW)),
    ):
        drafter = FirstRoundOnly(StaticTreeDrafter(draft, Tree.chain(LENGTH)))
        trace = emit(target, drafter, rule, rows=40_000).trace
        assert float((trace.round == 0).sum(-1).float().mean()) == pytest.approx(3.4, abs=0.03)


def test_a_draft_is_identified_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len(conditions("m", str(tmp_path), guidance=3)["draft"]) == 16
    assert conditions("m", str(tmp_path / "none"))["draft"] is None


def made_up() -> Statistics:
    """Statistics of 100 chains that no model drafted."""
    torch.manual_seed(0)
    keep = torch.rand(100, LENGTH, 1)
    keep = keep + (1 - keep) * torch.tensor(GRID) / GRID[-1]
    divergence = torch.rand(100, 1 + LENGTH, 1) * torch.tensor(GRID)
    rounds = PricedRounds.equal(Tree.chain(LENGTH), keep, divergence)
    return Statistics(0.1 + torch.rand(100, LENGTH), rounds)


@pytest.fixture
def statistics(tmp_path: Path) -> str:
    save_statistics(tmp_path / "s.safetensors", made_up(), NOW)
    return str(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"expected_length": None},
            r"^schedule=calibrated needs an expected length: give \d\.\d\d tokens a round "
            r"\(exact decoding\) to 4\.00$",
        ),
        (
            {"expected_length": 4.2},
            r"^an expected length of 4.2 is out of reach with 3 drafted tokens: give \S+ "
            r"\(exact decoding\) to 4$",
        ),
        ({"expected_length": 1.0}, r"^an expected length of 1 is out of reach"),
        ({"length": 5}, r"holds chains of 3, but this run drafts 5: measure again with depth=5$"),
        ({"delta": 2.0}, r"^the calibrated schedule follows from .* no δ: leave delta=2 out"),
        ({"ceiling": 0.5}, r"ceiling=0.5 is not possible"),
        (
            {"measured_with": NOW | {"guidance": 3.0}},
            r"was measured with guidance=1.0, but this run has guidance=3.0",
        ),
        (
            {"statistics": "nowhere.safetensors"},
            r"there is no nowhere.safetensors: measure the draft first, with `python eval/",
        ),
    ],
)
def test_refused(changed: dict[str, Any], message: str, statistics: str) -> None:
    with pytest.raises(TemperaError, match=message):
        calibrated(
            **{
                "length": LENGTH,
                "statistics": statistics,
                "expected_length": 3.0,
                "measured_with": NOW,
                **changed,
            }
        )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"expected_length": None},
            r"^schedule=optimal needs an expected length: give \d\.\d\d tokens a round \(ex",
        ),
        ({"expected_length": 1.0}, r"^an expected length of 1 is out of reach with 3 drafted tok"),
        (
            {"length": 5, "tree": Tree.chain(5)},
            r"holds chains of 3, but this run drafts 5: measure again with depth=5$",
        ),
        (
            {"tree": Tree.from_paths([[0], [1], [0, 0]])},
            r"was measured with another draft tree: measure again with `python eval/",
        ),
        ({"tree": Tree.empty()}, r"was measured with another draft tree"),
        (
            {"measured_with": NOW | {"guidance": 3.0}},
            r"was measured with guidance=1.0, but this run has guidance=3.0",
        ),
    ],
)
def test_prices_refused(changed: dict[str, Any], told: str, statistics: str) -> None:
    given = {
        "length": LENGTH,
        "tree": Tree.chain(LENGTH),
        "statistics": statistics,
        "expected_length": 3.0,
        "measured_with": NOW,
    }
    with pytest.raises(TemperaError, match=told):
        optimal(**{**given, **changed})


@pytest.mark.slow
def test_statistics_of_a_tree(tmp_path: Path) -> None:
    target, tree = TableTarget(3, 4), Tree.from_paths([[0], [1], [0, 0]])
    found = record(
        target,
        StaticTreeDrafter(TableDraft(target), tree),
        world_prompts(40),
        seed=0,
        device=torch.device("cpu"),
        batch_size=40,
    )
    path = str(tmp_path / "s.safetensors")
    save_statistics(Path(path), found, NOW)
    low, high = reachable_by_price(found.rounds)
    assert len(optimal(2, tree, path, (low + high) / 2, NOW).prices) == 2
    with pytest.raises(TemperaError, match="these statistics are of a tree"):
        calibrated(2, path, 2.5, NOW)


def test_a_shorter_draft_uses_the_first_depths(statistics: str) -> None:
    assert len(calibrated(2, statistics, 2.5, NOW)) == 2
    assert len(optimal(2, Tree.chain(2), statistics, 2.5, NOW).prices) == 2


def test_not_a_file_of_statistics(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_text("x")
    with pytest.raises(TemperaError, match="holds no statistics of a draft"):
        load_statistics(tmp_path / "s.safetensors")


def test_only_static_trees_of_a_draft() -> None:
    with pytest.raises(TemperaError, match="a schedule is calibrated on chains or static trees"):
        record(TableTarget(3, 4), NoDraft(), world_prompts(1), 0, torch.device("cpu"), 1)


def rule(*options: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build_rule(
            compose("eval", ["model.draft=draft", "depth=3", *options]),
            3,
        )


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options reach the solver, the statistics are those of this model and sampling, and a
    budget is refused.
    """
    monkeypatch.chdir(tmp_path)
    relaxed = ["method=coolsd", "schedule=calibrated"]
    priced = ["method=optimal_rsd", "schedule=optimal"]
    for method in (relaxed, priced):
        with pytest.raises(
            TemperaError,
            match=r"there is no outputs/calibration/shapes.safetensors: measure the draft first",
        ):
            rule(*method, "expected_length=3")
    now = conditions("shapes", "draft", guidance=3.0, temperature=1.0, top_k=0, top_p=1.0)
    save_statistics(Path("outputs/calibration/shapes.safetensors"), made_up(), now)
    sampling = ["guidance=3.0", "temperature=1.0", "top_k=0", "top_p=1.0"]
    assert max(rule(*relaxed, "expected_length=3", "ceiling=4", *sampling).schedule) <= 4
    assert len(rule(*priced, "expected_length=3", *sampling).prices) == 3
    with pytest.raises(TemperaError, match="takes no δ: leave delta=2 out"):
        rule(*relaxed, "expected_length=3", "delta=2", *sampling)
    with pytest.raises(TemperaError, match="was measured with top_k=0, but this run has top_k=5"):
        rule(*relaxed, "expected_length=3", *sampling[:2], "top_k=5", "top_p=1.0")
    for method in (
        ["method=coolsd", "schedule=constant_price"],
        ["method=optimal_rsd", "schedule=calibrated", "expected_length=3", *sampling],
    ):
        with pytest.raises(TemperaError, match="takes a schedule of"):
            rule(*method)
