"""Reports on several runs: what is compared, and what their files hold."""

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from paths import CONF, ROOT
from report_runs import RUNS, finished, made_up_runs
from rich.console import Console
from scipy.stats import ttest_rel
from wandb_workspaces.reports.v2 import interface as workspaces

from tempera.commands import report as report_command
from tempera.config.compose import composed, written
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.reporting import pareto, report, tables, wandb_report
from tempera.reporting.baseline import compare
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.console import headline, main_metrics, print_run
from tempera.reporting.finished_run import Run, labels, results
from tempera.reporting.report import (
    report_markdown,
    sections_of,
    verdict_section,
    write_report,
)
from tempera.reporting.sweep_callback import SweepTable
from tempera.reporting.verdict import verdict
from tempera.runtime.files import sha256_file
from tempera.runtime.tracking import WandbTracker


def read(*paths: Path, baseline: str | None = None) -> list[Run]:
    """The finished runs, none of which is damaged, compared with the baseline."""
    runs, damaged = collect(find_runs(paths)[0])
    assert damaged == []
    compare(runs, baseline)
    return runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with pictures and replays, one unfinished, and their report in `out`."""
    directory = tmp_path_factory.mktemp("a (b) [c] | d")
    made_up_runs(directory, RUNS[:4], prompts=3)
    (directory / "unfinished").mkdir()
    (directory / "unfinished" / "run.json").write_text("{}")
    unfinished = find_runs([directory]).unfinished
    assert [path.name for path in unfinished] == ["unfinished"]
    with pytest.MonkeyPatch.context() as patch:  # Vega's scripts take seconds to bundle
        patch.setattr("vl_convert.javascript_bundle", lambda: "")
        write_report(read(directory), directory / "out", unfinished)
    return directory


def test_a_dry_run_of_a_report_names_its_runs_and_writes_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(made)
    cfg = composed("report", [written("runs", place), f"output={tmp_path / 'out'}", "dry_run=true"])
    assert report_command.main(cfg) == [] and not (tmp_path / "out").exists()
    told = capsys.readouterr().out
    names = ", ".join(run.name for run in read(made))
    assert f"to do: report on 4 finished runs in {tmp_path / 'out'}: {names}\n" in told
    assert f"left out: {made / 'unfinished'} is unfinished" in told


def length(value: float, prompts: int = 4, weight: float = 1.0) -> dict[str, Any]:
    values = {"accepted_length": [value] * prompts, "clip_score": [0.5 + value / 10] * prompts}
    return {"values": values, "weights": {"accepted_length": weight}}


def test_a_report_of_many_runs(made: Path) -> None:
    out = made / "out"
    assert {path.name for path in out.iterdir()} == {
        *("results.csv", "tables.csv", "report.md", "report.html", "pareto.png")
    }
    text = (out / "report.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    known = pd.read_csv(out / "results.csv")
    value, low, high = known.loc[3, ["clip_score", "clip_score_low", "clip_score_high"]]
    line = next(line for line in lines if "coolsd δ=2" in line)
    assert f"{value:.4f}" in line  # three values have no interval
    assert low < value < high and f"{known.loc[3, 'fid']:.2f}" not in line
    assert list(known["name"]) == ["ar", "eagle", "coolsd δ=1.1", "coolsd δ=2"]
    assert "> In all runs: model shapes, images 3, seed 0, machine cpu." in text
    assert text.index("\n## ") == text.index("\n## Verdict\n") < text.index("## All metrics")
    assert "## Difference from plain autoregression" in text
    assert "Left out because unfinished" in text
    assert "](../3_coolsd/report.html)" in text
    two_seeds = verdict_section([finished("ar"), finished("eagle", seed=1, images=2)])
    assert two_seeds.notes[0] == "In all runs: model shapes, machine cpu."


def test_a_sweep_ends_with_the_verdict_of_its_report(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = SweepTable()
    sweep = OmegaConf.create({"hydra": {"sweep": {"dir": str(made)}}})
    callback.on_multirun_start(sweep)
    callback.on_multirun_end(sweep)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " as fast" in line]
    assert line == verdict(read(made)) and "3 pictures are too few" in line


def test_a_difference_in_probability_is_per_token(made: Path) -> None:
    """And deviations are those of a sample."""
    plain, eagle, *_ = read(made)
    frames = [pd.read_parquet(Path(one.directory) / "results.parquet") for one in (eagle, plain)]
    gap = (frames[0]["logprob"] - frames[1]["logprob"]).mean()
    assert eagle.differences["logprob_per_token"]["value"] == pytest.approx(gap / 64)
    assert eagle.deviations["accepted_length"] == frames[0]["accepted_length"].std(ddof=1)


def test_a_chart_has_the_gain_below_the_quality_and_their_intervals(made: Path) -> None:
    frame = results(read(made)).assign(curve="", point="", order=0, speedup_n=9)
    gain, quality = table.find("speedup"), table.find("clip_score")
    shown = pareto.points(frame, gain, quality)
    assert [*shown["x_low"]] == [*frame["speedup_low"]] and [*shown["y"]] == [*frame["clip_score"]]
    infinite = frame.assign(clip_score=[np.inf, *frame["clip_score"][1:]])
    assert [*pareto.points(infinite, gain, quality)["y"]] == [*frame["clip_score"][1:]]
    _, across, along, *_ = pareto.chart(shown, "", "", []).to_dict()["layer"]
    for axis, layer in (("x", across), ("y", along)):
        ends = [layer["encoding"][name]["field"] for name in (axis, f"{axis}2")]
        assert ends == [f"{axis}_low", f"{axis}_high"]


def test_names_do_not_break_the_report(tmp_path: Path) -> None:
    run = finished("eagle", changes={"tree": "a|b*c"}, directory="x (y) [z]")
    text = report_markdown([run], sections_of([run]), tmp_path, [], ["x`y"])
    assert "| eagle tree=a\\|b\\*c " in text and "> x\\`y" in text
    assert "x%20%28y%29%20%5Bz%5D/report.html" in text


def test_differences_are_paired_with_the_plain_run_of_the_same_draws() -> None:
    """And the whole set's metrics compared only over equal sets of prompts."""
    noise = np.arange(5.0)
    plain = finished("ar", {"clip_score": noise, "fid": noise})
    runs = [
        plain,
        finished("coolsd", {"clip_score": noise - 0.5, "fid": noise + 2}, delta=2.0),
        finished("coolsd", {"clip_score": noise[:3] + 1, "fid": noise[:3]}, delta=3.0),
        finished("ar", {"clip_score": noise + 1}, steps=16),
        *(finished("coolsd", {"clip_score": noise}, **{name: 7})
          for name in ("seed", "guidance", "temperature", "top_k", "top_p", "dtype")),
    ]  # fmt: skip
    compare(runs)
    assert [bool(run.differences) for run in runs] == [False, True, True, True, *[False] * 6]
    clip = runs[1].differences["clip_score"]
    assert [clip[end] for end in ("value", "low", "high", "n")] == pytest.approx(
        [-0.5, -0.5, -0.5, 5]
    )
    assert runs[1].differences["fid"]["value"] == 2
    assert tables.texts(sections_of(runs)[1])["CLIP score"][0] == "-0.5000 (-0.5000 … -0.5000)"
    assert [*runs[2].differences] == ["clip_score"]


