"""Every relaxation at one length, by enumeration: each is best by its own measure."""

import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

from tempera.decoding.probabilities import kl_divergence, total_variation
from tempera.exactness import gaussians, relaxations
from tempera.exactness.relaxations import (
    SCHEDULES,
    SHARES,
    as_table,
    at_length,
    curves,
    draw,
    least_kl,
    random_tables,
)
from tempera.rules.optimal_prices import PricedRounds, reachable_by_price
from tempera.rules.optimal_schedule import Chains, reachable
from tempera.rules.schedules import Prices, constant_price


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_each_optimum_is_one(seed: int) -> None:
    p, q = random_tables(seed)
    points = at_length(p, q, share=0.45)
    low, high = reachable(Chains.along(p, q))
    for found, _, _ in points.values():
        assert found == pytest.approx(low + 0.45 * (high - low), abs=1e-4)
    tv = {name: bound for name, (_, bound, _) in points.items()}
    kl = {name: nats for name, (_, _, nats) in points.items()}
    others = [*SCHEDULES, "uniform, residual=kl", "one price"]
    assert tv["TV optimum"] < min(tv[name] for name in others)
    assert kl["KL optimum"] < min(kl[name] for name in [*others, "TV optimum"])
    assert kl["least possible"] <= kl["KL optimum"] < 1.01 * kl["least possible"]
    assert kl["uniform, residual=kl"] < kl["uniform"]
    assert tv["uniform, residual=kl"] == pytest.approx(tv["uniform"], abs=1e-4)


def test_all_relaxations_are_compared_at_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """On smaller tables, and with another family in place of the costly optimum of prices."""
    monkeypatch.setattr(relaxations, "VOCABULARY", 3)
    monkeypatch.setattr(relaxations, "LENGTH", 2)

    def one_price(rounds: PricedRounds, asked: float) -> Prices:
        return constant_price(6 * (asked - reachable_by_price(rounds)[0]), 2)

    monkeypatch.setattr(relaxations, "prices_for", one_price)
    p, q = random_tables(0)
    low, high = reachable(Chains.along(p, q))
    for share in (0.2, 0.7):
        points = at_length(p, q, share)
        assert set(points) == set(relaxations.STYLES)
        lengths, tv, kl = zip(*points.values(), strict=True)
        wanted = low + share * (high - low)
        assert lengths == pytest.approx([wanted] * len(points), abs=1e-4)
        assert points["TV optimum"][1] <= min(points[name][1] for name in SCHEDULES) + 1e-6
        assert min(kl) == points["least possible"][2] and max(tv) > 0
        uniform, residual = points["uniform"], points["uniform, residual=kl"]
        assert residual[2] < uniform[2] and residual[1] == pytest.approx(uniform[1], abs=1e-4)


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
        assert panel.get_ylim() == (0.5, 1.75)
        assert [name for name, side in panel.spines.items() if side.get_visible()] == [
            "left",
            "bottom",
        ]
        assert set(lines) == set(found)
        for name, line in lines.items():
            expected = found[name][:, column] / found["uniform"][:, column]
            assert list(line.get_xdata()) == [2.0, 4.0]
            assert list(line.get_ydata()) == pytest.approx(expected.tolist())


def test_nothing_is_cheaper_than_the_least_possible() -> None:
    """A draft that is perfect is kept at no cost; one kept at any cost saves the most tokens."""
    p, _ = random_tables(0)
    assert least_kl(p, p[:3], 1.0) == pytest.approx((4, 0, 0), abs=1e-6)
    sure = torch.eye(3, dtype=torch.float64)
    assert least_kl([sure[:1], sure], [sure[:1]], 1.0) == pytest.approx((2, 0, 0), abs=1e-6)
    one = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    other = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    last = one.expand(3, 3)
    divergence, distance = kl_divergence(other, one).item(), total_variation(other, one).item()
    assert least_kl([one, last], [other], 5.0) == pytest.approx((2, distance, divergence), abs=1e-6)
    exact = 2 - distance  # a draft is kept with probability 1 - TV where nothing is paid for it
    assert least_kl([one, last], [other], 1e-9) == pytest.approx((exact, 0, 0), abs=1e-6)


def test_curves_are_means_over_five_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_seed(seed: int) -> tuple[int, int]:
        return seed, 10 * seed

    def at(p: int, q: int, share: float) -> dict[str, tuple[float, float, float]]:
        return {"a": (float(p), float(q), p * share), "b": (1.0, 2.0, 3.0)}

    monkeypatch.setattr(relaxations, "random_tables", of_seed)
    monkeypatch.setattr(relaxations, "at_length", at)
    found = curves()
    expected = torch.tensor([[2.0, 20.0, 2 * share] for share in SHARES], dtype=torch.float64)
    torch.testing.assert_close(found["a"], expected)
    assert found["b"].tolist() == [[1, 2, 3]] * 7
    assert list(SHARES) == sorted(SHARES) and 0 < SHARES[0] < SHARES[-1] < 1


def test_a_budget_is_found_by_bisection() -> None:
    found = relaxations._budgeted(float, lambda value: value, 3.0, (1e-2, 1e5))
    assert found == pytest.approx(3.0, rel=1e-6)


def test_random_tables_hold_a_token_more_of_the_target() -> None:
    p, q = random_tables(3)
    assert [one.shape for one in p] == [(1, 5), (5, 5), (25, 5), (125, 5)]
    assert [one.shape for one in q] == [(1, 5), (5, 5), (25, 5)]
    other, _ = random_tables(4)
    assert not p[0].equal(other[0]) and not p[0].equal(q[0])
    p, q = random_tables(0)
    twice = p[0].square() / p[0].square().sum()  # had the draft's noise the target's seed
    assert not torch.allclose(q[0], twice, atol=1e-3)
