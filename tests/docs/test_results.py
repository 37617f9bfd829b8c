"""The numbers of README and docs are those of docs/results/results.json."""

import json
import re
import runpy
from pathlib import Path

import grid_figure
import pytest
from markdown_pages import name_of, text_of
from paths import ROOT
from PIL import Image
from report_runs import RUNS, made_up_runs
from results import collect, render

FIGURE = runpy.run_path(str(ROOT / "docs" / "pareto_figure.py"))
OF_STUDY = runpy.run_path(str(ROOT / "docs" / "study_figure.py"))
RESULTS = render.read()
QUOTES = render.QUOTES
FILES = render.csv_files(RESULTS)
README, DISCRETE = ROOT / "README.md", ROOT / "docs" / "results" / "discrete.md"
FIELD = text_of(ROOT / "docs" / "field.md")
STUDY = ROOT / "docs" / "study.md"


def quoted(text: str, quotes: list[str]) -> list[re.Match[str]]:
    return [found for found, _ in render.quotes(text, render.everything(RESULTS), quotes)]


@pytest.mark.parametrize("page", render.PAGES, ids=name_of)
def test_a_page_has_the_numbers_of_the_results(page: Path) -> None:
    assert render.render(text_of(page), RESULTS) == text_of(page)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_sentence_stands_on_a_page(quote: str) -> None:
    assert any(quoted(text_of(page), [quote]) for page in render.PAGES)


@pytest.mark.parametrize("page", [README, DISCRETE, STUDY], ids=name_of)
def test_no_other_number_is_typed(page: Path) -> None:
    """Outside tables, code and the quoted sentences."""
    text = text_of(page)
    for found in quoted(text, QUOTES):
        text = text.replace(found[0], "")
    if page == STUDY:  # its lengths and its values of ν are chosen
        text = re.sub(r"3\.[14]|ν = 0\.\d+", "", text[text.index("## What the study") :])
    code = r"(?ms)^```.*?^```|^\|.*?$|^    .*?$|`[^`]*`|\]\([^)]*\)|95%|Python 3.11"
    prose = re.sub(code, "", text)
    assert re.findall(r"\d+\.\d+|\d+%", prose) == []


def test_the_field_has_the_lengths_of_the_results() -> None:
    """Of every row that is among them: the page marks those of an older model."""
    row = r"(?m)^\|.*\| \[?`(\w[^`]*)`(?:\]\([^)]*\))? \| ([\d.]+)(†?) \|"
    rows = re.findall(row, FIELD)
    found = {method: number + mark for method, number, mark in rows if method in RESULTS["rows"]}
    assert len(found) > 15
    lengths = {method: RESULTS["rows"][method]["accepted_length"][0] for method in found}
    assert found == {method: f"{length:.2f}" for method, length in lengths.items()}


def test_the_picture_shows_the_results() -> None:
    shown = json.loads(Image.open(ROOT / "docs" / "pareto.png").text["Description"])
    assert shown == FIGURE["points"]()
    assert all(panel["uniform"] for panel in shown.values())


def test_the_picture_of_the_study_shows_the_results() -> None:
    shown = json.loads(Image.open(ROOT / "docs" / "study.png").text["Description"])
    assert shown == OF_STUDY["points"]()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_numbers_has_those_of_the_results(name: str) -> None:
    assert (ROOT / "docs" / "results" / name).read_text(encoding="utf-8") == FILES[name]


@pytest.mark.parametrize("file", grid_figure.SHOWN)
def test_a_grid_shows_the_results(file: str) -> None:
    assert json.loads(Image.open(ROOT / "docs" / file).text["Description"]) == grid_figure.labels(
        file
    )


def test_a_speed_up_is_length_over_cost() -> None:
    """With the uncertainty of both, over all sessions."""
    sessions = {"one": {"eagle": [2.0, 1.5, 2.5], "eagle on XL": [100, 160, 20]},
                "two": {"eagle": [3.0, 2.8, 3.2]}}  # fmt: skip
    row = {"accepted_length": [3.0, 2.9, 3.1], "kl_per_token": [0.0] * 3}
    found = render.numbers({"rows": {"eagle": row}, "sessions": sessions})["eagle"]
    assert found.here_cost[:3] == (2.5, 1.5, 3.2)
    assert found.here[:3] == (3 / 2.5, 2.9 / 3.2, 3.1 / 1.5)
    assert found.xl[:3] == pytest.approx((3 / 1.6, 2.9 / 1.6, 3.1 / 1.6))
    assert found.cheap[0] == 3 / 1.2 and found.exact == "yes"


