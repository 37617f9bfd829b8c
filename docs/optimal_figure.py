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
from matplotlib import style
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
    "uniform, residual=kl": ("tab:purple", "x", ":"),
    "Cool-SD": ("tab:orange", "<", "--"),
    "Cool-SD, floored": ("tab:green", "^", "--"),
    "least possible": ("tab:olive", "", "-"),
}


def at_length(p: Tables, q: Tables, share: float) -> dict[str, Point]:
    """Every relaxation at one length of a round."""
    chains = Chains.enumerated(p, q)
    rounds = PricedRounds.enumerated(p, q)
    low, high = reachable(chains)
    wanted = low + share * (high - low)

    def optimum(length: float) -> Priced:
        return Priced(prices_for(rounds, length))

    def one_price(price: float) -> Priced:
        return Priced(constant_price(price, LENGTH))

    def length_of(rule: Relaxed | Priced) -> float:
        return expected_emitted(p, q, rule, LENGTH)

    rules: dict[str, Relaxed | Priced] = {
        # measured prices are interpolated, so a rule's length is not quite the one it is made for
        "KL optimum": _at_length(optimum, length_of, wanted, (low, high)),
        "one price": _at_length(one_price, length_of, wanted, (1e-4, 20.0)),
        "TV optimum": Relaxed(schedule_for(chains, wanted)),
    }
    for name, schedule_of in SCHEDULES.items():
        schedule = _at_length(schedule_of, chains.expected_emitted, wanted, (1e-2, 1e5))
        rules[name] = Relaxed(schedule)
        if name == "uniform":
            rules["uniform, residual=kl"] = Relaxed(schedule, "kl")
    points = {}
    for name, rule in rules.items():
        tv = tv_bound(p, q, rule, LENGTH)
        kl = kl_bound(p, q, rule, LENGTH)
        points[name] = (length_of(rule), tv, kl)
    points["least possible"] = least_kl_at_length(p, q, wanted)
    return points


def least_kl(p: Tables, q: Tables, beta: float) -> Point:
    """The round of least KL bound less `beta` times its tokens, over all rules whatever: by dynamic
    programming from the last depth up, with a price for each token, the worth of what follows it.
    """
    value = torch.full((len(p[len(q)]),), beta, dtype=p[0].dtype)
    tokens = torch.ones_like(value)
    nats = torch.zeros_like(value)
    bound = torch.zeros_like(value)
    for target, draft in zip(reversed(p[: len(q)]), reversed(q), strict=True):
        price = value.view_as(target)
        c = scale(target, draft, price)
        law = draft.clamp(c * target, c * target * price.exp())
        law = law / law.sum(-1, keepdim=True)
        kept = torch.minimum(law, draft)
        tokens = 1 + _after(kept, tokens)
        nats = kl_divergence(law, target) + _after(kept, nats)
        bound = total_variation(law, target) + _after(kept, bound)
        value = beta * tokens - nats
    return float(tokens), float(bound), float(nats)


def _after(kept: Tensor, later: Tensor) -> Tensor:
    """The mean of what comes after a token, over those that are kept."""
    return (kept * later.view_as(kept)).sum(-1)


def least_kl_at_length(p: Tables, q: Tables, wanted: float) -> Point:
    """The point of `least_kl` whose length is `wanted`."""

    def length_at(beta: float) -> float:
        length, _, _ = least_kl(p, q, beta)
        return length

    beta = _at_length(float, length_at, wanted, (1e-4, 10.0))
    return least_kl(p, q, beta)


def _at_length(
    make: Callable[[float], T],
    length: Callable[[T], float],
    wanted: float,
    ends: tuple[float, float],
) -> T:
    """What `make` makes of the number at which its length, increasing, is `wanted`: by bisection of
    the number's logarithm.
    """
    low, high = ends
    for _ in range(30):
        middle = (low * high) ** 0.5
        if length(make(middle)) < wanted:
            low = middle
        else:
            high = middle
    return make(high)


def curves(tables: int = 5) -> dict[str, Tensor]:
    """Mean length, TV bound and KL bound over some tables at each of `SHARES`: [S, 3] by name."""
    points: dict[str, list[list[Point]]] = {}
    for seed in range(tables):
        p, q = random_tables(seed, VOCABULARY, LENGTH)
        for number, share in enumerate(SHARES):
            for name, point in at_length(p, q, share).items():
                by_share = points.setdefault(name, [[] for _ in SHARES])
                by_share[number].append(point)
    means = {}
    for name, by_share in points.items():
        means[name] = torch.tensor(by_share, dtype=torch.float64).mean(1)
    return means


def as_table(curves: Mapping[str, Tensor], place: int = 3) -> str:
    """One length as Markdown: bounds per token."""
    lines = [
        "| relaxation | length | TV bound per token | KL bound per token |",
        "|---|---|---|---|",
    ]
    for name, points in curves.items():
        length, tv, nats = points[place].tolist()
        lines.append(f"| {name} | {length:.2f} | {tv / length:.4f} | {nats / length:.4f} |")
    return "\n".join(lines)


def draw(curves: Mapping[str, Tensor], path: Path) -> None:
    """Both bounds per token, relative to the uniform schedule's, against the length."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for column, title in ((1, "summed TV bound"), (2, "KL bound")):
        panel = panels[column - 1]
        of_uniform = curves["uniform"][:, column]
        for name, points in curves.items():
            _curve(panel, name, points[:, 0], points[:, column] / of_uniform)
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
    with style.context(Path(__file__).with_name("pictures.mplstyle")):
        for name in sys.argv[1:]:
            draw(measured, Path(name))
