"""Schedules from recorded chains: what is recorded is what theory expects, and a schedule solved
for it keeps its promise in the loop.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from paths import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from table_models import FirstRoundOnly
from torch import Tensor

from tempera.config.compose import composed
from tempera.config.parts import Parts
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import calibration
from tempera.evaluation.calibration import (
    Statistics,
    TestedDrafts,
    calibrated,
    conditions,
    is_measured,
    load_statistics,
    optimal,
    record,
    save_statistics,
)
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.exactness.theory import expected_emitted, kl_bound, tv_bound
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import GRID, PricedRounds, reachable_by_price
from tempera.rules.schedules import Prices
from tempera.rules.standard import Exact, Relaxed
from tempera.runtime.files import fingerprint, sha256_file
from tempera.shapes.networks import SHIPPED
from tempera.shapes.scenes import world_prompts

LENGTH = 3
NOW = {"model": "tables", "weights": "", "draft": None, "guidance": 1.0}


@cache
def first_rounds(rows: int = 4_000) -> tuple[Statistics, TableTarget, TableDraft]:
    """The first rounds of many images, by the recorder in the real loop."""
    target = TableTarget(3, LENGTH + 1)
    draft = TableDraft(target)
    tested = TestedDrafts()
    drafter = StaticTreeDrafter(draft, Tree.chain(LENGTH))
    emit(target, drafter, Exact(), rows=rows, watch=[tested])
    found = tested.statistics(LENGTH)  # only chains that begin with the image are within these
    assert found.chains.ratios.shape == (rows, LENGTH)  # one whole chain a row: the first round's
    return found, target, draft


@pytest.mark.slow
def test_recorded_statistics_agree_with_theory() -> None:
    found, target, draft = first_rounds()
    p, q, chains = target.conditionals(), draft.conditionals(), found.chains
    for schedule in ((1.0, 1.0, 1.0), (3.0, 1.0, 0.5)):
        rule = Relaxed(schedule)
        length, bound = expected_emitted(p, q, rule, LENGTH), tv_bound(p, q, rule, LENGTH)
        assert chains.expected_emitted(schedule) == pytest.approx(length, abs=0.03)
        assert chains.tv_bound(schedule) == pytest.approx(bound, abs=0.02)
    prices = Prices((1.1, 0.6, 0.3))
    emitted, nats = found.rounds.expected(prices)
    assert emitted == pytest.approx(expected_emitted(p, q, Priced(prices), LENGTH), abs=0.03)
    assert nats == pytest.approx(kl_bound(p, q, Priced(prices), LENGTH), abs=0.01)


def test_the_drafts_that_end_within_their_image_are_recorded() -> None:
    """Those that end with it too, and none of rounds that an image no longer takes part in."""
    target = TableTarget(3, 7)
    tested, counts = TestedDrafts(), list[list[int]]()
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(LENGTH))
    watch = [tested, lambda one: counts.append(one.sequences.emitted.tolist())]
    emit(target, drafter, Exact(), rows=60, watch=watch)
    noted = [(ratios, count) for (ratios, _), count in zip(tested.notes, counts, strict=True)]
    expected, ends = list[list[float]](), set[int]()
    begins = [0] * 60
    for ratios, emitted in noted:
        for row, count in enumerate(emitted):
            if count and begins[row] + LENGTH <= 7:
                expected.append(ratios[row].tolist())
                ends.add(begins[row] + LENGTH)
            begins[row] += count
    assert begins == [7] * 60 and ends >= {3, 4, 7}
    found = tested.statistics(7).ratios
    assert found is not None and found.tolist() == expected


@pytest.mark.slow
def test_rounds_of_whole_images_and_none_past_their_end() -> None:
    target, prompts = TableTarget(3, 7), world_prompts(100)
    drafter = StaticTreeDrafter(TableDraft(target), Tree.chain(LENGTH))
    ratios, again = (
        record(target, drafter, prompts, 0, torch.device("cpu"), size).ratios for size in (32, 100)
    )
    trace = emit(target, drafter, Exact(), rows=100).trace
    assert ratios is not None and again is not None and ratios.shape[1] == LENGTH
    assert 100 < len(ratios) < float(trace.rounds.sum())
    # prompts decide, batches do not
    assert sorted(again.flatten().tolist()) == sorted(ratios.flatten().tolist())


@pytest.mark.slow
def test_the_loop_reaches_the_expected_length(tmp_path: Path) -> None:
    found, target, draft = first_rounds()
    path = str(tmp_path / "s.safetensors")
    save_statistics(Path(path), found, NOW)
    for rule in (
        Relaxed(calibrated(LENGTH, path, 3.4, NOW, ceiling=100)),
        Priced(optimal(LENGTH, Tree.chain(LENGTH), path, 3.4, NOW)),
    ):
        drafter = FirstRoundOnly(draft, Tree.chain(LENGTH))
        trace = emit(target, drafter, rule, rows=10_000).trace
        assert float((trace.round == 0).sum(-1).float().mean()) == pytest.approx(3.4, abs=0.04)


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


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"expected_length": None}, r"needs expected_length=: give \d\.\d\d .* tokens per"),
    ("both", {"expected_length": 4.2}, "out of reach"),
    ("both", {"length": 5, "tree": Tree.chain(5)}, "this run drafts 5"),
    ("both", {"measured_with": NOW | {"guidance": 3.0}}, "guidance=1.0, but .*guidance=3.0"),
    ("both", {"measured_with": NOW | {"draft": str(SHIPPED / "draft")}}, "draft=None, but .*draft"),
    ("both", {"statistics": "nowhere.safetensors"}, "there is no nowhere.safetensors"),
    ("calibrated", {"delta": 2.0}, "takes no δ: leave delta=2 out"),
    ("calibrated", {"ceiling": 0.5}, "ceiling=0.5 is not valid"),
    ("optimal", {"tree": Tree.from_paths([[0], [1], [0, 0]])}, "another draft tree"),
]


@pytest.mark.parametrize(("solver", "changed", "told"), REFUSED)
def test_refused(solver: str, changed: dict[str, Any], told: str, statistics: str) -> None:
    given = {"length": LENGTH, "tree": Tree.chain(LENGTH), "statistics": statistics}
    given |= {"expected_length": 3.0, "measured_with": NOW, **changed}
    if solver != "calibrated":
        with pytest.raises(TemperaError, match=told):
            optimal(**given)
    del given["tree"]
    if solver != "optimal":
        with pytest.raises(TemperaError, match=told):
            calibrated(**{"ceiling": 100, **given})


def test_statistics_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, tree = TableTarget(3, 4), Tree.from_paths([[0], [1], [0, 0]])
    drafter = StaticTreeDrafter(TableDraft(target), tree)
    found = record(target, drafter, world_prompts(40), 0, torch.device("cpu"), 40)
    assert "measuring the draft: " in capsys.readouterr().err
    path = str(tmp_path / "s.safetensors")
    save_statistics(Path(path), found, NOW)
    low, high = reachable_by_price(found.rounds)
    assert len(optimal(2, tree, path, (low + high) / 2, NOW).prices) == 2
    with pytest.raises(TemperaError, match="these statistics are of a tree"):
        calibrated(2, path, 2.5, NOW, ceiling=100)


def test_a_draft_is_measured_until_something_else_is_wanted(statistics: str) -> None:
    path, chain = Path(statistics), Tree.chain(LENGTH)
    assert is_measured(path, chain, NOW) and is_measured(path, Tree.chain(1), NOW)
    assert not is_measured(path, Tree.chain(LENGTH + 1), NOW)
    assert not is_measured(path, Tree.from_paths([[0], [1], [0, 0]]), NOW)
    assert not is_measured(path, chain, NOW | {"guidance": 3.0})
    assert not is_measured(path.with_name("other.safetensors"), chain, NOW)


def test_a_shorter_draft_uses_the_first_depths(statistics: str) -> None:
    assert len(calibrated(2, statistics, 2.5, NOW, ceiling=100)) == 2
    assert len(optimal(2, Tree.chain(2), statistics, 2.5, NOW).prices) == 2


def test_not_a_file_of_statistics(
    tmp_path: Path, statistics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file is read, or replaced; nor are statistics at other prices."""
    other = tmp_path / "thesis.txt"
    other.write_text("x")
    with pytest.raises(TemperaError, match="has no statistics of a draft"):
        load_statistics(other)
    with pytest.raises(TemperaError, match="has no statistics .*: delete it, or give a new name"):
        is_measured(other, Tree.chain(LENGTH), NOW)
    draft = SHIPPED / "draft"
    weights = sha256_file(draft / "model.safetensors")
    assert conditions("shapes", "", str(draft))["draft"] == weights[:16]
    monkeypatch.setattr(calibration, "GRID", (0.5, *GRID[1:]))
    with pytest.raises(TemperaError, match="has no statistics of a draft"):
        load_statistics(Path(statistics))


