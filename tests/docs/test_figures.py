"""Scripts that draw pictures of the docs; that each optimum is one is tested with the rules."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from PIL import Image
from report_runs import RUNS, made_up_runs


def test_the_table_and_the_figure_of_the_optima(tmp_path: Path) -> None:
    figure = runpy.run_path(str(ROOT / "docs" / "optimal_figure.py"))
    names = list(figure["STYLES"])
    found = {
        name: torch.tensor([[2.0, 0.1, 0.2], [4.0, 0.3, 0.1 * place]])
        for place, name in enumerate(names, start=1)
    }
    lines = figure["as_table"](found, place=1).splitlines()
    assert lines[2] == f"| {names[0]} | 4.00 | 0.0750 | 0.0250 |" and len(lines) == 2 + len(names)
    figure["draw"](found, tmp_path / "optimal.png")
    assert (tmp_path / "optimal.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_replay_has_one_frame_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, file = made_up_runs(tmp_path / "runs", (RUNS[0], RUNS[3])), tmp_path / "replay.webp"
    monkeypatch.setattr(sys, "argv", ["replay_animation.py", str(file), str(runs)])
    runpy.run_path(str(ROOT / "docs" / "replay_animation.py"), run_name="__main__")
    with Image.open(file) as moving:
        # the last frame of plain autoregression, a token a round, stays
        assert getattr(moving, "n_frames", 1) == 1 + 8 * 8
