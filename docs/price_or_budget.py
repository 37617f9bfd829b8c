"""A price or a budget for each token: which relaxation costs least at equal length, in expectation
over the drafts of exact decoding (docs/optimal.md).

    python docs/price_or_budget.py [PROMPTS]

prints, for chains of EAGLE's draft of the shipped model and for its static tree of 25, each rule at
some lengths with its KL and TV bound per token. All rules see the same drafts, and nothing but the
choice of prompts is random.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tempera
from tempera.decoding.diagnostics import mean_terms
from tempera.decoding.interfaces import Draft
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule, drafted_acceptance_probs
from tempera.rules.cactus import Cactus
from tempera.rules.mentored import Mentored
from tempera.rules.mixture import Mixture
from tempera.rules.optimal import Priced
from tempera.rules.optimal_prices import PricedRounds, prices_for
from tempera.rules.schedules import uniform
from tempera.rules.standard import Relaxed
from tempera.shapes.scenes import world_prompts

RULES: Mapping[str, tuple[Callable[[float], TokenRule], float, float]] = {
    "a price": (Priced, 1e-2, 6.0),
    "a budget of KL(π ‖ p)": (lambda budget: Mentored(budget, "emitted"), 1e-4, 2.0),
    "a budget of KL(p ‖ π), published": (Mentored, 1e-4, 4.0),
    "uniform ω": (lambda delta: Relaxed(uniform(delta, 1)), 1.0, 40.0),
    "uniform ω, residual=kl": (lambda delta: Relaxed(uniform(delta, 1), "kl"), 1.0, 40.0),
    "a mixture": (Mixture, 1e-3, 1.0),
    "Cactus": (Cactus, 1e-4, 30.0),
}
"""Rules of one number, which accept more the larger it is, and its range."""
TREES = {
    "EAGLE's chains": ({"method": "eagle", "tree": "chain"}, (3.0, 3.2, 3.4)),
    "EAGLE's tree of 25": ({"method": "eagle", "tree": "mc_sim_7b_63"}, (3.9, 4.2)),
    "the tree of 40 of priced_tree": ({"method": "priced_tree", "price": 0}, (4.5, 4.84)),
}
SPARE = 200_000
"""Prompts of the shapes world before those that are decoded, which other pages use."""
HALVINGS = 9
"""Of a number's range: they find lengths to about 0.01."""


@dataclass(frozen=True)
class Drafts:
    """The drafts of some rounds, with the target's distributions.

    Attributes:
        tree: of all drafts.
        tokens, q: [C, N] and [C, N, V].
        p: [C, 1 + N, V].
    """

    tree: Tree
    tokens: Tensor
    q: Tensor
    p: Tensor

    def expected(self, rule: TokenRule) -> tuple[float, float, float]:
        """Tokens of a round, and its TV and KL bound per token, under a rule."""
        tokens = tv = kl = 0.0
        for first in range(0, len(self.p), 64):
            part = slice(first, first + 64)
            draft = Draft(self.tokens[part], self.q[part], self.tree)
            reach = reached(self.tree, drafted_acceptance_probs(draft, self.p[part], rule))
            of_tv, of_kl = mean_terms(draft, self.p[part], rule)
            tokens += float(reach.sum())
            tv += float((reach * of_tv).sum())
            kl += float((reach * of_kl).sum())
        return tokens / len(self.p), tv / tokens, kl / tokens


def reached(tree: Tree, keep: Tensor) -> Tensor:
    """Probability that the walk keeps the path to the root and to each node, [C, N] -> [C, 1 + N]:
    siblings are tested in turn.
    """
    reach = torch.ones(len(keep), 1 + tree.nodes)
    for node, family in enumerate(tree.children.tolist()):
        left = reach[:, node].clone()
        for child in family:
            if child >= 0:
                reach[:, 1 + child] = left * keep[:, child]
                left = left - reach[:, 1 + child]
    return reach


def drafts_of(method: Mapping[str, Any], prompts: int) -> Drafts:
    """All drafts of an exact decode that end within their images."""
    model = tempera.load(diagnostics=False, **method)
    texts = [prompt.text for prompt in world_prompts(prompts, SPARE, 1)]
    found: list[tuple[Tensor, ...]] = []
    for round in model.rounds(texts):
        sequences, draft = round.sequences, round.draft
        begins = sequences.lengths - sequences.emitted
        inside = (sequences.emitted > 0) & (begins + sequences.depth <= sequences.length)
        assert draft.q is not None
        found.append((draft.tokens[inside], draft.q[inside], round.scores.p[inside]))
    tokens, q, p = (torch.cat(parts) for parts in zip(*found, strict=True))
    return without_impossible(Drafts(draft.tree, tokens, q, p))


def without_impossible(drafts: Drafts) -> Drafts:
    """The same drafts over the tokens alone that p or a child's q can draw at a position, of which
    top-k leaves few: what is expected stays, and takes a fraction of the time.
    """
    parents = 1 + drafts.tree.parents
    possible = drafts.p.clone().index_add(1, parents, drafts.q)
    most = int((possible > 0).sum(-1).amax())
    ids = possible.topk(most, sorted=False).indices
    below = ids[:, parents]
    return Drafts(
        drafts.tree,
        (below == drafts.tokens.unsqueeze(-1)).int().argmax(-1),
        drafts.q.gather(-1, below),
        drafts.p.gather(-1, ids),
    )


def at_length(drafts: Drafts, name: str, wanted: float) -> tuple[float, float, float, float]:
    """The number at which a rule has a length, by bisection of its logarithm; and what it costs."""
    make, low, high = RULES[name]
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if drafts.expected(make(middle))[0] < wanted:
            low = middle
        else:
            high = middle
    return (high, *drafts.expected(make(high)))


def with_prices_by_depth(drafts: Drafts, wanted: float) -> tuple[float, float, float]:
    """What `schedule=optimal` costs at a length, with its prices by depth."""
    keep, divergence = [], []
    for first in range(0, len(drafts.p), 64):
        part = slice(first, first + 64)
        draft = Draft(drafts.tokens[part], drafts.q[part], drafts.tree)
        measured = PricedRounds.measured(draft, drafts.p[part])
        keep.append(measured.accept_probs)
        divergence.append(measured.divergence)
    rounds = PricedRounds.equal(drafts.tree, torch.cat(keep), torch.cat(divergence))
    return drafts.expected(Priced(prices_for(rounds, wanted)))


def table(name: str, drafts: Drafts, lengths: Sequence[float]) -> Iterator[str]:
    """The rules at equal lengths, as Markdown."""
    yield f"| {name} | tokens per round | its number | KL bound per token | TV bound per token |"
    yield "|---|---|---|---|---|"
    for wanted in lengths:
        length, tv, kl = with_prices_by_depth(drafts, wanted)
        yield f"| prices by depth | {length:.2f} | – | {kl:.5f} | {tv:.4f} |"
        for rule in RULES:
            number, length, tv, kl = at_length(drafts, rule, wanted)
            yield f"| {rule} | {length:.2f} | {number:.4g} | {kl:.5f} | {tv:.4f} |"


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    for name, (method, lengths) in TREES.items():
        for line in table(name, drafts_of(method, count), lengths):
            print(line, flush=True)
