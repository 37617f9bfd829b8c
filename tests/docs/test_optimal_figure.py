"""docs/optimal_figure.py: each relaxation is best by its own measure, by enumeration."""

import runpy
from pathlib import Path

import pytest
import torch
from paths import ROOT

from tempera.exactness.tables import random_tables
from tempera.rules.optimal_schedule import Chains, reachable

FIGURE = runpy.run_path(str(ROOT / "docs" / "optimal_figure.py"))


@pytest.mark.slow
def test_each_optimum_is_one() -> None:
    p, q = random_tables(0)
    points = FIGURE["at_length"](p, q, share=0.45)
    low, high = reachable(Chains.enumerated(p, q))
    for found, _, _ in points.values():
        assert found == pytest.approx(low + 0.45 * (high - low), abs=1e-4)
    tv = {name: bound for name, (_, bound, _) in points.items()}
    kl = {name: nats for name, (_, _, nats) in points.items()}
    others = [*FIGURE["SCHEDULES"], "uniform, residual=kl", "one price"]
    assert tv["TV optimum"] < min(tv[name] for name in others)
    assert kl["KL optimum"] < min(kl[name] for name in [*others, "TV optimum"])
    assert kl["least possible"] <= kl["KL optimum"] < 1.01 * kl["least possible"]
    assert kl["uniform, residual=kl"] < kl["uniform"]
    assert tv["uniform, residual=kl"] == pytest.approx(tv["uniform"], abs=1e-4)


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
