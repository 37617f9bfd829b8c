"""A user's text is shown as it is, wherever it is drawn or written, and an output that fails costs
itself alone.
"""

import io
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_runs import RUNS, made_up_runs
from sent_runs import keep_sent_runs
from tiny_evaluation import tiny_evaluate, tiny_pipeline

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.reporting import figures, page, pareto
from tempera.reporting.collect import collect, find_runs
from tempera.reporting.report import write_report
from tempera.reporting.tables import Output, escaped, markdown, show
from tempera.reporting.tables import page as html_table
from tempera.runtime.side_services import side_service
from tempera.runtime.tracking import WandbTracker, wandb_tracker

MARKUP = [
    "a $5 bill and a $10 bill",
    r"a ring for $\frac{1}{$ euros",
    "[red]x[/red] [/] :star:",
    "<b>&amp; _x_ *y* `z` | ~~w~~",
    "{why} {0} {x",
    "100% #1 __init__ a_b",
]
PICTURE = np.zeros((3, 8, 8), np.uint8)


@pytest.mark.parametrize("text", MARKUP)
def test_a_figure_draws_the_signs_that_it_is_given(text: str, tmp_path: Path) -> None:
    """Whatever matplotlib is set to; the picture is that of a machine without mathematics."""
    with mpl.rc_context({"text.parse_math": False}):
        figures.grid(tmp_path / "plain.png", text, [PICTURE], [text], [True])
    with mpl.rc_context({"text.usetex": True}):
        figures.grid(tmp_path / "grid.png", text, [PICTURE], [text], [True])
    assert (tmp_path / "grid.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


@pytest.mark.parametrize(("text", "lines"), [("猫と犬", 1), ("a cat", 0)])
def test_letters_that_the_font_lacks_are_told_once(
    text: str, lines: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    figures.grid(tmp_path / "grid.png", "ar", [PICTURE] * 2, [text] * 2, [False] * 2)
    out, err = capfd.readouterr()
    assert (out.count("shows boxes in place of letters"), out.count("\n"), err) == (
        lines,
        lines,
        "",
    )


@pytest.mark.parametrize("text", MARKUP)
def test_the_console_prints_the_signs_that_it_is_given(text: str) -> None:
    out = io.StringIO()
    show(pd.DataFrame({text: [text], "b": [text]}), text, Output(file=out, width=200))
    assert out.getvalue().count(text) == 4


SIGNS = st.text("a1 _*`~$&;#<>[]()|\\!-+.:", min_size=1, max_size=12)


@given(SIGNS)
def test_markdown_shows_the_signs_that_it_is_given(text: str) -> None:
    """As a heading and in a table, read by a parser of Markdown."""
    words = " ".join(text.split())
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    table = markdown(pd.DataFrame({"run": [text], "x": ["y"]}))
    for source in (f"- [{escaped(text)}](a)", table):
        shown = [
            child.content
            for token in parser.parse(source)
            for child in token.children or []
            if child.type not in ("link_open", "link_close")
        ]
        kinds = {child.type for token in parser.parse(source) for child in token.children or []}
        assert kinds <= {"text", "link_open", "link_close", "text_special"}
        assert words in ("".join(shown), *["".join(shown).removeprefix("runx").removesuffix("y")])
    assert "$" not in escaped(text).replace("\\$", "")


def test_html_breaks_lines_before_intervals_alone() -> None:
    html = html_table(pd.DataFrame({"run": ["a (b) <i>"], "x": ["1.0 (0.5 … 1.5)"]}))
    assert "a (b) &lt;i&gt;" in html and "1.0<br>(0.5 … 1.5)" in html


@pytest.mark.parametrize("text", MARKUP)
def test_a_side_service_names_the_place_as_it_is(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with side_service(f"{text.replace('{why}', '')} failed ({{why}})."):
        raise OSError(text)
    assert capsys.readouterr().out.startswith(text.replace("{why}", ""))


def test_a_figure_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other pictures, the page and the tracker get everything else."""
    sent = keep_sent_runs(monkeypatch, tmp_path / "staged")
    monkeypatch.setattr(figures, "grid", Mock(side_effect=ValueError("no ink")))
    logged = Mock()
    tracker = wandb_tracker(directory=tmp_path / "run", project="x", mode="offline", job_type="e")
    assert isinstance(tracker, WandbTracker)
    monkeypatch.setattr(tracker, "image", lambda name, path, caption="": logged(name))
    tiny_evaluate(tmp_path / "run", tiny_pipeline(), [Prompt("a", MARKUP[1])], tracker)
    out = capsys.readouterr().out
    assert f"{tmp_path / 'run' / 'grid.png'} cannot be drawn (no ink)" in out
    logged.assert_called_once_with("acceptance")
    names = ["acceptance.png", "metrics.json", "report.html", "results.parquet"]
    assert sent["e"].files == {"evaluation": names} and sent["e"].finished
    assert len(sent["e"].tables["images"][1]) == 1


def test_a_thing_that_a_tracker_does_not_take_is_named_and_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = WandbTracker(run := Mock())
    tracker.image("grid", tmp_path / "missing.png")
    tracker.table("images", ["image"], [[tmp_path / "missing.png"]])
    tracker.finish()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("grid could not be sent to W&B (")
    assert run.log.call_count == 1 and run.finish.call_count == 1


@pytest.mark.parametrize(("part", "file"), [(pareto, "pareto.png"), (page, "report.html")])
def test_a_part_of_a_report_that_fails_costs_itself_alone(
    part: Any, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, _ = collect(find_runs([made_up_runs(tmp_path / "runs", RUNS[:2])])[0])
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: "vegaEmbed = 0")
    monkeypatch.setattr(part, "write", Mock(side_effect=RuntimeError("no ink")))
    with pytest.raises(TemperaError, match=f"{file} cannot be drawn: no ink; the rest of the"):
        write_report(runs, tmp_path / "report")
    files = {"pareto.png", "report.html", "report.md", "results.csv", "tables.csv"} - {file}
    assert {path.name for path in (tmp_path / "report").iterdir()} == files


def test_a_model_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: "vegaEmbed = 0")
    for model in ("own/model", "datum['x'] $y$"):
        made_up_runs(tmp_path / "runs" / model[:3], RUNS[2:3], model=model)
    runs, _ = collect(find_runs([tmp_path / "runs"])[0])
    names = {path.name for path in write_report(runs, tmp_path / "report")}
    assert {"pareto_own-model.png", "pareto_datum-x-y-.png"} <= names
