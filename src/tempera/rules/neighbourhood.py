"""Acceptance rules that treat nearby codes of the image tokenizer's codebook as interchangeable:
LANTERN, LANTERN++ and GSD.

They add the probability of neighbouring codes when they test a drafted x. None is exact. Each has
its published residual, the residual that is optimal for its f in total variation, `G*` = Norm[p -
q·f]+ (Cool-SD, Eq. 10 and Figure 4), and the one that is optimal in KL divergence, Norm[c·p -
q·f]+ (`tempera.rules.optimal`). The last two need f of every token.

If p has all its mass on one token (forced positions) the rules are exact: no neighbour replaces a
forced token. In greedy decoding (temperature 0) p is one-hot everywhere, so neighbourhoods are
taken from the distribution at temperature 1, as the papers must do too (LANTERN's Table 2 has a
speed-up at temperature 0); see `TokenRule.keeps`.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import Round
from tempera.decoding.probabilities import at, excess, most_chosen, normalise, ratio
from tempera.decoding.trees import take
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError
from tempera.rules.codebook_neighbours import Neighbours
from tempera.rules.optimal import RESIDUALS

Residual = Literal["published", "optimal", "kl"]
Measure = Literal["tvd", "jsd"]
AT_ONCE = 1 << 24
"""Most neighbour probabilities gathered at a time for f of all tokens; bounds the memory."""


class _Aggregated(TokenRule):
    """f = min(1, Σ_A p / q(x)), where A(x) contains x and its nearest codes, in order of distance,
    up to the first that violates the limit.

    p_{A,x} is p with the mass of A moved onto x. The published residual is Norm[p_{A,x} - q]+,
    which depends on the rejected x.
    """

    neighbours: Neighbours
    residual_kind: Residual

    @abstractmethod
    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        """Whether A may give x, of probability `own`, a further mass of `moved`; false from some
        `moved` on.
        """

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """min(1, Σ_A p / q) at `token`."""
        return ratio(self._mass(self._near(p, token)), at(q, token))

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, Σ_A p / q) everywhere."""
        return ratio(self._accepted_mass(p, q), q)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p_{A,x} - q]+ for a rejected x, which is [p - q]+ without A(x), renormalised (at x
        itself both are 0, since p ≤ Σ_A p < q); or Norm[p - q·f]+ or Norm[c·p - q·f]+, where q·f =
        min(q, Σ_A p).
        """
        if self.residual_kind == "published":
            lacking = (p - q).clamp(min=0)
            near = self.neighbours.table_for(p)[token]
            inside = self._inside(p.gather(-1, near))
            left = lacking.gather(-1, near)[..., 1:].masked_fill(inside, 0.0)
            return normalise(lacking.scatter(-1, near[..., 1:], left), otherwise=p)
        return RESIDUALS[self.residual_kind](p, self._accepted_mass(p, q))

    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """f and the mean of the residual: see `TokenRule.expected`. Only tokens with q > p can be
        rejected, so neighbours are gathered for as many as there are of these; others are taken to
        be alone in their A.
        """
        accepted = torch.minimum(p, q)
        tokens = _largest(q - p, most_chosen(q > p))
        lacking = (p - q).clamp(min=0)
        share = torch.zeros_like(p)  # of each token's `lacking`, in the mean
        for near in _portions(self.neighbours, p, tokens):
            part = near[..., 0]
            masses = _gathered(p, near)
            inside = self._inside(masses)
            drawn = q.gather(-1, part)
            mass = self._mass(masses)
            accepted = accepted.scatter(-1, part, torch.minimum(mass, drawn))
            others = near[..., 1:]
            left = lacking.sum(-1, keepdim=True) - (_gathered(lacking, others) * inside).sum(-1)
            rejected = (drawn - mass).clamp(min=0)
            # left ≥ rejected but for rounding
            weight = torch.where(rejected > 0, rejected / torch.maximum(left, rejected), 0.0)
            lost = (weight.unsqueeze(-1) * inside).flatten(-2)
            share = share + weight.sum(-1, keepdim=True)
            share = share.scatter_add(-1, others.flatten(-2), -lost)
        f = ratio(accepted, q)
        if self.residual_kind != "published":
            return f, RESIDUALS[self.residual_kind](p, accepted)
        return f, normalise(lacking * share.clamp(min=0), otherwise=p)

    def accepts_greedily(self, p: Tensor, token: Tensor) -> Tensor:
        """Greedy decoding keeps x iff it is the argmax of p_{A,x} (LANTERN, Section 4.3), that is,
        iff Σ_A p ≥ max p. p untempered.
        """
        return self._mass(self._near(p, token)) >= p.amax(-1)

    def set_size(self, p: Tensor, token: Tensor) -> Tensor:
        """|A(x)|, x itself included: p [..., V], token [...] -> int64 [...]."""
        return 1 + self._inside(self._near(p, token)).sum(-1)

    @override
    def figures(self, round: Round) -> dict[str, Tensor]:
        """`proximity`: how many tokens the set A of the first drafted token holds (LANTERN, Figure
        7); NaN where nothing was drafted.
        """
        draft = round.draft
        scores = round.scores
        visited = round.verdict.visited
        sizes = torch.full(visited.shape, torch.nan, device=visited.device)
        if draft.tree.nodes:
            p = scores.p if scores.untempered is None else scores.untempered
            first = take(draft.tree.children.expand(len(p), -1, -1), visited)[..., 0]
            counted = self.set_size(take(p, visited), take(draft.tokens, first))
            sizes = torch.where(first >= 0, counted.float(), sizes)
        return {"proximity": sizes}

    def _near(self, p: Tensor, token: Tensor) -> Tensor:
        """The probabilities of B(x), x itself first: [..., k]."""
        return p.gather(-1, self.neighbours.table_for(p)[token])

    def _inside(self, masses: Tensor) -> Tensor:
        """Which neighbours except x are in A, bool [..., k - 1], given the probabilities of B(x),
        [..., k].
        """
        return self._fits(masses[..., :1], masses[..., 1:].cumsum(-1))

    def _mass(self, masses: Tensor) -> Tensor:
        """Σ_A p, [..., k] -> [...]."""
        return masses[..., 0] + (masses[..., 1:] * self._inside(masses)).sum(-1)

    def _accepted_mass(self, p: Tensor, q: Tensor) -> Tensor:
        """min(q, Σ_{A(x)} p) for every x, [..., V]."""
        masses = [self._mass(_gathered(p, near)) for near in _portions(self.neighbours, p)]
        return torch.minimum(torch.cat(masses, -1), q)


@dataclass(frozen=True)
class Lantern(_Aggregated):
    """LANTERN (Jang et al. 2024, Section 4): A(x) grows as long as the distortion that it causes,
    D(p_{A,x}, p), stays below δ.

    Public code departs from the paper: its k neighbours leave x out; ≤ δ for < δ; on a rejection
    the whole neighbourhood of x is zeroed and not only A, for some models in the draft's
    distribution and for others in the target's; distances are on the raw codebook.

    Args:
        neighbours: B_k(x), see `tempera.rules.codebook_neighbours`.
        delta: δ > 0, an upper bound of the mass that A moves onto x ("tvd", at most 1) or of the
            Jensen-Shannon divergence ("jsd", at most ln 2).
        measure: "tvd", D_TV(p_{A,x}, p) = Σ_{y∈A, y≠x} p(y), or "jsd", in nats. The pairs of
            equivalent δ in Table 3 (tvd 0.2 and jsd 0.13, 0.3 and 0.2) agree with this for an
            improbable x, where D_JS = D_TV·ln 2.
        residual_kind: "published", Norm[p_{A,x} - q]+ (Algorithm 1), "optimal" or "kl".

    Raises:
        TemperaError: an option is impossible.
    """

    neighbours: Neighbours
    delta: float
    measure: Measure = "tvd"
    residual_kind: Residual = "published"

    def __post_init__(self) -> None:
        most = 1.0 if self.measure == "tvd" else math.log(2)
        if not 0 < self.delta <= most:
            raise TemperaError(
                f"delta={self.delta} is not a bound on the distortion measure={self.measure}; "
                f"give a number above 0, at most {most:.4g}"
            )

    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        return (moved if self.measure == "tvd" else _jensen_shannon(own, moved)) < self.delta


@dataclass(frozen=True)
class LanternPP(_Aggregated):
    """LANTERN++ (Park et al. 2025, arXiv 2502.06352; Cool-SD Eq. 3-6): A(x) may give x less than λ
    times its own probability.

    Public code departs from the paper: λ - 1 for λ, and the rest as for `Lantern`.

    Args:
        neighbours: B_k(x), see `tempera.rules.codebook_neighbours`.
        lam: λ, above 0: Σ_{y∈A, y≠x} p(y) < λ·p(x).
        residual_kind: "published", Norm[p_{A,x} - q]+ (Cool-SD Eq. 6), "optimal" or "kl".

    Raises:
        TemperaError: an option is impossible.
    """

    neighbours: Neighbours
    lam: float
    residual_kind: Residual = "published"

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf:
            raise TemperaError(
                f"lam={self.lam} lets a token take nothing from its neighbours; give a finite "
                "number above 0 (the paper's is 2)"
            )

    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        return moved < self.lam * own


@dataclass(frozen=True)
class GSD(TokenRule):
    """Grouped speculative decoding, GSD (So et al. 2025, arXiv 2508.07747): f = min(1, p(G) / q(G))
    for the group G of the drafted x.

    Groups are neighbourhoods of x, not a partition: they overlap, and each x has its own. *Static*
    groups are the k nearest codes. The paper finds these ineffective, and narrows them at each
    position: *dynamic* groups keep of them those that the target finds about as probable as x, here
    those at most `ranks` places from x in the order of p (of equally probable codes the one of
    smaller index first).

    Public code departs: of the 14 codes at places -7 … +6 around x it keeps those within a squared
    distance of 0.5 of x and within 0.15 of its probability, where this has the k nearest, a
    symmetric window, and no bound on the difference (which few probabilities exceed); for the 6
    least probable codes its window is empty, and they are rejected.

    Args:
        neighbours: the k nearest codes of each, see `tempera.rules.codebook_neighbours`.
        ranks: greatest distance from x in the order of p; None for static groups.
        residual_kind: "published", Norm[p - q]+, "optimal" or "kl".
        k: the number of codes; of 4.3 codes the fifth counts with a weight of 0.3 in p(G) and q(G),
            which makes the accepted length continuous. All neighbours by default.

    Raises:
        TemperaError: an option is impossible.
    """

    neighbours: Neighbours
    ranks: int | None = 7
    residual_kind: Residual = "published"
    k: float = math.inf

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 0:
            raise TemperaError(
                f"ranks={self.ranks} is not a distance; give 0 (every code alone) or more, or "
                "none (null) for static groups"
            )
        if not self.neighbours.k - 1 < self.k:
            raise TemperaError(
                f"k={self.k:g} codes cannot be grouped, because the table has only "
                f"{self.neighbours.k} neighbours: build the neighbours with "
                f"k={max(1, math.ceil(self.k))}"
            )

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of `token`."""
        near, inside = self._group(p, token)
        return self._f(p.gather(-1, near), q.gather(-1, near), inside)

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of every token."""
        return self._f_of(p, q)

    def expected(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenRule.expected`. Groups are made for as many tokens as a q can draw."""
        tokens = _largest(q, most_chosen(q > 0))
        f = torch.ones_like(q).scatter(-1, tokens, self._f_of(p, q, tokens))
        return f, self._residual_of(p, q, q * f)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+; or Norm[p - q·f]+ or Norm[c·p - q·f]+."""
        if self.residual_kind == "published":
            return excess(p, q)
        return self._residual_of(p, q, q * self.accept(p, q, depth))

    def _residual_of(self, p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
        """The residual, given q·f."""
        if self.residual_kind == "published":
            return excess(p, q)
        return RESIDUALS[self.residual_kind](p, accepted)

    def accepts_greedily(self, p: Tensor, token: Tensor) -> Tensor:
        """Greedy decoding keeps x iff its group contains the argmax: min(1, p(G) / q(G)) for
        one-hot distributions, with groups by the untempered p.
        """
        near, inside = self._group(p, token)
        return ((near == p.argmax(-1, keepdim=True)) & inside).any(-1)

    def _group(self, p: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The neighbours of one token per position, int64 [..., k], and which of them are in its
        group, bool [..., k].
        """
        near = self.neighbours.table_for(p)[token]
        close = near >= 0 if self.ranks is None else _ranks_away(p, near, self.ranks)
        return near, _grouped(close, p.amax(-1, keepdim=True) < 1)

    def _f_of(self, p: Tensor, q: Tensor, tokens: Tensor | None = None) -> Tensor:
        """min(1, p(G) / q(G)) for the groups of n tokens at each position, int64 [..., n], or of
        all: [..., n].
        """
        order = _ranks(p)
        free = p.amax(-1)[..., None, None] < 1
        most = p.shape[-1] if self.ranks is None else self.ranks
        f: list[Tensor] = []
        for near in _portions(self.neighbours, p, tokens):
            rank = _gathered(order, near)
            inside = _grouped((rank - rank[..., :1]).abs() <= most, free)
            f.append(self._f(_gathered(p, near), _gathered(q, near), inside))
        return torch.cat(f, -1)

    def _f(self, p: Tensor, q: Tensor, inside: Tensor) -> Tensor:
        """min(1, p(G) / q(G)), from the probabilities of the neighbours, [..., k]."""
        weights = inside.float()
        weights[..., -1] *= min(1.0, self.k - inside.shape[-1] + 1)
        return ratio((p * weights).sum(-1), (q * weights).sum(-1))


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest values of each position are, in no order, int64 [..., count]."""
    if count == values.shape[-1]:
        return torch.arange(count, device=values.device).expand_as(values)
    return values.topk(count, sorted=False).indices


def _gathered(p: Tensor, near: Tensor) -> Tensor:
    """Entries of p [..., V] at tokens int64 [n, k], or others for each position, [..., n, k]: [...,
    n, k].
    """
    return p[..., near] if near.dim() == 2 else p.gather(-1, near.flatten(-2)).view(near.shape)


def _grouped(close: Tensor, free: Tensor) -> Tensor:
    """Which neighbours, the code itself first, are in its group, bool [..., k]: the `close` ones;
    the code alone where it is not `free`, because p is on one token.
    """
    return (close & free) | (torch.arange(close.shape[-1], device=close.device) == 0)


def _portions(neighbours: Neighbours, p: Tensor, tokens: Tensor | None = None) -> Iterator[Tensor]:
    """The neighbours of tokens at each position, int64 [..., n], each itself first, in portions
    [..., m, k]; or of all tokens, [m, k]. There are few enough in each to gather their
    probabilities in p [..., V] at all positions at once.
    """
    table = neighbours.table_for(p)
    count = max(1, AT_ONCE // max(1, p.shape[:-1].numel() * neighbours.k))
    if tokens is None:
        return iter(table.split(count))
    return (table[part] for part in tokens.split(count, -1))


def _ranks_away(p: Tensor, near: Tensor, most: int) -> Tensor:
    """Which of some tokens are at most so many places from the first of them in the order of
    `_ranks`, found without a sort: [..., V] and int64 [..., k] -> bool [..., k].

    A token's key is the bits of its probability, which grow with it, then its index; so no two keys
    are equal.
    """
    index = torch.arange(p.shape[-1], device=p.device)
    keys = (p.float().abs().view(torch.int32).long() << 32) - index
    own = keys.gather(-1, near)
    first = own[..., :1]
    count = min(most + 1, p.shape[-1])
    above = keys.masked_fill(keys < first, torch.iinfo(torch.int64).max)
    below = keys.masked_fill(keys > first, torch.iinfo(torch.int64).min)
    highest = above.topk(count, largest=False, sorted=False).values.amax(-1, keepdim=True)
    lowest = below.topk(count, sorted=False).values.amin(-1, keepdim=True)
    return (own <= highest) & (own >= lowest)


def _ranks(p: Tensor) -> Tensor:
    """Place of every token in the order of p, the most probable first: int64 [..., V]."""
    return p.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def _jensen_shannon(own: Tensor, moved: Tensor) -> Tensor:
    """D_JS(p_{A,x}, p) in nats, where p(x) = own and p(A without x) = moved: all other tokens are
    the same in both.
    """
    mean = own + moved / 2
    here = torch.xlogy(own + moved, (own + moved) / mean) + torch.xlogy(own, own / mean)
    return torch.where(mean > 0, (moved * math.log(2) + here) / 2, 0.0)
