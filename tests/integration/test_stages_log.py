"""What the commands send to W&B once they are done; evaluations: tests/evaluation/test_run.py,
trainings: tests/training/test_trainer.py, tuning: tests/evaluation/test_tuning.py.
"""

from pathlib import Path
from typing import Any

import pytest
from sent_runs import SentRun, keep_sent_runs
from tiny_evaluation import tiny_options

from tempera.commands import bench, prepare
from tempera.config.compose import composed
from tempera.runtime.files import read_json

Runs = dict[str, SentRun]


@pytest.fixture
def sent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return keep_sent_runs(monkeypatch, tmp_path / "staged")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The options of the tiny model; it has a draft."""
    return [one for one in tiny_options(tmp_path) if one.startswith(("model.", "drafter."))]


def test_a_benchmark_sends_its_times_and_its_table(
    tmp_path: Path, tiny: list[str], sent_runs: Runs
) -> None:
    quick = ["repeats=1", "batch_sizes=[2]", "bandwidth=1", "depth=2"]
    bench.main(composed("bench", [*tiny, *quick], tmp_path))
    run = sent_runs["bench"]
    assert run.finished and run.about["group"] == "shapes"
    assert run.about["config"]["batch_sizes"] == [2]
    content: Any = read_json(tmp_path / "bench.json")
    (column,) = content["columns"]
    for name in ("ar", "method"):
        median = column[name]["round"]["median"]
        assert run.summary[f"batch_2/{name}/round"] == median > 0
    columns, rows = run.tables["bench"]
    assert columns == ["ms: median (quartiles)", "batch 2"]
    shown = {row[0] for row in rows}
    assert {"round of AR", "speed-up ÷ accepted length", "operators in a round"} < shown
    (counts,) = content["launches"]
    assert counts[""]["operators"] > counts[" of AR"]["operators"] > 10
    assert run.files == {"bench": ["bench.json"]}


def test_preparing_sends_what_was_read(tmp_path: Path, tiny: list[str], sent_runs: Runs) -> None:
    """And nothing where nothing was left to read."""
    tokenizer = [one for one in tiny if "tokenizer" in one]
    options = [*tokenizer, "source=shapes", "encoder=vq", "source.count=3", "shard_size=2"]
    cfg = composed("prepare", options, tmp_path)
    prepare.main(cfg)
    run = sent_runs.pop("prepare")
    assert run.finished
    assert {name: run.summary[name] for name in ("images", "broken", "read")} == {
        "images": 3, "broken": 0, "read": 3
    }  # fmt: skip
    assert run.summary["seconds"] * run.summary["read_per_second"] == pytest.approx(3)
    assert run.files == {"prepare": ["manifest.json"]}
    prepare.main(cfg)
    assert not sent_runs
