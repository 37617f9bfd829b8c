"""Which setting is chosen within a budget, and the whole command on a tiny model."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT
from tiny_evaluation import network, tiny_options
from tiny_networks import tiny_eagle, tiny_target

from tempera.commands import tune as tune_command
from tempera.config.compose import composed_run
from tempera.config.tuned import has_own_draft
from tempera.data.prompts import Prompt
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.parallel_network import ParallelModel
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.evaluation import tuning
from tempera.evaluation.round_laws import TestedRule
from tempera.evaluation.tuning import (
    Budget,
    Candidate,
    Prediction,
    Trial,
    TuningPlan,
    fastest,
    front,
    predict,
    try_out,
)
from tempera.rules.standard import BlockVerification, Exact

SCRIPT = ROOT / "eval" / "tune.py"


def one(name: str, speedup: float, kl: float = 0.0) -> Prediction:
    return Prediction((f"method={name}",), kl == 0, speedup, 100 * speedup, 1.0, 2.0, kl, 400 * kl)


KNOWN = [one("d", 3, 0.2), one("c", 2.5, 0.06), one("b", 2, 0.02), one("a", 1.5), one("ar", 1)]


class Runs:
    """Real runs that do what was predicted, or `slower`, with a CLIP loss of a tenth of the KL."""

    def __init__(self, slower: float = 1.0, divergence: float = 1.0) -> None:
        self.slower, self.divergence, self.made = slower, divergence, list[str]()

    def __call__(self, prediction: Prediction) -> Trial:
        self.made.append(prediction.options[0].removeprefix("method="))
        kl = self.divergence * prediction.kl_per_token
        return Trial(prediction, prediction.speedup * self.slower, kl, 400 * kl, kl / 10)


@pytest.mark.parametrize("text", ["kl:0.05", "tv:20", "clip:0.01", "none"])
def test_a_budget_is_read(text: str) -> None:
    assert Budget.parse(text).measure == text.partition(":")[0]


@pytest.mark.parametrize(
    "text",
    ["kl", "kl:", "kl:-1", "kl:0", "kl:inf", "kl:nan", "kl:x", "fid:3", "", "0.05", "none:1"],
)
def test_a_malformed_budget_is_refused(text: str) -> None:
    with pytest.raises(TemperaError, match="is not a budget: give none .lossless., or kl:, tv:"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("budget", "made", "chosen"),
    [
        ("none", "a ar", "a"),
        ("kl:0.06", "c b", "c"),
        ("kl:0.5", "d c", "d"),
        ("tv:10", "b a", "b"),
        ("clip:0.004", "c b", "b"),
        ("clip:0.1", "c d", "d"),
    ],
)
def test_the_best_within_the_budget_are_run(budget: str, made: str, chosen: str) -> None:
    runs, limit = Runs(), Budget.parse(budget)
    outcomes = try_out(KNOWN, limit, 2, runs)
    assert " ".join(runs.made) == made
    assert fastest(outcomes, limit).prediction.options == (f"method={chosen}",)


def test_without_a_run_within_the_budget_a_lossless_one_is_made() -> None:
    runs, limit = Runs(divergence=9), Budget.parse("kl:0.06")
    outcomes = try_out(KNOWN, limit, 2, runs)
    assert runs.made == ["c", "b", "a"]
    assert fastest(outcomes, limit).prediction.options == ("method=a",)


def test_the_fastest_is_the_measured_one() -> None:
    outcomes = [Trial(KNOWN[2], 1.2, 0.02, 8), Trial(KNOWN[3], 1.4, 0, 0)]
    assert fastest(outcomes, Budget.parse("kl:0.06")) is outcomes[1]


def test_the_front_leaves_out_what_is_slower_and_costs_as_much() -> None:
    others = [one("slow", 1.9, 0.02), one("worse", 2, 0.05)]
    assert front([*others, *KNOWN]) == [KNOWN[3], KNOWN[2], KNOWN[1], KNOWN[0]]


def test_a_clip_budget_without_scores_admits_lossless_settings_alone() -> None:
    assert not Trial(KNOWN[0], 3, 0.2, 80).within(Budget.parse("clip:1"))
    assert Trial(KNOWN[3], 1.5, 0, 0).within(Budget.parse("clip:1"))


def test_a_batch_that_evaluations_do_not_time_is_refused() -> None:
    with pytest.raises(TemperaError, match="batch_size=3 cannot be tuned for"):
        TuningPlan(batch_size=3)
    with pytest.raises(TemperaError, match="repeats=0 is too small"):
        TuningPlan(repeats=0)


def test_only_other_rules_are_compared_with_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a round was measured with the exact rule, which needs no correction."""
    timed, verify = list[Any](), tuning.verify
    monkeypatch.setattr(tuning, "verify", lambda *of: (timed.append(of[2]), verify(*of))[1])
    target = tiny_target()
    drafters = {"chain": StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), Tree.chain(2))}
    exact, block = (
        Candidate((type(rule).__name__,), "eagle", "chain", TestedRule(rule, True, depth))
        for rule, depth in ((Exact(), None), (BlockVerification(), 2))
    )
    prompts, plan = [Prompt("0", "one")], TuningPlan(repeats=1)
    assert len(predict(target, drafters, [exact], prompts, plan)) == 2 and timed == []
    assert len(predict(target, drafters, [exact, block], prompts, plan)) == 3
    assert timed == 2 * [BlockVerification()] + 2 * [Exact()]


