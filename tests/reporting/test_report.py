import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from paths import ROOT
from report_runs import RUNS, made_up_runs

from tempera.commands import report as report_command
from tempera.config.compose import composed
from tempera.errors import TemperaError
from tempera.metrics import table
from tempera.reporting import console, report, wandb_report
from tempera.reporting.baseline import compare, label
from tempera.reporting.collect import ReportRow, collect, find_runs
from tempera.reporting.report import report_markdown, write_report
from tempera.reporting.run_names import run_name
from tempera.reporting.wandb_report import blocks, publish
from tempera.runtime.image_files import picture_path, write_picture
from tempera.runtime.row_store import write_table
from tempera.runtime.tracking import NoTracker
from tempera.shapes.scenes import world_prompts

SCRIPT = ROOT / "eval" / "report.py"


def interval(value: float, width: float = 0.1) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width, "n": 20}


def make_run(
    directory: Path, method: str, delta: float | None = None, quality: float = 0.0, **settings: Any
) -> Path:
    """A finished run directory as eval/run.py leaves it."""
    gain = 1.0 if method == "ar" else 1.5 + (delta or 0) / 2
    metrics = {
        "accepted_length": interval(gain),
        "speedup": interval(0.8 * gain),
        "efficiency": interval(0.8),
        "fid": interval(20 + quality, 3),
        "kid": interval(0.05 + quality / 100, 0.01),
        "clip_score": interval(0.6 - quality / 50, 0.02),
        "recall": interval(0.5),
        "attribute_accuracy": interval(0.9 - quality / 40, 0.03),
        "kl_per_token": interval(quality / 100, 0.01),
    }
    known = {
        "method": method,
        "model": "shapes",
        "guidance": 3.0,
        "seed": 0,
        "target": "abc",
        **settings,
    }
    known |= (
        {}
        if delta is None
        else {
            "delta": delta,
            "floor": 0,
            "residual": "optimal",
            "schedule": "exponential",
            **settings,
        }
    )
    prompts = world_prompts(10)
    apart = ("seed", "model", "expected_length", *([] if settings.get("steps") else ["steps"]))
    changes = {name: value for name, value in settings.items() if name not in apart}
    content = {
        "name": run_name(method, changes, delta),
        "settings": known,
        "images": len(prompts),
        "metrics": metrics,
        "about": {"machine": "cpu", "changes": changes},
    }
    rows = [
        {
            "id": prompt.id,
            "text": prompt.text,
            "tokens": [0, 1],
            "rounds": 2 / gain,
            "accepted_length": gain,
            "logprob": -4.0 - quality,
            "clip_score": 0.6 - quality / 50 + 0.01 * place,
            "shape1": float(place % 2),
            "shape2": None,
            "colour1": 1.0,
            "colour2": None,
            "background": 1.0,
        }
        for place, prompt in enumerate(prompts)
    ]
    directory.mkdir(parents=True)
    write_table(directory / "results.parquet", rows)
    for prompt in prompts:
        write_picture(
            picture_path(directory, prompt.id), np.full((3, 16, 16), 40 + int(quality), np.uint8)
        )
    (directory / "run.json").write_text("{}")
    (directory / "metrics.json").write_text(json.dumps(content))
    return directory


def read(*paths: Path, baseline: str | None = None) -> list[ReportRow]:
    """The rows of the finished runs, none of which is damaged."""
    rows, damaged = collect(find_runs(paths)[0], baseline)
    assert damaged == []
    return rows


