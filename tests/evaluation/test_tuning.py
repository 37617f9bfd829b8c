"""Which setting is chosen within a budget, and the whole command on a tiny model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import finished
from sent_runs import keep_sent_runs
from tiny_evaluation import network, tiny_options

from tempera.commands import tune as tune_command
from tempera.config.compose import composed
from tempera.drafters.draft_files import save_draft
from tempera.drafters.medusa import MedusaModel
from tempera.drafters.parallel_network import ParallelModel
from tempera.errors import TemperaError
from tempera.evaluation.tuning import Budget, Outcome, fastest, try_out
from tempera.reporting.tables import texts


def one(name: str, speedup: float, kl: float = 0.0) -> Outcome:
    return Outcome({"method": name}, kl == 0, speedup, 100 * speedup, 1.0, 2.0, kl, 400 * kl)


KNOWN = [one("d", 3, 0.2), one("c", 2.5, 0.06), one("b", 2, 0.02), one("a", 1.5), one("ar", 1)]


@pytest.mark.parametrize(
    "text", ["kl", "kl:", "kl:-1", "kl:0", "kl:inf", "kl:nan", "kl:x", "fid:3", "", "none:1"]
)
def test_a_malformed_budget_is_refused(text: str) -> None:
    with pytest.raises(TemperaError, match="is not a budget"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("budget", "excess", "made", "chosen"),
    [
        ("none", 1, "a ar", "a"),
        ("kl:0.06", 1, "c b", "c"),
        ("kl:0.5", 1, "d c", "d"),
        ("tv:10", 1, "b a", "b"),
        ("kl:0.06", 9, "c b a", "a"),  # no run is within the budget: a lossless one is made
    ],
)
def test_the_best_within_the_budget_are_run(
    budget: str, excess: float, made: str, chosen: str
) -> None:
    """Real runs cost `excess` times what was predicted."""
    runs, limit = list[str](), Budget.parse(budget)

    def run(predicted: Outcome) -> Outcome:
        runs.append(predicted.options["method"])
        kl = excess * predicted.kl_per_token
        return replace(predicted, kl_per_token=kl, tv_bound=400 * kl)

    outcomes = try_out(KNOWN, limit, 2, run)
    assert " ".join(runs) == made
    assert fastest(outcomes, limit).options == {"method": chosen}


@pytest.mark.slow
def test_the_command(
    no_figures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The real runs are ordinary ones, and the best one's options are told, and sent to W&B."""
    monkeypatch.chdir(tmp_path)
    sent_runs = keep_sent_runs(monkeypatch, tmp_path / "staged")
    dropped = ("limit", "batch", "sp", "tracking")
    tiny = [one for one in tiny_options(tmp_path) if not one.startswith(dropped)]
    quick = [
        "data.limit=2",
        "images=4",
        "timed=1",
        "repeats=1",
        "runs=1",
        "depths=[2,3]",
        "top_k=0",
    ]
    grid = ["trees=[]", "prices=[1.0]", "deltas=[2.0]", "budget=kl:5"]
    tiny += ["model.parallel=other", "++model.medusa=heads"]
    save_draft(ParallelModel.of(network(), "tiny", length=2), "other")
    save_draft(MedusaModel.of(network(), "tiny", length=2), "heads")
    cfg = composed("tune", [*tiny, *quick, *grid], "place")
    tune_command.main(cfg)
    result = json.loads(Path("place/tune.json").read_text(encoding="utf-8"))
    names = [tune_command.name_of(row["options"]) for row in result["predictions"]]
    assert len(names) == len(set(names)) == 2 + 5 * 4  # five methods on each chain
    assert set(names) > {
        *("method=ar", "method=eagle2", "method=medusa depth=2", "method=block depth=3"),
        "method=coolsd drafter=parallel floor=1 depth=2 delta=2.0",
        "method=optimal_rsd depth=3 price=1.0",
    }
    speeds = [row["speedup"] for row in result["predictions"]]
    assert speeds == sorted(speeds, reverse=True)
    out = capsys.readouterr().out
    assert {name for name, said in result["drafters"].items() if said == "tried"} == {
        *("eagle", "eagle2", "parallel", "medusa")
    }
    assert "parallel, depth=3: left out: it drafts 2 tokens" in out
    (plain,) = (row for row in result["predictions"] if row["options"] == {"method": "ar"})
    # an image begins with its prompt, which takes longer or, beside other work, less than a round
    assert plain["tokens"] != pytest.approx(1000 / plain["round"], rel=1e-6)
    chosen = result["chosen"]["predicted"]["options"]
    assert f" {tiny[0]} " in out and f" {tune_command.name_of(chosen)}\n" in out
    made = {path.parent.name for path in Path("place/runs").rglob("metrics.json")}
    settings = [run["predicted"]["options"] for run in result["runs"]]
    assert made == {",".join(tune_command.options_of(setting)) for setting in settings}
    sent = sent_runs["tune"]
    assert sent.finished and f"use: python eval/run.py {sent.summary['use']}\n" in out
    assert sent.summary["options"] == chosen and sent.summary["speedup"] > 0
    assert len(sent.tables["tune"][1]) == len(result["runs"])
    assert "tokens per round" not in out and out.count("predicted") == 3  # the runs' own tables
    assert sent.files == {"tune": ["tune.json"]}


def test_the_table_says_how_far_predictions_were_off() -> None:
    """And how many of them the measurement excludes."""
    runs = tune_command._RealRuns.__new__(tune_command._RealRuns)
    runs.speed = "speedup"
    measured = {"value": 2.0, "low": 1.9, "high": 2.2, "n": 8}
    runs.found = {
        name: (one(name, speedup), finished(name, metrics={"speedup": measured}))
        for name, speedup in (("near", 2.1), ("far", 1.5))
    }
    section = runs.compared("8 images")
    assert texts(section)["speed-up"].tolist() == ["2.00 (1.90 … 2.20)"] * 2
    assert texts(section)["off"].tolist() == ["+5%", "-25%"]
    assert section.text == (
        "The predicted speed-ups were off by up to 25%; 1 of 2 lie outside the 95% interval of the "
        "measured speed-up."
    )


@pytest.mark.slow
def test_without_a_budget_every_setting_is_lossless(tmp_path: Path) -> None:
    cfg = composed("tune", ["tracking=none", "depths=[2]", "trees=[]"], tmp_path)
    settings = tune_command._Settings(cfg, lossless=True)
    settings.drafts = settings.drafts[:1]
    tested = [candidate.tested for candidate in settings.candidates() if candidate.tested]
    assert tested and all(one.rule.exact for one in tested)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("budget=fid:3", "budget"),
        ("budget=0.05", "budget"),
        ("budget=null", "budget"),
        ("model=shapes_mar", "model=shapes_mar"),
        ("trees=[binary]", "'binary'"),
        ("batch_size=2", "batch_size=2"),
        ("drafter.path=nowhere", "drafter.path=DIR"),
        ("model.parallel=nowhere", "model.parallel=DIR"),
        ("method=coolsd", "`method`"),
    ],
)
def test_refused(options: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(TemperaError) as refused:
        tune_command.main(composed("tune", ["tracking=none", *options.split()], tmp_path))
    assert named in str(refused.value)
