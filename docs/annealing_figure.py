"""Why Cool-SD anneals: what moving acceptance between two drafts does to the TV bound at equal
expected length (Propositions 2, 4 and 5), on random tables (docs/optimal.md).

    python docs/annealing_figure.py [FIGURE.png]

prints a table and, given a file, draws the change of the bound against c₂.
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tempera.decoding.probabilities import Tables
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.exactness.theory import annealing_margin, perturbed, same_length
from tempera.rules.schedules import uniform
from tempera.rules.standard import Relaxed

RULE = Relaxed(uniform(1.5, 2))
SIZES = (5, 20)
"""Sizes of the vocabulary."""
NOISES = (0.4, 0.8, 1.5)
"""How far the draft is from the target."""
DRAWN = 0.8
"""The noise that the figure shows."""
CHANGES = torch.linspace(-0.1, 0.1, 21)
COUNT = 100


def tables(seed: int, size: int, noise: float) -> tuple[Tables, Tables]:
    """Conditionals of a random target for two drafted tokens, and of its draft."""
    target = TableTarget(size, 3, seed=seed)
    return target.conditionals(), TableDraft(target, noise, 1000 + seed).conditionals()[:2]


def bounds(p: Tables, q: Tables) -> Tensor:
    """The TV bound at each c₂ of `CHANGES`, with the c₁ that keeps the length, less that at 0."""
    _, base = perturbed(p, q, RULE, (0.0, 0.0))
    differences = []
    for second in CHANGES.tolist():
        first = same_length(p, q, RULE, second)
        _, bound = perturbed(p, q, RULE, (first, second))
        differences.append(bound - base)
    return torch.tensor(differences)


def relaxed_mass(p: Tables, q: Tables) -> float:
    """Q(X₁⁻), the draft's mass of tokens that are kept more often than the target has them;
    Assumption 1 wants 1/2.
    """
    f = RULE.accept(p[0], q[0], torch.ones(1, dtype=torch.int64))
    return float(q[0][p[0] < q[0] * f].sum())


def main(path: Path | None) -> None:
    """Print the table, and draw the curves of the second draft's noise."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    print("| tables | annealed bound is smaller | least E f₂ − Δ | mean Q(X₁⁻) |")
    print("|---|---|---|---|")
    for size, panel in zip(SIZES, panels, strict=True):
        for noise in NOISES:
            name = f"{size} tokens, draft's noise {noise}"
            pairs = [tables(seed, size, noise) for seed in range(COUNT)]
            curves = torch.stack([bounds(p, q) for p, q in pairs])
            smaller = (curves[:, 8] < curves[:, 12]).sum()
            margin = min(annealing_margin(p, q, RULE) for p, q in pairs)
            mass = sum(relaxed_mass(p, q) for p, q in pairs) / COUNT
            print(f"| {name} | {smaller} of {COUNT} | {margin:.2f} | {mass:.2f} |")
            if noise == DRAWN:
                draw(panel, name, curves)
    panels[0].set_ylabel("change of the summed TV bound")
    if path is not None:
        figure.savefig(path, dpi=110)


def draw(panel: Axes, title: str, curves: Tensor) -> None:
    """The curves of all tables, [COUNT, len(CHANGES)], and their mean."""
    panel.plot(CHANGES, curves.T, color="tab:gray", linewidth=0.5, alpha=0.3)
    panel.plot(CHANGES, curves.mean(0), color="tab:blue", linewidth=2)
    panel.set(title=title, xlabel="c₂, added to the second acceptance")
    panel.set_xticks([-0.1, -0.05, 0, 0.05, 0.1])
    panel.axvline(0, color="tab:gray", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    with style.context(Path(__file__).with_name("pictures.mplstyle")):
        main(Path(sys.argv[1]) if sys.argv[1:] else None)
