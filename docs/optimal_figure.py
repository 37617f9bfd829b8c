"""Which relaxation is optimal, and for what: every relaxation at the same accepted length, on
tables, where all is exact (docs/optimal.md).

    python docs/optimal_figure.py [FIGURE.png]

prints a table of the TV bound and the KL bound and, given a file, draws both against the length.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tempera.decoding.probabilities import Tables, kl_divergence, total_variation
from tempera.exactness.tables import random_tables
from tempera.exactness.theory import expected_emitted, kl_bound, tv_bound
from tempera.rules.optimal import Priced, scale
from tempera.rules.optimal_prices import PricedRounds, prices_for
from tempera.rules.optimal_schedule import Chains, reachable, schedule_for
from tempera.rules.schedules import Omegas, constant_price, exponential, floored, uniform
from tempera.rules.standard import Relaxed

LENGTH = 3
VOCABULARY = 5
SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Lengths, from exact decoding (0) to keeping nearly everything (1)."""

T = TypeVar("T")
Point = tuple[float, float, float]
"""Length of a round, its TV bound and its KL bound."""

SCHEDULES: Mapping[str, Callable[[float], Omegas]] = {
    "uniform": lambda delta: uniform(delta, LENGTH),
    "Cool-SD": lambda delta: exponential(delta, LENGTH),
    "Cool-SD, floored": lambda delta: floored(exponential(delta, LENGTH), 1.0),
}
STYLES = {
    "KL optimum": ("tab:blue", "o", "-"),
    "one price": ("tab:cyan", "s", "-"),
    "TV optimum": ("tab:red", "v", "-"),
    "uniform": ("tab:gray", "D", "--"),
    "uniform, residual=kl": ("black", "x", ":"),
    "Cool-SD": ("tab:orange", "<", "--"),
    "Cool-SD, floored": ("tab:green", "^", "--"),
    "least possible": ("black", "", "-"),
}


def at_length(p: Tables, q: Tables, share: float) -> dict[str, Point]:
    """Every relaxation at one length of a round."""
    chains, rounds = Chains.enumerated(p, q), PricedRounds.enumerated(p, q)
    low, high = reachable(chains)
    wanted = low + share * (high - low)
    rules: dict[str, Relaxed | Priced] = {
        # measured prices are interpolated, so that the length asked for is not quite reached
        "KL optimum": _budgeted(
            lambda asked: Priced(prices_for(rounds, asked)),
            lambda rule: expected_emitted(p, q, rule, LENGTH),
            wanted,
            (low, high),
        ),
        "one price": _budgeted(
            lambda price: Priced(constant_price(price, LENGTH)),
            lambda rule: expected_emitted(p, q, rule, LENGTH),
            wanted,
            (1e-4, 20.0),
        ),
        "TV optimum": Relaxed(schedule_for(chains, wanted)),
    }
    for name, family in SCHEDULES.items():
        schedule = _budgeted(family, chains.expected_emitted, wanted, (1e-2, 1e5))
        rules[name] = Relaxed(schedule)
        if name == "uniform":
            rules["uniform, residual=kl"] = Relaxed(schedule, "kl")
    points = {
        name: (
            expected_emitted(p, q, rule, LENGTH),
            tv_bound(p, q, rule, LENGTH),
            kl_bound(p, q, rule, LENGTH),
        )
        for name, rule in rules.items()
    }
    return points | {"least possible": _budgeted_point(p, q, wanted)}


def least_kl(p: Tables, q: Tables, beta: float) -> Point:
    """The round of least KL bound less `beta` times its tokens, over all rules whatever: by dynamic
    programming from the last depth up, with a price for each token, the worth of what follows it.
    """
    value = torch.full((len(p[len(q)]),), beta, dtype=p[0].dtype)
    tokens, nats, bound = torch.ones_like(value), torch.zeros_like(value), torch.zeros_like(value)
    for here_p, here_q in zip(reversed(p[: len(q)]), reversed(q), strict=True):

        def after(kept: Tensor, what: Tensor) -> Tensor:
            return (kept * what.view_as(kept)).sum(-1)

        price = value.view_as(here_p)
        c = scale(here_p, here_q, price)
        law = here_q.clamp(c * here_p, c * here_p * price.exp())
        law = law / law.sum(-1, keepdim=True)
        kept = torch.minimum(law, here_q)
        tokens = 1 + after(kept, tokens)
        nats = kl_divergence(law, here_p) + after(kept, nats)
        bound = total_variation(law, here_p) + after(kept, bound)
        value = beta * tokens - nats
    return float(tokens), float(bound), float(nats)


def _budgeted_point(p: Tables, q: Tables, wanted: float) -> Point:
    beta = _budgeted(float, lambda beta: least_kl(p, q, beta)[0], wanted, (1e-4, 10.0))
    return least_kl(p, q, beta)


def _budgeted(
    make: Callable[[float], T],
    length: Callable[[T], float],
    wanted: float,
    ends: tuple[float, float],
) -> T:
    """What a family makes of the budget at which its length, increasing, is `wanted`: by bisection
    of the budget's logarithm.
    """
    low, high = ends
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if length(make(middle)) < wanted else (low, middle)
    return make(high)


def curves(tables: int = 5) -> dict[str, Tensor]:
    """Mean length, TV bound and KL bound over some tables at each of `SHARES`: [S, 3] by name."""
    found: dict[str, list[list[Point]]] = {}
    for seed in range(tables):
        p, q = random_tables(seed, VOCABULARY, LENGTH)
        for share in SHARES:
            for name, point in at_length(p, q, share).items():
                places = found.setdefault(name, [[] for _ in SHARES])
                places[SHARES.index(share)].append(point)
    return {
        name: torch.tensor(places, dtype=torch.float64).mean(1) for name, places in found.items()
    }


def as_table(found: Mapping[str, Tensor], place: int = 3) -> str:
    """One length as Markdown: bounds per token."""
    lines = ["| relaxation | length | TV bound per token | KL bound per token |", "|---" * 4 + "|"]
    for name, points in found.items():
        length, tv, nats = points[place].tolist()
        lines.append(f"| {name} | {length:.2f} | {tv / length:.4f} | {nats / length:.4f} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Tensor], path: Path) -> None:
    """Both bounds per token, relative to the uniform schedule's, against the length."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for column, (panel, title) in enumerate(
        zip(figure.subplots(1, 2), ("TV bound", "KL bound"), strict=True), start=1
    ):
        for name, points in found.items():
            _curve(panel, name, points[:, 0], points[:, column] / found["uniform"][:, column])
        panel.set(xlabel="accepted length", ylabel=f"{title} ÷ uniform's", ylim=(0.5, 1.75))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _curve(panel: Axes, name: str, lengths: Tensor, values: Tensor) -> None:
    colour, marker, line = STYLES[name]
    panel.plot(
        lengths.numpy(),
        values.numpy(),
        color=colour,
        marker=marker,
        linestyle=line,
        linewidth=2.5 if name == "least possible" else 1.2,
        markersize=4,
        alpha=0.25 if name == "least possible" else 1,
        label=name,
    )


if __name__ == "__main__":
    measured = curves()
    print(as_table(measured))
    for name in sys.argv[1:]:
        draw(measured, Path(name))