def test_fid_of_few_images_is_absent_from_results_and_differences() -> None:
    """And differences have the digits of the results."""
    noise = np.arange(5.0)
    for images, headings in ((5, ["CLIP score"]), (300, ["FID", "CLIP score"])):
        runs = [
            finished("ar", {"clip_score": noise, "fid": noise}, images=images),
            finished("eagle", {"clip_score": noise + 1, "fid": noise + 2}, images=images),
        ]
        compare(runs)
        results, differences, *_ = map(tables.texts, sections_of(runs))
        assert [*differences.columns[1:]] == headings
        assert [name.rstrip(" ↑↓") for name in results.columns[1:]] == headings
        digits = [len(row.split(" ")[0].split(".")[1]) for row in differences.iloc[0, 1:]]
        assert digits == ([4] if images == 5 else [2, 4])


@pytest.mark.parametrize("images", [5, 300])
def test_a_difference_of_too_few_images_stands_in_tables_csv_alone(
    images: int, tmp_path: Path
) -> None:
    noise = np.arange(5.0)
    runs = [
        finished(method, {"kid": noise + gap}, images=images)
        for method, gap in (("ar", 0), ("eagle", 2))
    ]
    compare(runs)
    write_report(runs, tmp_path)
    cells = pd.read_csv(tmp_path / "tables.csv")
    (gap,) = cells[(cells["column"] == "KID")].to_dict("records")
    assert (gap["value"], gap["low"], gap["high"], gap["n"]) == (2, 2, 2, 5)
    assert gap["table"].endswith(", with too few images") == (images == 5)
    assert ("KID" in (tmp_path / "report.md").read_text()) == (images == 300)