IMPOSSIBLE = [
    ("ratios", lambda given: -given),
    ("ratios", lambda given: given / 0),
    ("keep", lambda given: given + 1),
    ("divergence", lambda given: given * torch.nan),
    ("divergence", lambda given: given - 5),
    ("prices", lambda given: given + 1),
    ("parents", lambda given: given[:-1]),
]


@pytest.mark.parametrize(("name", "change"), IMPOSSIBLE)
def test_what_cannot_have_been_measured_is_refused(
    name: str, change: Callable[[Tensor], Tensor], statistics: str
) -> None:
    with safe_open(statistics, "pt") as file:
        notes = file.metadata()
    tensors = load_file(statistics)
    load_statistics(Path(statistics))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, statistics, notes)
    with pytest.raises(TemperaError, match="has no statistics of a draft: delete it"):
        load_statistics(Path(statistics))


def rule(*options: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return Parts.of(compose("eval", ["model.draft=draft", "depth=3", *options])).rule()


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options reach the solver, and the statistics are those of this model and sampling."""
    monkeypatch.chdir(tmp_path)
    sampling = ["guidance=3.0", "temperature=1.0", "top_k=0", "top_p=1.0", "min_p=0.0"]
    relaxed = ["method=coolsd", "schedule=calibrated", "expected_length=3", *sampling]
    priced = ["method=optimal_rsd", "schedule=optimal", "expected_length=3", *sampling]
    with pytest.raises(TemperaError, match="no outputs/calibration/shapes-eagle.safetensors"):
        rule(*priced)
    with pytest.raises(TemperaError, match="no outputs/calibration/shapes-parallel.safetensors"):
        rule(*priced, "drafter=parallel")
    weights = fingerprint(Parts.of(composed("eval", [])).network_part.identity)
    now = conditions(
        "shapes", weights, "draft", guidance=3.0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
    )
    save_statistics(Path("outputs/calibration/shapes-eagle.safetensors"), made_up(), now)
    assert max(rule(*relaxed, "ceiling=4").schedule) <= 4
    assert len(rule(*priced).prices) == 3
    for wrong, told in (
        ([*relaxed, "top_k=5"], "was measured with top_k=0, but this run has top_k=5"),
        ([*priced, "model.draft=owner/name"], "draft=draft, but this run has draft=owner/name"),
        ([*priced, "weights=tuned"], f"was measured with weights={weights}, but this run has"),
        (["method=coolsd", "schedule=constant_price"], "takes a schedule of"),
        ([*priced, "schedule=calibrated"], "takes a schedule of"),
    ):
        with pytest.raises(TemperaError, match=told):
            rule(*wrong)
