"""evidence.md: one page of a sweep's runs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread
from report_runs import RUNS, made_up_runs

from tempera.reporting.evidence import EvidencePage


def test_a_sweep_becomes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["eval/run.py", "-m", "experiment=evidence", "method=ar,scd", "model=shapes"]
    monkeypatch.setattr(sys, "argv", typed)
    made_up_runs(tmp_path, RUNS[:3], prompts=2)
    for number, path in enumerate(sorted(tmp_path.rglob("metrics.json"))):
        content = json.loads(path.read_text())
        content["memory"] = (number + 1) * 2**30
        path.write_text(json.dumps(content))
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))))
    EvidencePage().on_multirun_end(config)
    assert str(tmp_path / "evidence.md") in capsys.readouterr().out
    text = (tmp_path / "evidence.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| coolsd")]
    assert "3.00" in lines[0]  # GiB
    assert f"python {' '.join(typed)}" in text and "evidence.png" in text
    cells = json.loads((tmp_path / "evidence.json").read_text())
    assert {cell["row"] for cell in cells} >= {"ar", "eagle"}
    height, width, _ = imread(tmp_path / "evidence.png").shape
    assert height > width / 2


def test_a_sweep_without_a_finished_run_has_no_page(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))))
    EvidencePage().on_multirun_end(config)
    assert not list(tmp_path.iterdir())