@pytest.mark.slow
def test_runs_of_continuous_tokens_are_compared_with_mar_at_one_token_a_step(
    tmp_path: Path,
) -> None:
    directories = [
        make_run(tmp_path / "ar", "ar", steps=None),
        make_run(tmp_path / "fewer", "ar", steps=16),
        make_run(tmp_path / "cspd", "cspd", gamma=8),
    ]
    for directory in directories:  # vectors have densities, and no probabilities
        rows = [
            {name: value for name, value in row.items() if name != "logprob"}
            for row in pq.read_table(directory / "results.parquet").to_pylist()
        ]
        write_table(directory / "results.parquet", rows)
    rows = read(*directories)
    assert [bool(row["differences"]) for row in rows] == [False, True, True]
    assert rows[0]["settings"]["steps"] is None
    assert "logprob_per_token" not in rows[1]["differences"]
    write_report(rows, tmp_path / "a")
    text = (tmp_path / "a" / "report.md").read_text()
    assert "No run here is plain autoregression" not in text and "ar steps=16" in text
    write_report(rows[1:], tmp_path / "b")
    assert (
        "No run here is plain autoregression (method=ar)"
        in (tmp_path / "b" / "report.md").read_text()
    )


def test_a_difference_has_its_sign() -> None:
    assert [console.number(value, "+.2f") for value in (0.5, -0.5, -0.001)] == [
        "+0.50",
        "-0.50",
        "+0.00",
    ]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "ar", "ar")
    make_run(tmp_path / "eagle", "eagle")
    for number, delta in enumerate((2.0, 1.1)):
        make_run(tmp_path / "sweep" / str(number), "coolsd", delta, quality=delta)
        make_run(tmp_path / "sweep" / f"floor{number}", "coolsd", delta, quality=delta / 2, floor=1)
    (tmp_path / "sweep" / "unfinished").mkdir()
    (tmp_path / "sweep" / "unfinished" / "run.json").write_text("{}")
    return tmp_path


def test_the_command_names_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ar", "damaged"):
        make_run(tmp_path / name, "ar")
    (tmp_path / "damaged" / "metrics.json").write_text('{"settings": {}}')
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text("{}")
    monkeypatch.setattr(report, "write_report", lambda *_: [])
    report_command.main(composed("report", [f"runs={tmp_path}"]))
    damaged, unfinished = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"left out: {tmp_path / 'damaged' / 'metrics.json'} is not an ")
    assert "is missing" in damaged
    assert unfinished == f"left out: {tmp_path / 'unfinished'} is unfinished"


@pytest.mark.slow
def test_a_report_of_many_runs(runs: Path, tmp_path: Path) -> None:
    finished, unfinished = find_runs([runs])
    assert len(finished) == 6
    assert [path.name for path in unfinished] == ["unfinished"]
    rows, _ = collect(finished)
    assert [row["family"] for row in rows] == [
        "ar",
        "eagle",
        "coolsd",
        "coolsd",
        "coolsd floor=1",
        "coolsd floor=1",
    ]
    assert [row["delta"] for row in rows] == [None, None, 1.1, 2.0, 1.1, 2.0]
    files = {path.name for path in write_report(rows, tmp_path / "out", unfinished)}
    pictures = {"pareto.png", "pareto_more.png", "comparison.png"}
    assert files == {"results.csv", "report.md", "report.html"} | pictures
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| coolsd floor=1 | 2 | 10 | 2.50 (2.40 … 2.60) |" in text
    assert "Left out because unfinished" in text
    assert "](../sweep/floor0/grid.png)" in text
    table = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert len(table) == 6
    assert float(table[3]["fid"]) == pytest.approx(22)
    assert float(table[3]["fid_low"]) == pytest.approx(19)
    assert table[0]["delta"] == ""


def test_differences_to_plain_autoregression_are_paired(runs: Path) -> None:
    rows = read(runs)
    assert rows[0]["differences"] == {}
    difference = rows[3]["differences"]["clip_score"]
    assert difference["value"] == pytest.approx(-0.04)
    assert difference["high"] - difference["low"] == pytest.approx(
        0, abs=1e-9
    )  # each prompt differs by the same
    assert rows[3]["differences"]["logprob_per_token"]["value"] == pytest.approx(-1.0)
    make_run(runs / "other", "coolsd", 3.0, seed=1)
    assert [row["differences"] for row in read(runs) if row["delta"] == 3] == [{}]


