"""The script that draws the moving picture of the README."""

import runpy
import sys
from pathlib import Path

import pytest
from paths import ROOT
from PIL import Image
from report_runs import RUNS, made_up_runs


@pytest.mark.slow
def test_one_frame_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, file = made_up_runs(tmp_path / "runs", (RUNS[0], RUNS[3])), tmp_path / "replay.webp"
    script = ROOT / "docs" / "replay_animation.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(file), str(runs)])
    runpy.run_path(str(script), run_name="__main__")
    with Image.open(file) as moving:
        # the last frame of plain autoregression, a token a round, stays
        assert getattr(moving, "n_frames", 1) == 1 + 8 * 8
