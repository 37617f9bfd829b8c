import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import RUNS, made_up_runs

from tempera.decoding.replay import REPLAYS
from tempera.reporting import page_pictures, report_page
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.page_pictures import data_addresses
from tempera.reporting.report_page import packed, packed_replay
from tempera.reporting.study import StudyTable
from tempera.runtime.image_files import picture_path
from tempera.runtime.row_store import Store

TWO = (RUNS[0], RUNS[3])


class Page(HTMLParser):
    """What a browser would find: elements that load something, and scripts with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        found = dict(given)
        self.sources += [found[name] or "" for name in ("src", "href", "data") if name in found]
        if tag == "script":
            self.scripts.append((found.get("type"), ""))

    def handle_data(self, text: str) -> None:
        if self.lasttag == "script" and self.scripts:
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + text)


def page_of(directory: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """The page of all runs in a directory, and its data."""
    rows, _ = collect(find_runs([directory])[0])
    path = report_page.write(directory / "report.html", rows, **options)
    text = path.read_text(encoding="utf-8")
    (data,) = [body for kind, body in Page(text).scripts if kind == "application/json"]
    return text, json.loads(data)


def unpacked(text: str) -> list[int]:
    width, body = text.split(":")
    return np.frombuffer(base64.b64decode(body), f"<u{width}").tolist()


def test_the_study_is_on_the_page(tmp_path: Path) -> None:
    made_up_runs(tmp_path, TWO)
    part = StudyTable("Losses <at> equal length", "Paired.", ["run", "FID"], [["a", "+1*"]])
    text, data = page_of(tmp_path, studied=[part])
    assert data["study"] == [dataclasses.asdict(part)]
    assert "Losses <at>" not in text


def test_the_page_stands_alone(tmp_path: Path) -> None:
    text, data = page_of(made_up_runs(tmp_path, TWO))
    page = Page(text)
    assert page.sources == ["data:,"]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert [kind for kind, _ in page.scripts] == ["application/json", None]
    assert "default-src 'none'" in text
    assert "{{" not in text
    assert all(one.startswith("data:image/webp;base64,") for one in data["pictures"])


def test_a_run_stands_beside_plain_autoregression(tmp_path: Path) -> None:
    made_up_runs(tmp_path, TWO)
    made_up_runs(tmp_path / "other", RUNS[3:4], seed=1)
    _, data = page_of(tmp_path)
    plain, same, other = data["runs"]
    assert [run["name"] for run in data["runs"]] == ["ar", "coolsd δ=2", "coolsd δ=2"]
    assert (plain["plain"], plain["reference"]) == (True, None)
    assert (same["reference"], other["reference"]) == (0, None)
    assert [one["text"] for one in same["prompts"]] == [one["text"] for one in plain["prompts"]]
    value, low, high, n, text, span = same["metrics"]["accepted_length"]
    assert low < value < high
    assert n == 6
    assert text == f"{value:.2f}"
    assert span == f"{low:.2f} … {high:.2f}"
    assert same["differences"]["clip_score"][0] < 0
    assert data["metrics"][0] == {
        "key": "accepted_length",
        "title": "accepted length",
        "heading": "accepted length",
        "unit": "tokens per round; AR has 1.00",
        "main": True,
        "axis": "gain",
    }


def test_a_replay_comes_back_out_of_the_page(tmp_path: Path) -> None:
    _, data = page_of(made_up_runs(tmp_path, TWO, grid=(3, 5)))
    plain, drafted = (run["prompts"][0]["replay"] for run in data["runs"])
    assert unpacked(plain["emitted"]) == [1] * 15
    assert unpacked(plain["nodes"]) == [0] * 15
    assert "fate" not in plain
    assert (drafted["rows"], drafted["columns"], drafted["blank"]) == (3, 5, 0)
    emitted, nodes = unpacked(drafted["emitted"]), unpacked(drafted["nodes"])
    assert sum(emitted) == len(unpacked(drafted["origin"])) == 15
    assert sum(nodes) == len(unpacked(drafted["fate"])) == len(unpacked(drafted["drafted"]))
    assert unpacked(drafted["parents"]) == [0, 1, 2, 3, 4]  # one chain stands for all rounds
    assert all(number > 0 for number in unpacked(drafted["logprob"]))


def test_numbers_are_packed_as_narrow_as_they_are() -> None:
    for values, width in (([], 1), ([0, 255], 1), ([256, 3], 2), ([65536, 1], 4)):
        assert packed(values).startswith(f"{width}:")
        assert unpacked(packed(values)) == values


def test_trees_by_round_line_ends_and_continuous_tokens() -> None:
    row = {
        "rows": 2,
        "columns": 3,
        "place": [1, 2, 3, 1, 2, 1],
        "origin": [2, 2, 1, 2, 1, 0],
        "logprob": [-0.5, None, 0.0, -100.0, -1.0, -2.0],
        "tokens": [1, 2, 3, 4, 5, 6],
        "nodes": [2, 2, 2],
        "drafted": [7] * 6,
        "parent": [-1, 0, -1, -1, -1, 0],
        "fate": [2] * 6,
    }
    found = packed_replay(row, (16, 16))
    assert found["blank"] == 1
    assert unpacked(found["parents"]) == [0, 1, 0, 0, 0, 1]
    assert unpacked(found["logprob"]) == [500, 65535, 0, 65535, 1000, 2000]
    assert unpacked(found["emitted"]) == [3, 2, 1]
    assert packed_replay(row, (16, 24))["blank"] == 0
    vectors = {
        **{name: row[name] for name in ("rows", "columns", "place", "origin")},
        "order": [5, 4, 3, 2, 1, 0],
        "proposed": [4, 4, 4, 3, 3, 0],
        **{name: [] for name in ("nodes", "drafted", "parent", "fate")},
    }
    found = packed_replay(vectors, None)
    assert unpacked(found["nodes"]) == [4, 3, 0]
    assert unpacked(found["order"]) == [5, 4, 3, 2, 1, 0]
    assert not {"tokens", "logprob", "fate"} & set(found)


def test_runs_without_replays_or_pictures_are_shown_and_said(tmp_path: Path) -> None:
    made_up_runs(tmp_path, TWO)
    plain, drafted = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    for path in (plain / REPLAYS).iterdir():
        path.unlink()
    (part,) = (drafted / REPLAYS).iterdir()
    part.write_bytes(b"PAR1 half")
    picture_path(drafted, "world-000002").write_bytes(b"no picture")
    _, data = page_of(tmp_path, cautions=["compare with care"])
    assert data["cautions"][0] == "compare with care"
    assert data["cautions"][1].startswith("Not shown: ") and "000002.png" in data["cautions"][1]
    assert data["cautions"][2].startswith("Replays left out: ") and str(part) in data["cautions"][2]
    assert len(data["cautions"]) == 3
    assert {one["replay"] for run in data["runs"] for one in run["prompts"]} == {None}
    assert data["runs"][1]["prompts"][2]["picture"] is None


def test_a_replay_of_other_columns_is_named_and_left_out(tmp_path: Path) -> None:
    made_up_runs(tmp_path, TWO[:1])
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    store = Store(run / REPLAYS)
    store.add([{**row, "origin": ["x"]} for row in store.rows().values()])
    _, data = page_of(tmp_path)
    (caution,) = data["cautions"]
    assert "that of world-000000 in " in caution
    assert f"{REPLAYS} is damaged (a value is of another kind)" in caution
    assert {one["replay"] for one in data["runs"][0]["prompts"]} == {None}


def test_names_and_prompts_cannot_end_the_script(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--&"
    made_up_runs(tmp_path / "<b>&", TWO, model=hostile)
    text, data = page_of(tmp_path)
    assert len(Page(text).scripts) == 2
    assert hostile not in text
    assert data["runs"][0]["model"] == hostile
    assert "<b>&" in data["runs"][0]["directory"]


def test_the_same_rows_write_the_same_page(tmp_path: Path) -> None:
    assert page_of(made_up_runs(tmp_path, TWO)) == page_of(tmp_path)


def test_equal_pictures_are_kept_once() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 255, (2, 3, 16, 16), dtype=np.uint8)
    addresses = data_addresses([first, second, first.copy()], 10**6)
    assert addresses[0] == addresses[2] != addresses[1]


@pytest.mark.slow
@pytest.mark.parametrize("edge", [32, 200])
def test_pictures_shrink_until_they_fit(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pictures = list(rng.integers(0, 255, (12, 3, edge, edge), dtype=np.uint8))
    whole = sum(map(len, data_addresses(pictures, 10**8)))
    for budget in (whole - 1, whole // 3):
        assert sum(map(len, set(data_addresses(pictures, budget)))) <= budget
    least = [page_pictures._address(page_pictures.ENCODINGS[-1](one)) for one in pictures]
    assert data_addresses(pictures, 10) == least
    tried = []
    encode = page_pictures._WebP.__call__
    monkeypatch.setattr(
        page_pictures._WebP, "__call__", lambda way, one: (tried.append(way), encode(way, one))[1]
    )
    data_addresses(pictures, 10**8)
    assert (page_pictures.ENCODINGS[0] in tried) == (edge < 128)


def test_replays_stop_where_the_page_would_grow_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = page_of(made_up_runs(tmp_path, TWO))[1]["runs"]
    sizes = [sum(len(json.dumps(run["prompts"][i]["replay"])) for run in whole) for i in (0, 1)]
    monkeypatch.setattr(report_page, "REPLAY_BUDGET", sum(sizes) + 1)
    _, data = page_of(tmp_path)
    for run in data["runs"]:
        assert [one["replay"] is not None for one in run["prompts"]] == [True] * 2 + [False] * 4
    assert data["cautions"] == ["Replays of the first 2 prompts only, to keep the page small."]


@pytest.mark.slow
def test_thirty_runs_of_twenty_four_prompts_stay_below_ten_megabytes(tmp_path: Path) -> None:
    runs = [("ar", None, 0.0), *(("coolsd", 1 + k / 10, 0.5) for k in range(29))]
    text, data = page_of(made_up_runs(tmp_path, runs, prompts=24, grid=(12, 12)))
    assert len(text.encode()) < 10e6
    assert all(one["replay"] for run in data["runs"] for one in run["prompts"])
    assert len(data["runs"]) == 30
