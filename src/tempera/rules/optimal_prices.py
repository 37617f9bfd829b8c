"""The prices of `tempera.rules.optimal.Priced`, from measured rounds: how much KL divergence a kept
draft may cost at each depth, so that a round of a given expected length has the least. At one token
the laws are those of mentored decoding (V. Tran-Thien, 2023); the prices are ours.

Let a token be worth β nats. Keeping a draft at depth i makes T further tokens possible on average,
which add K nats of their own. The draft is therefore worth β·T - K, less the worth of what remains
after its rejection: nothing on a chain, the untested siblings on a tree. This worth is the price at
depth i. Since T and K depend on the prices, the prices are a fixed point (docs/optimal.md); β is
chosen so that the round has the wanted length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.diagnostics import mean_terms
from tempera.decoding.interfaces import Draft
from tempera.decoding.probabilities import Tables, at
from tempera.decoding.trees import Tree
from tempera.decoding.verification import drafted_acceptance_probs
from tempera.rules.optimal import Priced
from tempera.rules.schedules import Prices, check_reachable

GRID = (
    *(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9),
    *(1.1, 1.35, 1.65, 2.0, 2.5, 3.2, 4.2, 6.0),
)
"""Prices at which rounds are measured; f and KL are interpolated between them. The last price
rejects hardly any token that the target could draw.
"""


@dataclass(frozen=True)
class PricedRounds:
    """The drafts of C rounds, tested at each of the G prices of `GRID`. All nodes are tested, even
    those after a rejection. Means over rounds estimate a round at any prices, because a node's test
    depends only on the nodes above it and its earlier siblings.

    Attributes:
        tree: the static tree of the drafts, with N nodes.
        accept_probs: probability that each drafted token passes its test if the walk reaches it,
            [C, N, G].
        divergence: the term of the KL bound after the root and after each node, [C, 1 + N, G].
        weights: weight of each round, [C]; they sum to 1.
    """

    tree: Tree
    accept_probs: Tensor
    divergence: Tensor
    weights: Tensor

    @classmethod
    def measured(cls, draft: Draft, p: Tensor, weights: Tensor | None = None) -> "PricedRounds":
        """Test the drafts of B rounds at every price.

        Args:
            draft: drafts with a static tree.
            p: the target's distributions, [B, 1 + N, V].
            weights: weights of the rounds, [B]; equal by default.
        """
        rules = [Priced(price) for price in GRID]
        return cls(
            draft.tree,
            torch.stack([drafted_acceptance_probs(draft, p, rule) for rule in rules], -1),
            torch.stack([mean_terms(draft, p, rule)[1] for rule in rules], -1),
            p.new_full((len(p),), 1 / len(p)) if weights is None else weights,
        )

    @classmethod
    def enumerated(cls, p: Tables, q: Tables) -> "PricedRounds":
        """All chains of L = len(q) tokens, weighted by the draft's distribution.

        Args:
            p: the target's tables; p[t] [V^t, V] holds its distributions after all prefixes of t
                tokens, t = 0 … L.
            q: the draft's tables, t = 0 … L - 1.
        """
        vocab_size = p[0].shape[-1]
        tokens = torch.cartesian_prod(*[torch.arange(vocab_size)] * len(q)).view(-1, len(q))
        prefix = torch.zeros(len(tokens), dtype=torch.int64)
        weights = p[0].new_ones(len(tokens))
        above = [p[0][prefix]]
        below: list[Tensor] = []
        for depth, token in enumerate(tokens.T):
            below.append(q[depth][prefix])
            weights = weights * at(below[-1], token)
            prefix = prefix * vocab_size + token
            above.append(p[depth + 1][prefix])
        draft = Draft(tokens, torch.stack(below, 1), Tree.chain(len(q)))
        return cls.measured(draft, torch.stack(above, 1), weights)

    @classmethod
    def equal(cls, tree: Tree, accept_probs: Tensor, divergence: Tensor) -> "PricedRounds":
        """Rounds with equal weights."""
        return cls(
            tree,
            accept_probs,
            divergence,
            accept_probs.new_full((len(accept_probs),), 1 / len(accept_probs)),
        )

    def first_depths(self, length: int) -> "PricedRounds":
        """The same rounds with their chains cut to the first `length` drafts."""
        divergence = self.divergence[:, : 1 + length].clone()
        divergence[:, length:] = 0
        return PricedRounds(
            Tree.chain(length), self.accept_probs[:, :length], divergence, self.weights
        )

    def expected(self, prices: Prices) -> tuple[float, float]:
        """Mean number of tokens that a round emits, and the nats that it adds to the KL bound."""
        accept_probs, divergence = self._at(prices)
        reach = self._reach(accept_probs)
        tokens = reach.sum(0)
        nats = (reach * divergence).sum(0)
        return float(self.weights @ tokens), float(self.weights @ nats)

    def worth(self, prices: Prices, beta: float) -> Prices:
        """The worth of a draft kept at each depth under these prices, if a token is worth `beta`
        nats: the mean over the drafts kept at that depth, limited to the highest price; 0 if none
        is ever kept.
        """
        accept_probs, divergence = self._at(prices)
        gain = torch.zeros_like(accept_probs)
        value = beta - divergence
        children = _children(self.tree)
        for node in reversed(range(1 + self.tree.nodes)):
            rest = torch.zeros_like(self.weights)
            for child in reversed(children[node]):
                gain[child] = value[1 + child] - rest
                rest = rest + accept_probs[child] * gain[child]
            value[node] += rest
        reach = self._reach(accept_probs)[1:]
        by_depth = accept_probs.new_zeros(self.tree.max_depth)
        masses = by_depth.index_add(0, self.tree.depths - 1, reach @ self.weights)
        gains = by_depth.index_add(0, self.tree.depths - 1, (reach * gain) @ self.weights)
        means = torch.where(masses > 0, gains / masses, 0.0)
        return Prices(tuple(means.clamp(0, GRID[-1]).tolist()))

    def _at(self, prices: Prices) -> tuple[Tensor, Tensor]:
        """`accept_probs` and `divergence` at these prices, nodes first: [N, C] and [1 + N, C]."""
        depths = [0, *self.tree.depths.tolist()]
        last = len(prices.prices) - 1
        before = [prices.prices[min(depth - 1, last)] for depth in depths[1:]]
        after = [prices.prices[min(depth, last)] for depth in depths]
        return _interpolated(self.accept_probs, before), _interpolated(self.divergence, after)

    def _reach(self, accept_probs: Tensor) -> Tensor:
        """Probability that the walk keeps the path to each node (1 for the root), [1 + N, C]."""
        reach = torch.ones_like(self.weights).repeat(1 + self.tree.nodes, 1)
        for node, children in enumerate(_children(self.tree)):
            left = reach[node]
            for child in children:
                reach[1 + child] = left * accept_probs[child]
                left = left - reach[1 + child]
        return reach


def prices_for(rounds: PricedRounds, expected_length: float) -> Prices:
    """The prices at which a round emits `expected_length` tokens with the least KL divergence, if
    every token is worth the same.

    Raises:
        TemperaError: no prices within `GRID` give this expected length.
    """
    check_reachable(expected_length, reachable_by_price(rounds), rounds.tree.max_depth)
    prices = Prices((0.0,) * rounds.tree.max_depth)
    below = 0.0
    above = GRID[-1]
    for _ in range(30):
        beta = (below + above) / 2
        prices = _settled(rounds, prices, beta)
        short = rounds.expected(prices)[0] < expected_length
        if short:
            below = beta
        else:
            above = beta
    return prices


def reachable_by_price(rounds: PricedRounds) -> tuple[float, float]:
    """The expected lengths of exact decoding, and of the highest price at every depth."""
    lengths = [rounds.expected(Prices((price,)))[0] for price in (GRID[0], GRID[-1])]
    return lengths[0], lengths[1]


def _settled(rounds: PricedRounds, prices: Prices, beta: float) -> Prices:
    """Iterate to the fixed point at which the prices equal the worth of drafts under them."""
    for _ in range(40):
        worth = rounds.worth(prices, beta)
        distance = math.dist(prices.prices, worth.prices)
        prices = worth
        if distance < 1e-4:
            break
    return prices


def _children(tree: Tree) -> list[list[int]]:
    """The children of the root and of each node, in the order of their tests."""
    return [[child for child in family if child >= 0] for family in tree.children.tolist()]


def _interpolated(measured: Tensor, prices: list[float]) -> Tensor:
    """Interpolate [C, N, G] at one price per node: [N, C]."""
    grid = torch.tensor(GRID)
    wanted = torch.tensor(prices)
    after = torch.searchsorted(grid, wanted).clamp(1, len(GRID) - 1)
    share = (wanted - grid[after - 1]) / (grid[after] - grid[after - 1])
    nodes = torch.arange(len(prices))
    below = measured[:, nodes, after - 1].T
    above = measured[:, nodes, after].T
    return torch.lerp(below, above, share.to(measured.dtype).unsqueeze(-1))
