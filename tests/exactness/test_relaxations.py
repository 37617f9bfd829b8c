"""Every relaxation at one length, by enumeration: each is best by its own measure."""

import runpy
from pathlib import Path
from types import ModuleType

import pytest

from tempera.exactness import gaussians, relaxations
from tempera.exactness.relaxations import (
    SCHEDULES,
    as_table,
    at_length,
    curves,
    draw,
    random_tables,
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_each_optimum_is_one(seed: int) -> None:
    points = at_length(*random_tables(seed), share=0.45)
    lengths = [length for length, _, _ in points.values()]
    assert max(lengths) - min(lengths) < 1e-4
    tv = {name: bound for name, (_, bound, _) in points.items()}
    kl = {name: nats for name, (_, _, nats) in points.items()}
    others = [*SCHEDULES, "uniform, residual=kl", "one price"]
    assert tv["TV optimum"] < min(tv[name] for name in others)
    assert kl["KL optimum"] < min(kl[name] for name in [*others, "TV optimum"])
    assert kl["least possible"] <= kl["KL optimum"] < 1.01 * kl["least possible"]
    assert kl["uniform, residual=kl"] < kl["uniform"]
    assert tv["uniform, residual=kl"] == pytest.approx(tv["uniform"], abs=1e-4)


@pytest.mark.slow
def test_the_table_and_the_figure(tmp_path: Path) -> None:
    found = curves(tables=1)
    assert as_table(found).count("\n") == 1 + len(found) == 9
    draw(found, tmp_path / "optimal.png")
    assert (tmp_path / "optimal.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("module", [relaxations, gaussians])
def test_tables_are_printed_by_the_command_alone(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.__file__
    runpy.run_path(module.__file__)
    assert capsys.readouterr().out == ""
