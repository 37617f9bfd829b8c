"""report.html: what it holds, and that it stands alone."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_runs import RUNS, made_up_runs

from tempera.decoding.replay import REPLAYS
from tempera.metrics.table import find
from tempera.reporting import page, pareto
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.finished_run import results
from tempera.reporting.tables import Section, table
from tempera.runtime.image_files import picture_path

TWO = (RUNS[0], RUNS[3])
HOSTILE = "</script><script>alert(1)</script><!--&"


@pytest.fixture
def vega(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text for Vega's scripts, which take seconds to bundle."""
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: "vegaEmbed = 0")


def scripts(text: str) -> list[tuple[str, str]]:
    """What follows `<script` in each tag, and its text."""
    return re.findall(r"<script(.*?)>(.*?)</script>", text, re.DOTALL)


def page_of(directory: Path, *sections: Section) -> tuple[str, dict[str, Any]]:
    """The page of all runs in a directory, and its data."""
    runs, _ = collect(find_runs([directory])[0])
    page.write(directory / "report.html", runs, sections, ["compare <with> care"])
    text = (directory / "report.html").read_text(encoding="utf-8")
    ((_, data),) = [one for one in scripts(text) if one[0]]
    assert not {*"<>&"} & {*data}
    return text, json.loads(data)


def test_the_page_of_two_runs_stands_alone(vega: None, tmp_path: Path) -> None:
    made_up_runs(tmp_path / "<b>&", TWO, grid=(3, 5), model=HOSTILE)
    made_up_runs(tmp_path / "other", RUNS[3:4], seed=1)
    fid = {"value": 1, "low": 0, "high": 2, "n": 9, "significant": True}
    losses = table(["a <b>"], {"FID": [fid]})
    section = Section("Losses <at> length", losses, {"FID": "+.0f"}, "Paired.", ["Note."])
    text, data = page_of(tmp_path, section)
    assert re.findall(r'\b(?:src|href)="(.*?)"', text) == ["data:,"]
    assert [bool(kind) for kind, _ in scripts(text)] == [True, False, False]
    assert "default-src 'none'" in text and "unsafe-eval" not in text and "{{" not in text
    assert HOSTILE not in text and data["runs"][0]["model"] == HOSTILE
    for words in ("Losses &lt;at&gt;", "a &lt;b&gt;", "compare &lt;with&gt; care", "+1*<br>(+0"):
        assert words in text
    assert page_of(tmp_path)[1] == data

    plain, same, _ = data["runs"]
    assert (
        same["name"] == f"{HOSTILE} coolsd model={HOSTILE} δ=2 seed=0"
        and same["plain"] < plain["plain"]
    )
    assert [run["reference"] for run in data["runs"]] == [None, 0, None]
    assert [one["text"] for one in same["prompts"]] == [one["text"] for one in plain["prompts"]]
    value, low, high = same["metrics"]["accepted_length"]
    assert low < value < high
    assert data["metrics"][0] == {"key": "accepted_length", "heading": "accepted length"}
    assert "fid" not in {metric["key"] for metric in data["metrics"]}  # of a few images
    assert data["chart"]["data"] == {"name": "runs"}
    assert all(one.startswith("data:image/webp;base64,") for one in data["pictures"])

    plain, drafted = (run["prompts"][0]["replay"] for run in (plain, same))
    assert (drafted["rows"], drafted["columns"], drafted["blank"]) == (3, 5, 0)
    assert plain["place"] == [1] * 15 and "fate" not in plain
    assert sum(drafted["nodes"]) == len(drafted["fate"]) == len(drafted["drafted"])
    assert all(number > 0 for number in drafted["logprob"])


def test_lengths_are_rounded_once(tmp_path: Path) -> None:
    """By what shows them: 144 tokens in 65 rounds are 2.22 tokens a round in all tables."""
    ((run,), _) = collect(find_runs([made_up_runs(tmp_path, RUNS[3:4])])[0])
    run.values["accepted_length"] = 144 / 65
    data, _ = page.page_data([run])
    assert f"{data['runs'][0]['prompts'][0]['length']:.2f}" == "2.22"


def test_few_values_have_no_interval_in_charts(vega: None, tmp_path: Path) -> None:
    """As in the tables."""
    made_up_runs(tmp_path, TWO, prompts=4)
    made_up_runs(tmp_path / "many", TWO, prompts=5)
    runs, _ = collect(find_runs([tmp_path])[0])
    for run, shown in zip(runs, page.page_data(runs)[0]["runs"], strict=True):
        assert len(shown["metrics"]["clip_score"]) == (3 if run.images == 5 else 1)
    frame = pd.concat([results(runs), pareto.curves(runs)], axis=1)
    points = pareto.points(frame, pareto.axes("gain")[0], find("clip_score"))
    assert [*(points["y_low"] < points["y_high"])] == [run.images == 5 for run in runs]


def test_one_run_has_no_chart_and_no_vega(tmp_path: Path) -> None:
    text, data = page_of(made_up_runs(tmp_path, RUNS[3:4]))
    assert data["chart"] is None and len(scripts(text)) == 2
    assert re.findall(r"https?://", text) == []


def test_line_ends_have_no_pixels() -> None:
    row = {"rows": 2, "columns": 3}
    assert [page.blank_columns(row, size) for size in ((16, 16), (16, 24))] == [1, 0]


def test_runs_without_replays_or_pictures_are_shown_and_said(vega: None, tmp_path: Path) -> None:
    made_up_runs(tmp_path, RUNS[:2], prompts=3)
    plain, drafted = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    for path in (plain / REPLAYS).iterdir():
        path.unlink()
    (part,) = (drafted / REPLAYS).iterdir()
    part.write_bytes(b"PAR1 half")
    picture_path(drafted, "world-000002").write_bytes(b"no picture")
    text, data = page_of(tmp_path)
    assert all(words in text for words in ("Not shown: ", "000002.png", part.name))
    assert text.count("<li>") == 3
    assert {one["replay"] for run in data["runs"] for one in run["prompts"]} == {None}
    assert data["runs"][1]["prompts"][2]["picture"] is None


def test_equal_pictures_are_kept_once_and_large_ones_shrink(vega: None, tmp_path: Path) -> None:
    made_up_runs(tmp_path, TWO, prompts=1)
    made_up_runs(tmp_path / "again", TWO[:1], prompts=1)
    assert [run["prompts"][0]["picture"] for run in page_of(tmp_path)[1]["runs"]] == [0, 0, 1]
    large = np.random.default_rng(0).integers(0, 255, (3, 1024, 1024), np.uint8)
    assert len(page._address(large)) < 100_000


def test_replays_stop_where_the_page_would_grow_too_large(
    vega: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = page_of(made_up_runs(tmp_path, TWO))[1]["runs"]
    size = sum(len(json.dumps(run["prompts"][0]["replay"])) for run in whole)
    monkeypatch.setattr(page, "REPLAY_BUDGET", 2 * size + 1)
    text, data = page_of(tmp_path)
    for run in data["runs"]:
        assert [one["replay"] is not None for one in run["prompts"]] == [True] * 2 + [False] * 4
    assert "Replays of the first 2 prompts only" in text