def test_a_sweep_of_schedules_names_them_all() -> None:
    """In labels and curves; without one, no run of the method is named by its schedule."""
    names = ("exponential", "linear", "exponential")
    runs = [
        finished("coolsd", delta=delta, schedule=name, changes={} if name[0] == "e" else
                 {"schedule": name}) for name, delta in zip(names, (2.0, 2.0, 1.1), strict=True)
    ]  # fmt: skip
    assert labels([*runs, finished("eagle", schedule="uniform")]) == [
        *("coolsd schedule=exponential δ=2", "coolsd schedule=linear δ=2"),
        *("coolsd schedule=exponential δ=1.1", "eagle"),
    ]
    curves = [f"coolsd schedule={name}" for name in names]
    assert [*pareto.curves(runs)["curve"]] == curves
    assert labels(runs[::2]) == ["coolsd δ=2", "coolsd δ=1.1"]


def test_runs_of_one_name_are_told_apart_by_their_directories() -> None:
    days, values = ("monday", "tuesday"), {"accepted_length": [1.0, 2.0]}
    twice = [finished("eagle", values, directory=f"sweeps/{day}/1") for day in days]
    runs = [finished("ar", directory="sweeps/monday/0"), *twice]
    assert labels(runs) == ["ar", "eagle (monday/1)", "eagle (tuesday/1)"]
    assert labels(runs, runs[:2]) == ["ar", "eagle (monday/1)"]
    compare(runs, "eagle (tuesday/1)")
    assert runs[1].baseline == "eagle"


def test_accepted_lengths_are_compared_as_tokens_per_round_with_their_t_statistic() -> None:
    """Not as a mean over prompts of each one's ratio; t as in Cool-SD, Appendix C.4."""
    both = [
        finished("fast", {"accepted_length": [4, 2]}, weights={"accepted_length": [1.0, 3.0]}),
        finished("slow", {"accepted_length": [1, 1.5]}, weights={"accepted_length": [4.0, 4.0]}),
    ]
    compare(both, "slow")
    found = both[0].differences["accepted_length"]
    assert found["value"] == pytest.approx(10 / 4 - 1.25)
    assert found["t"] == pytest.approx(ttest_rel([4, 2], [1, 1.5]).statistic)


def test_a_baseline_of_the_nearest_accepted_length() -> None:
    runs = [finished("eagle", **length(1.5))]
    runs += [finished("coolsd", **length(1 + delta / 2), delta=delta) for delta in (1.0, 2.0)]
    runs += [finished("coolsd", **length(2.01), delta=2.0, changes={"floor": 1}, directory="a/b")]
    compare(runs, "coolsd")
    assert [run.baseline for run in runs] == ["coolsd δ=1", None, None, "coolsd δ=2"]
    (_, section, *_) = sections_of(runs, "coolsd")
    shown = tables.texts(section)[["baseline", "length", "baseline's length"]]
    assert shown.to_numpy().tolist() == [
        ["coolsd δ=1", "1.50", "1.50"],
        ["coolsd δ=2", "2.01", "2.00"],
    ]
    for name in ("coolsd floor=1 delta=2", "coolsd floor=1 δ=2", "b", "a/b/"):
        compare(runs, name)
        assert [run.baseline for run in runs[:3]] == ["coolsd floor=1 δ=2"] * 3
    with pytest.raises(TemperaError, match="eagle") as problem:
        compare(runs, "cool")
    assert problem.value.option == "baseline"


