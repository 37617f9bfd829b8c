"""docs/optimal_figure.py; that each optimum is one is tested with the rules."""

import runpy
from pathlib import Path

import torch
from paths import ROOT

FIGURE = runpy.run_path(str(ROOT / "docs" / "optimal_figure.py"))


def test_the_table_and_the_figure(tmp_path: Path) -> None:
    names = list(FIGURE["STYLES"])
    found = {
        name: torch.tensor([[2.0, 0.1, 0.2], [4.0, 0.3, 0.1 * place]])
        for place, name in enumerate(names, start=1)
    }
    lines = FIGURE["as_table"](found, place=1).splitlines()
    assert lines[2] == f"| {names[0]} | 4.00 | 0.0750 | 0.0250 |" and len(lines) == 2 + len(names)
    FIGURE["draw"](found, tmp_path / "optimal.png")
    assert (tmp_path / "optimal.png").read_bytes()[:4] == b"\x89PNG"
