"""Every relaxation at one length, by enumeration: each is best by its own measure."""

import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

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


def made_up() -> dict[str, torch.Tensor]:
    """Lengths, TV bounds and KL bounds of every relaxation at two lengths."""
    return {
        name: torch.tensor([[2.0, 0.1 * place, 0.2 * place], [4.0, 0.3 * place, 0.5 * place]])
        for place, name in enumerate(relaxations.STYLES, start=1)
    }


def test_the_table_shows_bounds_per_token() -> None:
    lines = as_table({"a": torch.tensor([[2.0, 0.1, 0.2], [4.0, 0.3, 0.5]])}, place=1).splitlines()
    assert lines[1:] == ["|---|---|---|---|", "| a | 4.00 | 0.0750 | 0.1250 |"]
    four = {"a": torch.arange(15.0).view(5, 3) + 1}
    assert as_table(four).splitlines()[2] == "| a | 10.00 | 1.1000 | 1.2000 |"


def test_the_figure_divides_by_the_uniform_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw(found := made_up(), Path("none.png"))
    for column, panel in enumerate(drawn[0].axes, start=1):
        lines = {line.get_label(): line for line in panel.get_lines()}
        assert set(lines) == set(found)
        for name, line in lines.items():
            expected = found[name][:, column] / found["uniform"][:, column]
            assert list(line.get_xdata()) == [2.0, 4.0]
            assert list(line.get_ydata()) == pytest.approx(expected.tolist())


def test_a_budget_is_found_by_bisection() -> None:
    found = relaxations._budgeted(float, lambda value: value, 3.0, (1e-2, 1e5))
    assert found == pytest.approx(3.0, rel=1e-6)


def test_random_tables_hold_a_token_more_of_the_target() -> None:
    p, q = random_tables(3)
    assert [one.shape for one in p] == [(1, 5), (5, 5), (25, 5), (125, 5)]
    assert [one.shape for one in q] == [(1, 5), (5, 5), (25, 5)]
    other, _ = random_tables(4)
    assert not p[0].equal(other[0]) and not p[0].equal(q[0])
