"""What `tempera-eval` makes of its options, on a tiny model and one prompt."""

import json
from pathlib import Path

import pytest
from tiny_evaluation import tiny_options

from tempera.commands import evaluate
from tempera.config.compose import composed_run
from tempera.reporting import page, run_report
from tempera.shapes.scenes import world_prompts


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without pictures, which take seconds."""
    monkeypatch.setattr(run_report, "_draw", lambda *_: None)
    monkeypatch.setattr(page, "write", lambda *_: None)


def test_what_the_model_does_not_read_and_scores_of_ones_own_are_told_and_recorded(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `batch_size=auto` on a CPU is the family's."""
    (tmp_path / "mine.txt").write_text("an astronaut\n")
    (tmp_path / "scores.csv").write_text("id,name,value\nmine-000001,pick,3\n")
    given = ["data=file", f"path={tmp_path / 'mine.txt'}", f"scores={tmp_path / 'scores.csv'}"]
    options = [*tiny_options(tmp_path), *given, "speed.prompts=0", "batch_size=auto"]
    cfg = composed_run("eval", ["method=eagle", *options], tmp_path / "run")
    assert evaluate.main(cfg)["pick"] == 3
    (warning,) = [one for one in capsys.readouterr().out.splitlines() if "warning: " in one]
    data = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert [f"warning: {one}." for one in data["warnings"]] == [warning]
    assert "astronaut" in warning