def test_what_must_be_known_before_comparing() -> None:
    assert report.cautions([finished("ar", images=3)]) == []
    two = [finished("eagle", metrics={"speedup": {}}, images=i, machine=f"cpu{i}") for i in (1, 2)]
    found = report.cautions(two, [Path("x")], ["y"])
    words = ("number of images", "different machines", "method=ar", "unfinished: x", "damaged: y")
    assert [word in line for word, line in zip(words, found, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((1.5, 1.25, 1.75, 9, ".2f"), "1.50 (1.25 … 1.75)"),
        ((1.5, 1.25, 1.75, 4, ".2f"), "1.50"),
        ((float("-inf"), float("nan"), float("nan"), 9, "+.2f"), "−infinite"),
        ((None, None, None, 0, ".2f"), "–"),
        ((0.5, None, None, None, "+.2f"), "+0.50"),
        ((-0.001, None, None, None, "+.2f"), "+0.00"),
        ((-0.0001, None, None, None, ".3f"), "0.000"),
        ((1234567.0, None, None, None, ".2f"), "1.23e+06"),
    ],
)
def test_values_and_intervals_as_text(args: Any, text: str) -> None:
    names, (*numbers, form) = ("value", "low", "high", "n"), args
    assert tables.cell(dict(zip(names, numbers, strict=True)), form) == text


def test_a_narrow_console_breaks_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    values = [f"{number}.12345" for number in range(7)]
    columns = {f"a heading: {value}": [value] for value in values}
    tables.show(pd.DataFrame({"run": ["coolsd delta=2"], **columns}), console=Console(width=40))
    told = capsys.readouterr().out
    assert [told.count(f"{value}  ") for value in values] == [2] * 7
    assert max(map(len, told.splitlines())) <= 40


def test_headings_are_broken_only_where_room_is_scarce(capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"metric": ["length"], "value (95% interval)": ["2.22"], "n": ["1"]})
    for width, whole in ((60, True), (30, False)):
        tables.show(frame, console=Console(width=width))
        assert ("value (95% interval)" in capsys.readouterr().out) == whole


def test_an_output_that_nobody_reads_is_an_error_and_no_exit() -> None:
    closed = Mock(spec=io.TextIOWrapper, encoding="utf-8")
    closed.write.side_effect = BrokenPipeError(32, "Broken pipe")
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        tables.show(pd.DataFrame({"run": ["ar"], "n": ["2"]}), console=tables.Output(file=closed))


def test_the_console_begins_with_gain_and_cost_and_tells_of_other_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"accepted_length": 3.7, "efficiency": 1 / 2.9, "speedup": 1.1, "target_passes": 90.0}
    run = finished("eagle", metrics={key: {"value": one} for key, one in metrics.items()})
    run.metrics["efficiency"] |= {"low": 1 / 3, "high": 1 / 2.75, "n": 5}
    run.length = 144
    assert headline(run) == [
        "3.70 tokens per round: 39 rounds per image instead of 144.",
        "A round takes 2.90 times as long as an AR round here: 1.10× the speed.",
    ]
    for load, told in ((9, "running (9 processes share 2 cores), so"), (2, "target 75%.")):
        parts = {"draft": {"share": 0.25}, "target": {"share": 0.75}}
        run.time = {"parts": parts, "load": load, "cores": 2}
        words = "were running while speed was measured, so it may be wrong: eagle."
        assert any(words in line for line in report.cautions([run])) == (load > 2)
        print_run(run)
        out = capsys.readouterr().out
        assert told in out and ("Other processes were running" in out) == (load > 2)
        assert "Timed: 5 images; a round takes 2.75 to 3.00 AR rounds (95% interval)." in out
    draft = {"accepted_length": {"value": 1.0}, "target_passes": {"value": 0.0}}
    (line,) = headline(finished("draft", metrics=draft))
    assert line == "The draft's own images, without the target."