@pytest.fixture
def tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Call a script in an empty directory; returns (exit status, standard output and error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, script: Path = SCRIPT) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        capsys.readouterr()
        status = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call


@pytest.mark.slow
def test_the_command_and_method_auto(tune: Any, tmp_path: Path) -> None:
    """The real runs are ordinary ones, the result is what method=auto runs, and a second call makes
    nothing again.
    """
    tiny = [
        option
        for option in tiny_options(tmp_path)
        if option.partition("=")[0] not in ("limit", "batch_size", "speed.prompts", "speed.warmup")
    ]
    quick = ["limit=2", "images=4", "timed=1", "repeats=1", "runs=2", "depths=[2,3]"]
    grid = ["trees=[]", "prices=[1.0]", "deltas=[2.0]", "top_k=0"]
    ParallelModel.of(network(), "tiny", length=2).save_pretrained("other")
    status, out, err = tune(*tiny, *quick, *grid, "budget=kl:5", "parallel=other")
    assert status == 0, err
    place = tmp_path / "outputs" / "tuning"
    result = json.loads((place / "shapes" / "tune.json").read_text(encoding="utf-8"))
    assert len(result["runs"]) == 2 and result["budget"] == "kl:5"
    names = [" ".join(row["options"]) for row in result["predictions"]]
    assert sorted(names) == sorted(
        [
            "method=ar",
            "method=eagle2",
            *(
                f"{method} depth={depth}{knob}"
                for depth, exact, draft in (
                    (2, "eagle", ""),
                    (3, "eagle", ""),
                    (2, "parallel", " drafter=parallel"),
                )
                for method, knob in (
                    (f"method={exact}", ""),
                    (f"method=block{draft}", ""),
                    (f"method=optimal_rsd{draft}", " price=1.0"),
                    (f"method=uniform_rsd{draft}", " delta=2.0"),
                    (f"method=coolsd{draft} floor=1", " delta=2.0"),
                )
            ),
        ]
    )
    assert result["drafters"] == {
        "eagle": "tried",
        "eagle2": "tried",
        "parallel": "tried",
        "independent": "left out: never tried; compare it in a sweep",
        "jacobi, sjd, scd, sjd_pac": "left out: never tried; compare them in a sweep",
        "parallel, depth=3": "left out: it drafts 2 tokens",
    }
    assert "left out: it drafts 2 tokens" in out
    (plain,) = (row for row in result["predictions"] if row["options"] == ["method=ar"])
    assert plain["tokens"] < 1000 / plain["round"]  # an image begins with its prompt
    chosen = result["chosen"]["predicted"]["options"]
    stored = json.loads((place / "shapes.json").read_text(encoding="utf-8"))
    used = stored["options"]
    assert used == [*chosen, *(["drafter.path=other"] if has_own_draft(chosen) else [])]
    assert f"use: python eval/run.py {tiny[0]} " in out and f" {' '.join(used)}\n" in out
    made = {path.parent.name for path in place.rglob("metrics.json")}
    assert made == {"method=ar", *(",".join(one["predicted"]["options"]) for one in result["runs"])}

    again = [*tiny, "limit=4", "speed.prompts=0", "top_k=0", "hydra.run.dir=again"]
    status, out, err = tune("method=auto", *again, script=ROOT / "eval" / "run.py")
    assert status == 0, err
    assert f"method=auto is {' '.join(used)}\n" in out
    settings = json.loads(Path("again/metrics.json").read_text(encoding="utf-8"))["settings"]
    of_run = json.loads((place / "shapes/runs" / ",".join(chosen) / "metrics.json").read_text())
    assert settings == of_run["settings"] and settings["method"] != "auto"
    status, out, err = tune("method=auto", *again, "top_k=5", script=ROOT / "eval" / "run.py")
    assert status == 1 and "was found with top_k=0.0, but this run has top_k=5.0" in err


