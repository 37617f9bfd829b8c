"""What a report says of runs over other prompts, or measured in other ways: it compares what they
share, and nothing else.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from report_runs import RUNS, finished, made_up_runs
from tiny_evaluation import tiny_evaluate, tiny_pipeline

from tempera.commands import report as report_command
from tempera.config.compose import composed
from tempera.errors import TemperaError
from tempera.reporting import page, tables
from tempera.reporting.baseline import compare
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.report import cautions, sections_of
from tempera.reporting.study import tables as study_tables
from tempera.reporting.sweep_callback import SweepTable
from tempera.shapes.scenes import world_prompts

AR, EAGLE, COOLSD = RUNS[0], RUNS[1], RUNS[2]


@pytest.fixture(autouse=True)
def no_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vega's scripts take seconds to bundle."""
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: "")


def reported(place: Path) -> str:
    """The report.md of all runs there, by the command."""
    report_command.main(composed("report", [f"runs={place}", f"output={place / 'out'}"]))
    return (place / "out" / "report.md").read_text()


def test_equal_ids_of_other_texts_are_not_compared(tmp_path: Path) -> None:
    made_up_runs(tmp_path / "one", [AR])
    made_up_runs(tmp_path / "two", [EAGLE], text="a blue star")
    text = reported(tmp_path)
    assert "> The runs have different prompts: of 12 (an id with its text), 0 are in" in text
    told = "> eagle: not compared with the baseline, which has other prompts"
    assert f"{told}, even where their ids agree.\n" in text
    assert "## Difference" not in text


@pytest.mark.parametrize(("texts", "count"), [("edcba", 0), ("abxyz", 0), ("abcxy", 3)])
def test_a_few_prompts_that_agree_by_chance_are_not_compared(texts: str, count: int) -> None:
    """Lists in another order agree somewhere; of a list that was edited the rest is compared."""
    runs = [
        finished("ar", {"clip_score": np.arange(5.0)}, texts=list("abcde")),
        finished("eagle", {"clip_score": np.ones(5)}, texts=list(texts)),
    ]
    compare(runs)
    assert runs[1].differences.get("clip_score", {}).get("n", 0) == count
    told = "eagle: not compared with the baseline, which has other prompts, even where"
    assert any(told in line for line in cautions(runs)) == (not count)


def test_the_prompts_that_a_baseline_lacks_are_named(tmp_path: Path) -> None:
    made_up_runs(tmp_path / "one", [AR], prompts=4)
    made_up_runs(tmp_path / "two", [EAGLE], prompts=6)
    made_up_runs(tmp_path / "three", [COOLSD], prompts=9)
    text = reported(tmp_path)
    assert "of 9 (an id with its text), 4 are in all runs." in text
    left_out = "eagle: 2 of its 6 prompts are not among those of ar, and are left out: "
    assert f"{left_out}world-000004, world-000005." in text
    assert "world-000004, world-000005, world-000006 and 2 more." in text
    row = next(line for line in text.split("## Difference")[1].splitlines() if "| eagle" in line)
    assert "(" not in row  # four values have no interval


def test_the_baseline_shares_most_prompts() -> None:
    """And its pictures stand beside the run's."""
    few = finished("ar", {"accepted_length": np.ones(2)})
    others = finished("ar", {"accepted_length": np.ones(5)}, texts=list("abcde"))
    many = finished("ar", {"accepted_length": np.ones(4)}, directory="many")
    run = finished("eagle", {"accepted_length": np.full(6, 3.0)})
    runs = [few, others, many, run]
    compare(runs)
    assert run.differences["accepted_length"]["n"] == 4
    assert page._run(run, runs)["reference"] == 2
    assert few.uncompared == others.uncompared == ""


def test_a_run_of_other_settings_says_which() -> None:
    runs = [finished("ar", {"fid": [1.0]}, seed=1), finished("eagle", {"fid": [1.0]}, seed=2)]
    compare(runs)
    assert cautions(runs)[-1] == "eagle seed=2: not compared with the baseline, which has seed=1."


def test_a_run_of_an_earlier_version_is_named_as_one(tmp_path: Path) -> None:
    """To run it again in its directory would be refused."""
    made_up_runs(tmp_path, [AR, EAGLE])
    old = tmp_path / "1_eagle"
    content = json.loads((old / "metrics.json").read_text())
    content["settings"] = {"format": 2, **content["settings"]}
    (old / "run.json").write_text(json.dumps({"identity": content["settings"]}))
    del content["length"], content["settings"]["format"]
    (old / "metrics.json").write_text(json.dumps(content))
    assert f"{old} was made by another version of tempera: use that" in reported(tmp_path)


def test_a_baseline_is_named_by_any_path_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made_up_runs(Path("runs"), [AR, EAGLE, COOLSD])
    for named in ("runs/1_eagle", str(tmp_path / "runs/1_eagle"), "./runs/1_eagle/"):
        options = ["runs=runs", f"output={tmp_path / 'out'}", f"baseline='{named}'"]
        report_command.main(composed("report", options))
        assert "| coolsd δ=1.1 | eagle" in (tmp_path / "out/report.md").read_text()