def test_the_console_shows_ten_metrics_and_fid_of_many_images() -> None:
    for images in (255, 256):
        known = {metric.key: {"value": 1.0} for metric in table.METRICS}
        run = finished("ar", metrics=known, images=images)
        shown = [one.key for one in main_metrics(table.METRICS, [run], 10)]
        assert len(shown) == 10 and {"accepted_length", "speedup", "clip_score"} <= {*shown}
        assert ("fid" in shown) == (images == 256)


def test_bad_directories(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nowhere", "nowhere is not a dir"), (tmp_path, "no finished")):
        with pytest.raises(TemperaError, match=words):
            find_runs([path])


def test_runs_given_as_links_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of other places, in circles, and beside the runs themselves."""
    made_up_runs(tmp_path / "away", RUNS[:3], prompts=2)
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "a").symlink_to(tmp_path / "away" / "0_ar")
    (chosen / "b").symlink_to(tmp_path / "away" / "1_eagle", target_is_directory=True)
    (chosen / "circle").symlink_to(chosen)
    found = find_runs([chosen])
    assert found == ([chosen / "a", chosen / "b"], [], {})
    both = find_runs([chosen, tmp_path / "away"])
    runs = [tmp_path / "away" / name for name in ("0_ar", "1_eagle", "2_coolsd")]
    again = {chosen / "a": runs[0], chosen / "b": runs[1]}
    assert both == (runs, [], again)
    assert find_runs([chosen, tmp_path / "away" / "2_coolsd"]).finished == [
        runs[2],
        chosen / "a",
        chosen / "b",
    ]
    assert find_runs([chosen / "a", chosen / "a"]) == ([chosen / "a"], [], {})
    monkeypatch.setattr(report, "write_report", lambda *_: [])
    report_command.main(composed("report", [f"runs=[{chosen},{tmp_path / 'away'}]"]))
    told = [f"left out: {name} is the same run as {run}" for name, run in again.items()]
    assert capsys.readouterr().out.splitlines() == told
    (tmp_path / "empty").mkdir()
    with pytest.raises(TemperaError, match="there is no run in .*empty"):
        find_runs([chosen, tmp_path / "empty"])


def test_a_damaged_run_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_runs(tmp_path, RUNS[:4], prompts=2)
    (tmp_path / "0_ar" / "metrics.json").write_text('{"half')
    (tmp_path / "1_eagle" / "metrics.json").write_text('{"settings": {}}')
    (tmp_path / "2_coolsd" / "results.parquet").write_bytes(b"PAR1 half")
    runs, problems = collect(find_runs([tmp_path])[0])
    assert [run.name for run in runs] == ["coolsd δ=2"]
    names = ("0_ar/metrics.json", "1_eagle/metrics.json", "2_coolsd/results.parquet")
    assert [name in line for name, line in zip(names, problems, strict=True)] == [True] * 3
    monkeypatch.setattr(report, "write_report", lambda *_: [])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    report_command.main(composed("report", [f"runs={tmp_path}"]))
    told = [*problems, f"{tmp_path / 'begun'} is unfinished"]
    assert capsys.readouterr().out.splitlines() == [f"left out: {line}" for line in told]
    (tmp_path / "3_coolsd" / "metrics.json").write_text("[]")
    with pytest.raises(TemperaError, match=r"no run can be read; .*metrics\.json"):
        collect(find_runs([tmp_path])[0])


def test_publishing_makes_a_wandb_report(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the runs, sent first. wandb-workspaces asks a server of this test."""
    runs, online = read(made), Mock(spec=WandbTracker)
    online.run = Mock(id="abc", offline=False)
    online.failed = False
    eagle = runs[1]
    eagle.images = 99  # which is a reason for caution
    eagle.seed = 7
    eagle.paper = {"table": "coolsd_table1"}
    eagle.settings["temperature"] = 1
    grid_file = Path(eagle.directory) / "grid.png"
    grid_file.touch()
    started, saved = Mock(return_value=online), dict[str, Any]()

    def answer(_: Any, query: Any, asked: dict[str, Any]) -> dict[str, Any]:
        if "spec" not in asked:
            return {"project": {"internalId": "1"}}
        saved.update(asked)
        view = {key: asked[key] for key in ("name", "displayName", "description", "spec")}
        place = {"name": asked["projectName"], "entityName": asked["entityName"]}
        return {"upsertView": {"view": {**view, "id": "new", "project": place}}}

    monkeypatch.setattr(wandb_report, "wandb_tracker", started)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr(workspaces, "_get_api", lambda: Mock(projects=lambda _: []))
    monkeypatch.setattr(workspaces, "execute_graphql", answer)
    monkeypatch.setattr(workspaces, "get_app_url", lambda _: "https://wandb.ai")
    address = wandb_report.publish(runs, made / "out", "mine", "me")
    assert address.startswith("https://wandb.ai/me/mine/reports/out:-ar") and "new" in address
    kinds = [call.kwargs["job_type"] for call in started.call_args_list]
    assert kinds == [*["eval"] * len(runs), "report"]
    assert {call.kwargs["mode"] for call in started.call_args_list} == {"online"}
    sent = [call.args[0]["accepted_length"] for call in online.summary.call_args_list]
    assert sent == [run.value("accepted_length") for run in runs]
    papers = ["paper/LlamaGen-XL/fid" in call.args[0] for call in online.summary.call_args_list]
    assert papers == [False, True, False, False]
    names = [call.kwargs.get("name") for call in started.call_args_list]
    assert names == [*labels(runs), None] and names[1] == "eagle seed=7"
    online.image.assert_called_once_with("grid", grid_file, names[1])
    files = {path.name for path in online.artifact.call_args.args[2]}
    assert files == {"report.md", "report.html", "results.csv"}
    spec = json.loads(saved["spec"])
    (grid,) = [block for block in spec["blocks"] if block["type"] == "panel-grid"]
    headings = [block["type"] for block in spec["blocks"]][: spec["blocks"].index(grid)]
    assert headings.count("heading") == 1  # the verdict stands above the plots
    panels = grid["metadata"]["panelBankSectionConfig"]["panels"]
    axes = {(one["config"]["xAxis"], one["config"]["yAxis"])
            for one in panels if one["viewType"] == "Scatter Plot"}  # fmt: skip
    assert ("summary:accepted_length", "summary:fid") in axes
    assert ("summary:speedup", "summary:clip_score") in axes
    assert "Media Browser" in {one["viewType"] for one in panels}
    assert "abc" in json.dumps(grid["metadata"]["runSets"][0]["filters"])
    tables = [block["content"] for block in spec["blocks"] if block["type"] == "markdown-block"]
    assert any("| eagle" in text or "eagle |" in text for text in tables)
    assert tables[0].startswith("> The runs differ in their number of images")


def test_publishing_that_fails_says_where_the_report_is(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, online = read(made), Mock(spec=WandbTracker)
    online.run = Mock(id="abc", offline=True)
    monkeypatch.setattr(wandb_report, "wandb_tracker", Mock(return_value=online))
    with pytest.raises(TemperaError, match=r"WANDB_MODE=offline: unset it.*already in .*out"):
        wandb_report.publish(runs, made / "out")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", lambda **_: False)
    with pytest.raises(TemperaError, match=r"wandb login.*already in .*out"):
        wandb_report.publish(runs, made / "out")
    monkeypatch.setattr("wandb.login", lambda **_: True)
    with pytest.raises(TemperaError, match="cannot be reached"):
        wandb_report.publish(runs, made / "out", "mine", "me")
    monkeypatch.setattr("wandb.Api", Mock(side_effect=RuntimeError("no. Really")))
    with pytest.raises(TemperaError, match=r"W&B cannot take the report \(no\): .*out; check"):
        wandb_report.publish(runs, made / "out")


def test_an_option_may_have_the_name_of_a_metric() -> None:
    run = finished("lantern", metrics={"k": {"value": 3.0}}, k=10)
    (row,) = results([run]).to_dict("records")
    assert (row["k"], row["option_k"]) == (3.0, 10)


METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
OF_MAR = {"cspd", "cspd_exact", "draft"}


@pytest.mark.slow
@pytest.mark.parametrize("given", [
    ["method=" + ",".join(one for one in METHODS if one not in OF_MAR)],
    ["model=shapes_mar", "denoising_steps=2", "method=ar," + ",".join(sorted(OF_MAR))],
])  # fmt: skip
def test_every_method_runs_to_its_report(
    given: list[str], no_figures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user runs it: a sweep, each run's console and page, the sweep's table, the report."""
    monkeypatch.chdir(tmp_path)
    quick = ["data.limit=1", "speed.prompts=0", "metrics=none", "tracking=none", "outputs=out"]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *given, *quick])
    runpy.run_path(str(ROOT / "eval/run.py"), run_name="__main__")
    runs, damaged = collect(find_runs(["out"])[0])
    assert len(runs) == given[-1].count(",") + 1 and damaged == []
    assert len(write_report(runs, tmp_path / "report")) >= 3
    assert len({run.name for run in runs}) == len(runs)


def power(alpha: float) -> Run:
    changes = {"rule": "power"} | ({} if alpha == 1 else {"alpha": alpha})
    return finished("eagle", changes=changes, alpha=alpha)


def coolsd(delta: float, **changes: Any) -> Run:
    return finished("coolsd", changes={**changes, "delta": delta}, delta=delta, **changes)


def price(value: float, length: float) -> Run:
    found = {"option": "price", "value": value, "length": length}
    return finished("gsd", changes={"price": value}, price=value, matched=found)


@pytest.mark.parametrize(
    ("runs", "curve", "points"),
    [
        ([power(0.25), power(0.5), power(1)], "eagle rule=power", "alpha=0.25 alpha=0.5 alpha=1"),
        ([coolsd(1.1, floor=1), coolsd(2, floor=1)], "coolsd floor=1", "1.1 2"),
        ([coolsd(2, floor=0), coolsd(2, floor=1)], "coolsd δ=2", "floor=0 floor=1"),
        ([price(0.3, 3.4), price(0.4, 3.8)], "gsd", "price=0.3 price=0.4"),
    ],
)
def test_runs_that_differ_in_one_number_are_a_curve(
    runs: list[Run], curve: str, points: str
) -> None:
    found = pareto.curves([finished("ar"), finished("eagle"), *runs])[2:]
    assert {*found["curve"]} == {curve} and " ".join(found["point"]) == points


def test_an_infinite_bound_is_read_from_its_prompts(tmp_path: Path) -> None:
    """metrics.json has null for it; older files have Infinity."""
    made_up_runs(tmp_path, RUNS[3:4], prompts=2)
    table_path, path = tmp_path / "0_coolsd/results.parquet", tmp_path / "0_coolsd/metrics.json"
    pd.read_parquet(table_path).assign(kl_per_token=[0.5, np.inf]).to_parquet(table_path)
    content = json.loads(path.read_text()) | {"results": sha256_file(table_path)}
    for value in (None, np.inf):
        content["metrics"]["kl_per_token"] |= {"value": value, "low": value, "high": value}
        path.write_text(json.dumps(content))
        shown = tables.texts(verdict_section(read(tmp_path)))
        assert shown["KL bound per token ↓"][0] == "infinite"