def settings_with(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """Settings of the shipped model with both drafts, of which the parallel one is for another
    target, and what the drafters are.
    """

    def built(cfg: Any, target: Any) -> Any:
        if cfg.drafter._target_.endswith("build_parallel"):
            raise TemperaError("made for another target")
        return SimpleNamespace(model=SimpleNamespace(for_depth=lambda depth: None))

    monkeypatch.setattr(tune_command.build, "check_draft", lambda *arguments: None)
    monkeypatch.setattr(tune_command.build, "build_drafter", built)
    cfg = composed_run("tune", ["depths=[2]", "trees=[]", *options], "somewhere")
    settings = tune_command._Settings(cfg, Budget.parse("none"))
    return settings, lambda: settings.drafters(None)


@pytest.mark.slow
def test_a_draft_for_another_target_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, drafters = settings_with(monkeypatch)
    assert {one.draft for one in settings.candidates()} == {"eagle", "parallel"}
    assert sorted(drafters()) == ["eagle depth=2", "method=eagle2"]
    assert settings.drafters_tried()["parallel"] == "left out: made for another target"


@pytest.mark.slow
def test_a_draft_for_another_target_that_was_named_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, drafters = settings_with(monkeypatch, "parallel=here")
    with pytest.raises(TemperaError, match="made for another target"):
        drafters()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["budget=fid:3"], "budget=fid:3 is not a budget"),
        (["budget=clip:0.1", "metrics=none"], "`budget=clip:0.1` needs a CLIP score, which these"),
        (["model=shapes_mar"], "chooses among methods for discrete tokens"),
        (["runs=0"], "`runs=0`"),
        (["trees=[binary]"], "there is no draft tree 'binary'"),
        (["depths=[two]"], "`depths=['two']` is not possible"),
        (["batch_size=2"], "batch_size=2 cannot be tuned for"),
        (["drafter.path=nowhere"], "with drafter.path=DIR"),
        (["parallel=nowhere"], "with parallel=DIR"),
        (["model=llamagen_xl_stage1"], "there is no directory outputs/train_draft/llamagen_xl_st"),
        (["method=coolsd"], "there is no option `method`"),
    ],
)
def test_refused(tune: Any, options: list[str], message: str) -> None:
    status, _, err = tune("tracking=none", *options)
    assert (status, err.count("\n")) == (1, 1)
    assert message in err