def test_a_later_start_over_more_prompts_that_is_unfinished_is_told(tmp_path: Path) -> None:
    tiny_evaluate(tmp_path / "run", timed=0)
    assert "unfinished" not in reported(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tiny_evaluate(tmp_path / "run", tiny_pipeline(before=killed), world_prompts(30), timed=0)
    told = "coolsd δ=1.5: the results are of 20 prompts; a later start with 30 is unfinished."
    assert f"> {told}\n" in reported(tmp_path)


def killed() -> None:
    raise KeyboardInterrupt


def test_a_run_of_other_weights_is_not_compared(tmp_path: Path) -> None:
    """Its method may be exact, and its distribution still another one."""
    made_up_runs(tmp_path / "one", [AR], target="shipped")
    made_up_runs(tmp_path / "two", [EAGLE], target="tuned")
    text = reported(tmp_path)
    assert "eagle target=tuned: not compared with the baseline, which has other weights." in text
    assert "## Difference" not in text
    runs = [finished("ar", {"fid": [1.0]}, target="a"), finished("sjd", {"fid": [1.0]}, model="b")]
    compare(runs)
    assert runs[1].uncompared == "model=shapes"


def test_other_real_pictures_are_told_and_not_subtracted(tmp_path: Path) -> None:
    """What does not depend on them is."""
    made_up_runs(tmp_path / "one", [AR, EAGLE])
    made_up_runs(tmp_path / "two", [COOLSD], reference="photographs")
    told = "FID: measured against different real pictures in (ar, eagle) and in (coolsd δ=1.1)."
    assert f"> {told} They are not subtracted" in reported(tmp_path)
    noise = np.arange(5.0)
    values = {"kid": noise, "clip_score": noise}
    ways = ([["a", "b"], ["c"]], [["a", "b"], ["c"]], [["a", "d"], ["c"]], [["a", "b"], ["e"]])
    runs = [
        finished(method, values, scorers=dict(zip(("kid", "clip_score"), way, strict=True)))
        for method, way in zip(("ar", "eagle", "gsd", "medusa"), ways, strict=True)
    ]
    compare(runs)
    assert [[*run.differences] for run in runs] == [[], [*values], ["clip_score"], ["kid"]]
    assert cautions(runs) == [
        "KID: measured against different real pictures in (ar, eagle, medusa) and in (gsd). They "
        "are not subtracted; compare only runs that were measured alike.",
        "CLIP score: measured with different networks or settings in (ar, eagle, gsd) and in "
        "(medusa). They are not subtracted; compare only runs that were measured alike.",
    ]


def test_a_plain_run_that_was_measured_alike_is_preferred() -> None:
    runs = [
        finished(method, {"kid": np.full(5, kid)}, scorers={"kid": ["a", reference]})
        for method, reference, kid in (("ar", "b", 1.0), ("ar", "c", 2.0), ("eagle", "c", 7.0))
    ]
    compare(runs)
    assert runs[2].differences["kid"]["value"] == 5


def test_a_study_pairs_prompts_of_one_text() -> None:
    """Relaxations at one length over lists whose ids agree have no common prompt."""
    noise = np.arange(9.0)
    found = {"option": "delta", "value": 2.0, "length": 3.5}
    for texts, expected in ((None, 2), (list("abcdefghi"), 0)):
        runs = [
            finished(
                method,
                {"clip_score": noise, "accepted_length": np.full(9, 3.5)},
                expected_length=3.5,
                matched=found,
                **({"texts": texts} if texts and method == "coolsd" else {}),
            )
            for method in ("uniform_rsd", "coolsd")
        ]
        differences = study_tables(runs)[1]
        assert sum("(" in cell for cell in tables.texts(differences).iloc[0]) == expected
        assert sections_of(runs)


def test_a_baseline_has_the_name_that_reports_print() -> None:
    """In a sweep of schedules, too, where the default one stands in the name."""
    values = {"clip_score": np.arange(5.0)}
    linear = {"schedule": "linear", "changes": {"schedule": "linear"}, "directory": "runs/1"}
    runs = [
        finished("coolsd", values, delta=2.0, schedule="exponential"),
        finished("coolsd", values, delta=2.0, **linear),
    ]
    for name in ("coolsd schedule=exponential δ=2", "coolsd schedule=exponential", "coolsd"):
        compare(runs, name)
        assert [bool(run.differences) for run in runs] == [False, True]
    names = "coolsd schedule=exponential δ=2, coolsd schedule=linear δ=2, or a run's directory"
    with pytest.raises(TemperaError, match=names):
        compare(runs, "coolsd δ=3")


def test_a_sweep_without_plain_autoregression_says_why_nothing_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its end and in its report, with a baseline that can be named; that one is taken."""
    made_up_runs(tmp_path, [EAGLE, COOLSD])
    callback = SweepTable()
    sweep = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    callback.on_multirun_start(sweep)
    callback.on_multirun_end(sweep)
    told = "so there are no differences: add method=ar to the sweep, or name another run in the"
    assert f"{told} report's options, such as baseline=eagle." in capsys.readouterr().out
    assert told in reported(tmp_path)
    runs, _ = collect(find_runs([tmp_path])[0])
    compare(runs, "eagle")
    assert not any("no differences" in line for line in cautions(runs, baseline="eagle"))