def test_a_row_without_bounds_is_none_of_the_exact_ones() -> None:
    rows = render.numbers(RESULTS)
    assert rows["fly"].exact == "no" and not hasattr(rows["fly"], "kl_per_token")
    shares = [row.broken.value for name, row in rows.items()
              if name != "lantern" and getattr(row, "exact", "") == "no"]  # fmt: skip
    assert rows["fly"].broken.value in shares
    assert render.broken(rows)["relaxed"] == pytest.approx(sum(shares) / len(shares))


def test_finished_runs_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by their command lines, with differences from plain autoregression and where they come
    from; a session's costs; and the study's tables as a report writes them.
    """
    runs = made_up_runs(tmp_path / "outputs" / "day", RUNS[:3])
    given = (["method=ar"], ["method=eagle"], ["method=coolsd", "delta=1.1", "experiment=results"])
    for directory, overrides in zip(sorted(runs.iterdir()), given, strict=True):
        (directory / ".hydra").mkdir()
        (directory / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
        (directory / ".hydra" / "config.yaml").write_text("model: {name: shapes}")
        facts = {"overrides": overrides, "commit": f"{7:040x}-dirty", "started": "2026-11-26T20"}
        run = json.loads((directory / "run.json").read_text()) | facts
        (directory / "run.json").write_text(json.dumps(run))
        path = directory / "metrics.json"
        content = json.loads(path.read_text())
        content["metrics"]["efficiency"] = {"value": 0.5, "low": 0.4, "high": 0.8}
        path.write_text(json.dumps(content))
    results = tmp_path / "results.json"
    results.write_text('{"rows": {"old": {}}, "runs": {}, "sessions": {}}')
    monkeypatch.setattr(collect, "FILE", results)
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    monkeypatch.setattr(collect, "RUNS", (runs, tmp_path / "none"))
    monkeypatch.setattr(collect, "PAIRED", ("clip_score",))
    monkeypatch.setattr(collect, "processor", lambda: "abacus")
    collect.rows()
    collect.speed("day")
    found = collect.read()
    assert [*found["rows"]] == ["old", "ar", "eagle", "coolsd delta=1.1"]
    assert found["rows"]["eagle"]["clip_score_minus_ar"][2] < 0
    assert "clip_score_minus_ar" not in found["rows"]["ar"]
    assert found["sessions"]["day"]["coolsd delta=1.1"] == [2.0, 1.25, 2.5]
    command = "python eval/run.py method=coolsd delta=1.1 experiment=results"
    about = ["00000000-dirty", "abacus", "2026-11-26"]
    assert found["runs"]["coolsd delta=1.1"] == [command, *about]
    assert found["sessions"]["day"]["run"] == [collect.SPEED.format("day"), *about]
    runs.rename(tmp_path / "outputs" / "study")
    report = tmp_path / "outputs" / "study_report"
    report.mkdir()
    for bound in (13.4, 7.0):
        titles = [collect.TABLES[table] for table in ("overview", "correlations")]
        (report / "tables.csv").write_text(
            "table,row,column,value,low,high,n,significant,text\n"
            f"{titles[0]},coolsd δ=1.1,option,,,,,,delta\n"
            f"{titles[0]},coolsd δ=1.1,summed TV bound,{bound},,,,,\n"
            f"{titles[0]},coolsd δ=1.1,KL bound per token,,,,,,\n"
            f"{titles[0]},coolsd δ=1.1,FID ↓,1.5,1,2,60,True,\n"
            f"{titles[0]},fly at {bound},FID ↓,{bound},1,2,60,False,\n"
            f"{titles[1]},KL of {bound},FID ↓,{bound},,,,,\n"
        )
        collect.study()
    found = collect.read()
    overview = found["study"]["overview"]
    assert overview.pop("coolsd δ=1.1") == {  # the later report has other comparisons
        "option": "delta", "summed TV bound": [13.4], "FID ↓": [1.5, 1.0, 2.0, True],
    }  # fmt: skip
    assert [*overview] == ["fly at 13.4", "fly at 7.0"]
    assert [*found["study"]["correlations"]] == ["KL of 13.4"]
    assert found["runs"]["study, coolsd δ=1.1"] == [command, *about]
