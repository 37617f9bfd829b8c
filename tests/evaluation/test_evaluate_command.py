"""What `tempera-eval` makes of its options, on a tiny model and one prompt."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from tiny_evaluation import tiny_options

from tempera.commands import evaluate
from tempera.config.compose import composed
from tempera.reporting import run_report


def test_words_that_are_not_read_scores_of_ones_own_and_a_failed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are told and recorded, the scores measured, and the report's failure is a
    sentence.
    """
    monkeypatch.setattr(run_report, "write", Mock(side_effect=OSError("full")))
    (tmp_path / "mine.txt").write_text("an astronaut\na red ring\n")
    scores = "id,name,value\nmine-000001,pick,3\nmine-000002,pick,4\n"
    (tmp_path / "scores.csv").write_text(scores)
    given = ["data=file", f"path={tmp_path / 'mine.txt'}", f"scores={tmp_path / 'scores.csv'}"]
    options = ["method=eagle", *tiny_options(tmp_path), *given, "speed.prompts=0", "depth=2"]
    auto = ["batch_size=auto", "family.batch_size=1"]  # the first batch of a GPU has 256
    cfg = composed("eval", [*options, *auto], tmp_path / "run")
    assert evaluate.main(cfg)["pick"] == 3.5
    assert pd.read_parquet(tmp_path / "run" / "results.parquet")["batch"].tolist() == [1, 1]
    told = capsys.readouterr().out.splitlines()
    assert f"no report (full): the results are in {tmp_path / 'run'}." in told
    (warning,) = [line for line in told if line.startswith("warning: ")]
    data = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert [f"warning: {one}." for one in data["warnings"]] == [warning]
    assert "no words such as astronaut" in warning


def test_of_several_processes_the_main_one_tells_what_a_run_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "Processes", lambda cpu: SimpleNamespace(is_main=False))
    dry = ["prompt=a red ring", "metrics=none", "dry_run=true", "device=cpu", "tracking=none"]
    assert evaluate.main(composed("eval", dry)) == {}
    assert capsys.readouterr().out == ""


def test_one_prompt_is_timed_on_demand(tmp_path: Path) -> None:
    timed = ["method=eagle", *tiny_options(tmp_path), "prompt=a red ring", "depth=2"]
    quick = [option for option in timed if option != "speed.prompts=1"]
    assert "speedup" in evaluate.main(composed("eval", timed, tmp_path / "timed"))
    assert "speedup" not in evaluate.main(composed("eval", quick, tmp_path / "quick"))


def test_a_relaxation_stricter_than_exact_decoding_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [*tiny_options(tmp_path), "method=uniform_rsd", "depth=2", "speed.prompts=0"]
    for options, told in ((["delta=0.5"], 1), (["delta=0.5", "floor=1"], 0), (["delta=1"], 0)):
        evaluate.main(composed("eval", [*shared, *options], tmp_path / ",".join(options)))
        assert capsys.readouterr().out.count("warning: the relaxation ω = 0.5, 0.5") == told