@pytest.mark.slow
def test_the_same_rows_write_the_same_files(runs: Path, tmp_path: Path) -> None:
    rows = read(runs / "sweep", runs / "ar")
    # as text, since a paired t that does not exist is not a number and equals nothing
    assert repr(rows) == repr(read(runs / "ar", runs / "sweep", runs / "sweep" / "0"))
    first, second = write_report(rows, tmp_path / "a"), write_report(rows, tmp_path / "b")
    for left, right in zip(first, second, strict=True):
        assert left.read_bytes() == right.read_bytes(), left.name


@pytest.mark.slow
def test_runs_of_several_models_and_missing_metrics(runs: Path, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "large", "eagle", model="large")
    content = json.loads((directory / "metrics.json").read_text())
    content["metrics"] = {
        "accepted_length": interval(2.0),
        "fid": {"value": None, "low": None, "high": None, "n": 0},
    }
    (directory / "metrics.json").write_text(json.dumps(content | {"images": 3}))
    rows = read(runs / "ar", directory)
    names = {path.name for path in write_report(rows, tmp_path / "out")}
    assert {"pareto_shapes.png", "report.md"} <= names
    text = (tmp_path / "out" / "report.md").read_text()
    assert "The runs differ in their number of images" in text
    assert "| eagle |  | 3 | 2.00 (1.90 … 2.10) | – |" in text


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match="nowhere is not a directory"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(TemperaError, match="there is no finished run in"):
        find_runs([tmp_path])


def call(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The script from the command line."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_the_script(runs: Path, tmp_path: Path) -> None:
    done = call("runs=sweep", "output=out", "baseline=coolsd", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "out/comparison.png"
    assert "## Difference from coolsd\n" in (tmp_path / "out" / "report.md").read_text()
    done = call("runs=none", directory=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "error: none is not a directory: give run directories, or a directory that contains some.\n"
    )


def contents(directory: Path) -> dict[str, bytes]:
    """Every file by name."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in files}


STALLED = """
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv.pop(1))
write = Path.write_text

def stall(self, text, **options):
    half = self.name.startswith(f".{NAME}")
    written = write(self, text[: len(text) // 2] if half else text, **options)
    if half:
        print("half of it is written", flush=True)
        time.sleep(60)
    return written

Path.write_text = stall
import report
report.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("results.csv", signal.SIGINT),
        ("report.html", signal.SIGINT),
        ("report.html", signal.SIGKILL),
    ],
)
def test_a_stop_leaves_the_last_report_whole(
    name: str, stop: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C or a kill between its files: the second report has another baseline."""
    runs, output = made_up_runs(tmp_path / "runs", (RUNS[0], RUNS[3])), tmp_path / "out"
    written = write_report(read(runs), output)
    before = contents(output)
    assert {path.name for path in written} == set(before) >= {"report.html"}
    started = subprocess.Popen(
        [
            *(sys.executable, "-c", f"NAME = {name!r}" + STALLED, str(SCRIPT.parent)),
            *(f"runs={runs}", f"output={output}", "baseline=coolsd"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == "half of it is written\n"
        started.send_signal(stop)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()
    if stop == signal.SIGINT:
        assert err == "interrupted; run the command again\n"
        assert started.returncode == 130
        assert not any(path.is_dir() for path in output.iterdir())
    assert contents(output) == before


@pytest.mark.slow
def test_directories_may_be_given_by_position(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "ar").rename(tmp_path / "plain, delta=0")
    done = call("plain, delta=0", "sweep", "output=out", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert {row["directory"] for row in rows} > {"plain, delta=0", "sweep/0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eagle",
        "out",
        "plain, delta=0",
        "sweep",
    ]


@pytest.mark.slow
def test_a_damaged_run_is_named_and_left_out(runs: Path, tmp_path: Path) -> None:
    (runs / "sweep" / "0" / "metrics.json").write_text('{"half')
    (runs / "sweep" / "1" / "metrics.json").write_text("{}")
    (runs / "sweep" / "floor0" / "results.parquet").write_bytes(b"PAR1 half")
    rows, damaged = collect(find_runs([runs])[0])
    assert [row["family"] for row in rows] == ["ar", "eagle", "coolsd floor=1"]
    assert [str(runs / "sweep") in problem for problem in damaged] == [True] * 3
    picture = picture_path(runs / "eagle", sorted(rows[0]["texts"])[0])
    picture.write_bytes(picture.read_bytes()[:60])
    picture_path(runs / "ar", sorted(rows[0]["texts"])[1]).unlink()
    files = {path.name for path in write_report(rows, tmp_path / "out", [], damaged)}
    assert files >= {"report.md", "results.csv", "comparison.png"}
    cautions = [
        line.removeprefix("> Left out because damaged: ")
        for line in (tmp_path / "out" / "report.md").read_text().splitlines()
        if line.startswith("> Left out because damaged")
    ]
    expected = (
        "0/metrics.json is not valid JSON",
        "1/metrics.json is not an evaluation's result",
        "floor0/results.parquet is damaged",
        "ar/images",
        "eagle/images",
    )
    assert len(cautions) == len(expected)
    assert all(text in line for text, line in zip(expected, cautions, strict=True))
    for directory in ("ar", "eagle", "sweep/floor1"):
        (runs / directory / "metrics.json").write_text("[]")
    with pytest.raises(TemperaError, match=r"no run can be read; .*metrics\.json"):
        collect(find_runs([runs])[0])


@pytest.mark.slow
def test_names_do_not_break_the_report(tmp_path: Path) -> None:
    make_run(tmp_path / "a (b) [c] | d", "ar")
    make_run(tmp_path / "e", "eagle", tree="a|b*c")
    rows = read(tmp_path)
    write_report(rows, tmp_path / "out", [tmp_path / "x`y"], [])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "](../a%20%28b%29%20%5Bc%5D%20%7C%20d/grid.png)" in text
    assert "| eagle tree=a\\|b\\*c |" in text
    assert "x\\`y" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line.replace("\\|", "").split("|")) for line in tables[:4]}) == 1


@pytest.mark.slow
def test_a_baseline_of_the_nearest_accepted_length(runs: Path, tmp_path: Path) -> None:
    rows = read(runs, baseline="coolsd")
    compared = {(row["family"], row["delta"]): row["baseline"] for row in rows}
    assert compared[("coolsd", 2.0)] is None
    assert compared[("coolsd floor=1", 1.1)] == "coolsd δ=1.1"
    assert compared[("coolsd floor=1", 2.0)] == "coolsd δ=2"
    assert compared[("eagle", None)] == "coolsd δ=1.1"
    differences = {(row["family"], row["delta"]): row["differences"] for row in rows}
    same = differences[("coolsd floor=1", 2.0)]
    assert same["accepted_length"]["value"] == pytest.approx(0)
    assert same["clip_score"]["value"] == pytest.approx(0.02)
    assert differences[("eagle", None)]["accepted_length"]["value"] == pytest.approx(-0.55)
    write_report(rows, tmp_path / "out", baseline="coolsd")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| run | δ | baseline | accepted lengths | t | accepted length | CLIP score |" in text
    assert "| coolsd floor=1 | 2 | coolsd δ=2 | 2.50 ≈ 2.50 | – | +0.0000" in text
    assert "| eagle |  | coolsd δ=1.1 | 1.50 ≠ 2.05 | – | -0.5500" in text


@pytest.mark.parametrize("name", ["coolsd floor=1 delta=2", "coolsd floor=1 δ=2", "floor0"])
def test_a_baseline_of_one_run(runs: Path, name: str) -> None:
    rows = read(runs, baseline=name)
    assert {row["baseline"] for row in rows} == {None, "coolsd floor=1 δ=2"}
    assert sum(row["baseline"] is None for row in rows) == 1


def test_an_unknown_baseline(runs: Path) -> None:
    with pytest.raises(
        TemperaError, match="baseline=cool matches no run: .* ar, coolsd, coolsd floor"
    ):
        read(runs, baseline="cool")


def test_accepted_length_is_compared_as_tokens_per_round() -> None:
    """Not as a mean over prompts of each one's ratio."""
    texts = {"a": (4.0, 1.0), "b": (2.0, 3.0)}
    slow = dict.fromkeys(texts, (1.0, 4.0))
    common = {"settings": {}, "directory": "x", "metrics": {}, "delta": None, "name": "run"}
    rows: list[ReportRow] = [
        {
            **common,
            "family": "fast",
            "prompts": {n: {"accepted_length": v} for n, v in texts.items()},
        },
        {
            **common,
            "family": "slow",
            "prompts": {n: {"accepted_length": v} for n, v in slow.items()},
        },
    ]
    compare(rows, "slow")
    assert rows[0]["differences"]["accepted_length"]["value"] == pytest.approx(10 / 4 - 1)


@pytest.mark.parametrize(("theirs", "compared"), [("ab", True), ("abc", False), ("a", False)])
def test_fid_is_compared_over_equal_sets_of_prompts(theirs: str, compared: bool) -> None:
    common = {"settings": {}, "directory": "x", "metrics": {}, "delta": None, "name": "run"}
    rows: list[ReportRow] = [
        {**common, "family": family, "prompts": {
            name: {"fid": (value, 1.0), "clip_score": (value, 1.0)} for name in names
        }}
        for family, names, value in (("fast", "ab", 3.0), ("slow", theirs, 2.0))
    ]  # fmt: skip
    compare(rows, "slow")
    assert rows[0]["differences"]["clip_score"]["value"] == 1
    assert ("fid" in rows[0]["differences"]) == compared
    assert not compared or rows[0]["differences"]["fid"]["value"] == 1


@pytest.mark.slow
def test_the_t_statistic_of_accepted_lengths() -> None:
    """Cool-SD, Appendix C.4."""
    from scipy.stats import ttest_rel

    ours, theirs = [2.0, 2.5, 3.0, 2.0, 2.8], [1.9, 2.5, 2.4, 2.1, 2.2]
    common = {"settings": {}, "directory": "x", "metrics": {}, "delta": None}
    rows: list[ReportRow] = [
        {
            **common,
            "name": name,
            "family": name,
            "prompts": {
                str(i): {"accepted_length": (value, 1.0)} for i, value in enumerate(values)
            },
        }
        for name, values in (("coolsd", ours), ("lanternpp chain", theirs))
    ]
    compare(rows, "lanternpp chain")
    t = rows[0]["differences"]["accepted_length"]["t"]
    assert t == pytest.approx(ttest_rel(ours, theirs).statistic)


def test_bounds_and_attributes_are_compared_prompt_by_prompt() -> None:
    paired = {metric.key for metric in table.METRICS if metric.paired}
    assert {"accepted_length", "tv_bound", "kl_per_token", "attribute_accuracy"} <= paired


def test_every_choice_tells_runs_apart(tmp_path: Path) -> None:
    changed: list[dict[str, Any]] = [
        {},
        {"drafter": "parallel"},
        {"drafter": "sjd"},
        {"rule": "block", "temperature": 0.5},
    ]
    runs = [
        make_run(tmp_path / str(place), "coolsd", 1.1, **one) for place, one in enumerate(changed)
    ]
    rows = read(*runs)
    assert [label(row) for row in rows] == [
        "coolsd δ=1.1",
        "coolsd drafter=parallel δ=1.1",
        "coolsd drafter=sjd δ=1.1",
        "coolsd rule=block temperature=0.5 δ=1.1",
    ]
    write_report(rows, tmp_path / "out")
    assert len(set((tmp_path / "out" / "report.md").read_text().splitlines()[8:12])) == 4


class Reports:
    """Replaces wandb_workspaces.reports.v2: each block stores its arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda **values: {"block": name, **values}


def test_the_published_report_shows_tables_figures_and_scatter_plots(
    runs: Path, tmp_path: Path
) -> None:
    rows = read(runs)
    text = report_markdown(rows, tmp_path, [tmp_path / "pareto.png"])
    markdown, pictures, evaluations = blocks(Reports(), rows, text, ["pareto"], "tempera", None)
    assert "| coolsd floor=1 |" in markdown["text"]
    sections = text.partition("\n## ")[2].split("\n## ")
    titles = [section.splitlines()[0] for section in sections]
    assert titles[0] == "Results" and titles[-1] == "Runs" and len(titles) > 2
    for section in sections[:-1]:  # block by block, without pictures, which are panels
        lines = [line for line in section.splitlines() if not line.startswith("![")]
        assert "\n".join(["## " + lines[0], *lines[1:]]).rstrip() in markdown["text"]
    assert [line[2:].partition("]")[0] for line in text.splitlines() if line.startswith("![")] == (
        pictures["panels"][0]["media_keys"]
    )
    assert "![" not in markdown["text"] and "## Runs" not in markdown["text"]
    assert pictures["panels"][0]["media_keys"] == ["pareto"]
    assert {"block": "ScatterPlot", "x": "speedup", "y": "fid"} in evaluations["panels"]
    assert evaluations["runsets"][0]["filters"] == "JobType = 'eval'"


@pytest.mark.slow
def test_publishing_sends_what_report_md_shows(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, sent = read(runs), dict[str, Any]()
    write_report(rows, tmp_path)

    class Online(NoTracker):
        def image(self, name: str, path: Path, caption: str = "") -> None:
            sent.setdefault("images", []).append(name)

        def artifact(self, name: str, kind: str, paths: Any) -> None:
            sent[name] = {path.name for path in paths}

    class Published:
        url = "https://wandb.test/report"

        def __init__(self, **values: Any) -> None:
            sent.update(values)

        def save(self) -> None:
            sent["saved"] = True

    def tracker(**settings: Any) -> NoTracker:
        sent.update(settings)
        return Online()

    monkeypatch.setattr(Reports, "Report", Published, raising=False)
    monkeypatch.setattr(wandb_report, "_reports", Reports)
    monkeypatch.setattr(wandb_report, "wandb_tracker", tracker)
    monkeypatch.setattr("wandb.login", lambda **_: True)
    assert publish(rows, tmp_path, "mine", "me") == Published.url
    assert (sent["job_type"], sent["mode"], sent["entity"]) == ("report", "online", "me")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    shown = {line[2:].partition("]")[0] for line in text.splitlines() if line.startswith("![")}
    assert shown == set(sent["images"]) and sent["saved"]
    assert sent["report"] >= {"report.md", "report.html", "results.csv"}
    assert sent["blocks"] == blocks(Reports(), rows, text, sent["images"], "mine", "me")


def test_publishing_without_its_library_is_one_sentence(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(
        TemperaError,
        match="publish=true needs wandb-workspaces, which is not installed: pip install "
        "wandb-workspaces",
    ):
        publish([], tmp_path)


def test_zero_has_no_sign() -> None:
    assert console.number(-0.0001, ".3f") == "0.000"
    assert console.number(-0.1, ".3f") == "-0.100"


def test_values_that_are_not_finite_have_no_interval() -> None:
    assert (
        report._span({"value": float("-inf"), "low": float("nan"), "high": float("nan")}, "+.4f")
        == "-inf"
    )
    assert report._span({"value": 0.5, "low": 0.25, "high": 0.75}, ".2f") == "0.50 (0.25 … 0.75)"
