"""Acceptance rules that treat nearby codes of the image tokenizer's codebook as interchangeable:
LANTERN, LANTERN++ and GSD.

They add the probability of neighbouring codes when they test a drafted x. None is exact. Each has
its published residual, the residual that is optimal for its f in total variation, G* = Norm[p -
q·f]+ (Cool-SD, Eq. 10 and Figure 4), and the one that is optimal in KL divergence, Norm[c·p -
q·f]+ (`tempera.rules.optimal`). The last two need f of every token that q can draw.

If p has all its mass on one token (forced positions) the rules are exact: no neighbour replaces a
forced token. In greedy decoding (temperature 0) p is one-hot everywhere, so neighbourhoods are
taken from the distribution at temperature 1, as the papers must do too (LANTERN's Table 2 has a
speed-up at temperature 0); see `Rule.keeps`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tempera.decoding.interfaces import Rule
from tempera.decoding.probabilities import at, excess, normalise, ratio
from tempera.errors import TemperaError
from tempera.rules.codebook_neighbours import Neighbours
from tempera.rules.optimal import kl_residual

Residual = Literal["published", "optimal", "kl"]
Measure = Literal["tvd", "jsd"]
AT_ONCE = 1 << 24
"""Most neighbour probabilities gathered at a time for f of many tokens; bounds the memory."""


class _Aggregated(ABC):
    """f = min(1, Σ_A p / q(x)), where A(x) contains x and its nearest codes, in order of distance,
    up to the first that violates the limit.

    p_{A,x} is p with the mass of A moved onto x. The published residual is Norm[p_{A,x} - q]+,
    which depends on the rejected x.
    """

    relaxes_greedy: ClassVar[bool] = True
    neighbours: Neighbours
    residual_kind: str

    @abstractmethod
    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        """Whether A may give x, of probability `own`, a further mass of `moved`; false from some
        `moved` on.
        """

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """min(1, Σ_A p / q) at `token`."""
        return ratio(self._mass(p.gather(-1, self._near(p, token))), at(q, token))

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, Σ_A p / q) at every token that q can draw, 1 at all others."""
        return ratio(self._drafted_masses(p, q), q)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p_{A,x} - q]+ for a rejected x; or Norm[p - q·f]+ or Norm[c·p - q·f]+, where q·f =
        min(q, Σ_A p).
        """
        if self.residual_kind == "published":
            return normalise((self._moved(p, token) - q).clamp(min=0), otherwise=p)
        kept = torch.minimum(q, self._drafted_masses(p, q))
        return kl_residual(p, kept) if self.residual_kind == "kl" else excess(p, kept)

    def mean_residual(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """The mean of the residual over the rejected tokens: see `interfaces.Rule`.

        For a rejected x the published residual is [p - q]+ without A(x), renormalised.
        """
        if self.residual_kind != "published":
            return self.residual(p, q, torch.zeros_like(depth), depth)
        lacking = (p - q).clamp(min=0)
        given = torch.zeros_like(p)
        for token in _portions(_drafted(q), p, self.neighbours.k):
            near = self._near(p, token)
            masses = _gather(p, near)
            inside = self._inside(masses)
            drafted = q.gather(-1, token.expand(masses.shape[:-1]))
            rejected = (drafted - self._mass(masses)).clamp(min=0)
            # what [p - q]+ has in A(x); at x itself that is nothing, since p ≤ Σ_A p < q
            others = near[..., 1:]
            within = (_gather(lacking, others) * inside).sum(-1)
            left = lacking.sum(-1, keepdim=True) - within
            # left ≥ rejected but for rounding
            weight = torch.where(rejected > 0, rejected / torch.maximum(left, rejected), 0.0)
            lost = (weight.unsqueeze(-1) * inside).flatten(-2)
            given += weight.sum(-1, keepdim=True)
            given.scatter_add_(-1, others.flatten(-2).expand_as(lost), -lost)
        return normalise(lacking * given.clamp(min=0), otherwise=p)

    def keeps(self, p: Tensor, token: Tensor) -> Tensor:
        """Greedy decoding keeps x iff it is the argmax of p_{A,x} (LANTERN, Section 4.3), that is,
        iff Σ_A p ≥ max p. p untempered.
        """
        return self._mass(p.gather(-1, self._near(p, token))) >= p.amax(-1)

    def keeps_each(self, p: Tensor) -> Tensor:
        """The same for every token, bool [..., V]."""
        return self._masses(p, _vocabulary(p)) >= p.amax(-1, keepdim=True)

    def proximity(self, p: Tensor, token: Tensor) -> Tensor:
        """|A(x)|, x itself included: see `interfaces.Rule`."""
        return 1 + self._inside(p.gather(-1, self._near(p, token))).sum(-1)

    def _near(self, p: Tensor, token: Tensor) -> Tensor:
        return self.neighbours.of(p)[token]

    def _inside(self, masses: Tensor) -> Tensor:
        """Which neighbours except x are in A, bool [..., k - 1], given the probabilities of B(x),
        [..., k].
        """
        return self._fits(masses[..., :1], masses[..., 1:].cumsum(-1))

    def _mass(self, masses: Tensor) -> Tensor:
        """Σ_A p, [..., k] -> [...]."""
        return masses[..., 0] + (masses[..., 1:] * self._inside(masses)).sum(-1)

    def _masses(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Σ_{A(x)} p for M tokens x, [..., M], or [M] for all positions alike: -> [..., M]."""
        runs = _portions(tokens, p, self.neighbours.k)
        return torch.cat([self._mass(_gather(p, self._near(p, token))) for token in runs], -1)

    def _drafted_masses(self, p: Tensor, q: Tensor) -> Tensor:
        """Σ_{A(x)} p for every x that q can draw, 0 for all others: -> [..., V]."""
        tokens = _drafted(q)
        return _spread(self._masses(p, tokens), tokens, torch.zeros_like(p))

    def _moved(self, p: Tensor, token: Tensor) -> Tensor:
        """p_{A,x}, [..., V]."""
        near = self._near(p, token)
        masses = p.gather(-1, near)
        emptied = p.scatter(
            -1, near[..., 1:], masses[..., 1:].masked_fill(self._inside(masses), 0.0)
        )
        return emptied.scatter(-1, near[..., :1], self._mass(masses).unsqueeze(-1))


@dataclass(frozen=True, init=False)
class Lantern(_Aggregated, Rule):
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
        residual: "published", Norm[p_{A,x} - q]+ (Algorithm 1), "optimal" or "kl".
    """

    neighbours: Neighbours
    delta: float
    measure: str
    residual_kind: str

    def __init__(
        self,
        neighbours: Neighbours,
        delta: float,
        measure: Measure = "tvd",
        residual: Residual = "published",
    ) -> None:
        if measure not in get_args(Measure):
            raise TemperaError(
                f"measure={measure} is not known; choose one of {', '.join(get_args(Measure))}"
            )
        most = 1.0 if measure == "tvd" else math.log(2)
        if not 0 < delta <= most:
            raise TemperaError(
                f"delta={delta} does not bound a distortion by measure={measure}; give a number "
                f"above 0, at most {most:.4g}"
            )
        _assign(
            self,
            neighbours=neighbours,
            delta=float(delta),
            measure=measure,
            residual_kind=_known(residual),
        )

    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        return (moved if self.measure == "tvd" else _jensen_shannon(own, moved)) < self.delta


@dataclass(frozen=True, init=False)
class LanternPP(_Aggregated, Rule):
    """LANTERN++ (Park et al. 2025, arXiv 2502.06352; Cool-SD Eq. 3-6): A(x) may give x less than λ
    times its own probability.

    Public code departs from the paper: λ - 1 for λ, and the rest as for `Lantern`.

    Args:
        neighbours: B_k(x), see `tempera.rules.codebook_neighbours`.
        lam: λ, above 0: Σ_{y∈A, y≠x} p(y) < λ·p(x).
        residual: "published", Norm[p_{A,x} - q]+ (Cool-SD Eq. 6), "optimal" or "kl".
    """

    neighbours: Neighbours
    lam: float
    residual_kind: str

    def __init__(
        self, neighbours: Neighbours, lam: float, residual: Residual = "published"
    ) -> None:
        if not 0 < lam < math.inf:
            raise TemperaError(
                f"lam={lam} lets a token take nothing from its neighbours; give a finite number "
                "above 0 (the paper's is 2)"
            )
        _assign(self, neighbours=neighbours, lam=float(lam), residual_kind=_known(residual))

    def _fits(self, own: Tensor, moved: Tensor) -> Tensor:
        return moved < self.lam * own


@dataclass(frozen=True, init=False)
class GSD(Rule):
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
        residual: "published", Norm[p - q]+, "optimal" or "kl".
        k: the number of codes; of 4.3 codes the fifth counts with a weight of 0.3 in p(G) and q(G),
            which makes the accepted length continuous. All neighbours by default.
    """

    relaxes_greedy: ClassVar[bool] = True
    neighbours: Neighbours
    ranks: int | None
    residual_kind: str
    k: float

    def __init__(
        self,
        neighbours: Neighbours,
        ranks: int | None = 7,
        residual: Residual = "published",
        k: float | None = None,
    ) -> None:
        k = float(neighbours.k if k is None else k)
        if not neighbours.k - 1 < k <= neighbours.k:
            raise TemperaError(
                f"k={k:g} codes do not go with a table of {neighbours.k} neighbours: give one of "
                "as many, rounded up"
            )
        if ranks is not None and ranks < 0:
            raise TemperaError(
                f"ranks={ranks} is not a distance; give 0 (every code alone) or more, or "
                "none (null) for static groups"
            )
        _assign(self, neighbours=neighbours, ranks=ranks, residual_kind=_known(residual), k=k)

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of `token`."""
        near, inside = self._group(p, token)
        weight = self._weights(inside)
        return ratio((p.gather(-1, near) * weight).sum(-1), (q.gather(-1, near) * weight).sum(-1))

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p(G) / q(G)) for the group of every token that q can draw, 1 at all others."""
        tokens, f = _drafted(q), []
        for near, inside in self._groups(p, tokens):
            weight = self._weights(inside)
            here, drafted = ((_gather(law, near) * weight).sum(-1) for law in (p, q))
            f.append(ratio(here, drafted))
        return _spread(torch.cat(f, -1), tokens, torch.ones_like(p))

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+; or Norm[p - q·f]+ or Norm[c·p - q·f]+."""
        if self.residual_kind == "published":
            return excess(p, q)
        kept = q * self.accept(p, q, depth)
        return kl_residual(p, kept) if self.residual_kind == "kl" else excess(p, kept)

    def keeps(self, p: Tensor, token: Tensor) -> Tensor:
        """Greedy decoding keeps x iff its group contains the argmax: min(1, p(G) / q(G)) for
        one-hot laws, with groups by the untempered p.
        """
        near, inside = self._group(p, token)
        return ((near == p.argmax(-1, keepdim=True)) & inside).any(-1)

    def keeps_each(self, p: Tensor) -> Tensor:
        """The same for every token, bool [..., V]."""
        top, groups = p.argmax(-1)[..., None, None], self._groups(p, _vocabulary(p))
        return torch.cat([((near == top) & inside).any(-1) for near, inside in groups], -1)

    def _group(self, p: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The neighbours of `token`, int64 [..., k], and which of them are in its group, bool
        [..., k].
        """
        near = self.neighbours.of(p)[token]
        close = None if self.ranks is None else _places_away(p, near, self.ranks)
        return near, self._inside(p, close, near.shape)

    def _groups(self, p: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for tokens [..., M], or [M] for all positions alike, in portions of m tokens:
        int64 [..., m, k] or [m, k], bool [..., m, k].
        """
        ranks = None if self.ranks is None else _ranks(p)
        for token in _portions(tokens, p, self.neighbours.k):
            near, close = self.neighbours.of(p)[token], None
            shape = (*p.shape[:-1], *near.shape[-2:])
            if ranks is not None and self.ranks is not None:
                places = _gather(ranks, near)
                close = (places - places[..., :1]).abs() <= self.ranks
            yield near, self._inside(p.unsqueeze(-2), close, shape)

    def _weights(self, inside: Tensor) -> Tensor:
        """How much each neighbour counts, [..., k]."""
        if self.k == inside.shape[-1]:
            return inside
        weights = inside.float()
        weights[..., -1] *= self.k - inside.shape[-1] + 1
        return weights

    def _inside(self, p: Tensor, close: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Which neighbours, the code itself first, are in its group; where p is on one token each
        code is alone.

        Args:
            p: [..., V].
            close: which neighbours are near the code in the order of p, bool [..., k]; None for
                static groups.
            shape: of the result.
        """
        alone = torch.arange(shape[-1], device=p.device) == 0
        free = (p.amax(-1, keepdim=True) < 1).expand(shape)
        if close is not None:
            free = free & close
        return free | alone


def _drafted(q: Tensor) -> Tensor:
    """The tokens that q [..., V] can draw at each position, [..., M], where M is the largest number
    of them and others fill up; [V], for all positions alike, if M would be V. On devices other than
    the CPU it is, since the host would have to wait for the number.
    """
    positions, size = q.shape[:-1].numel(), q.shape[-1]
    most = int((q > 0).sum(-1).amax()) if positions and q.device.type == "cpu" else size
    return _vocabulary(q) if most == size else q.topk(most).indices


def _vocabulary(p: Tensor) -> Tensor:
    """All tokens, [V], for p [..., V]."""
    return torch.arange(p.shape[-1], device=p.device)


def _spread(values: Tensor, tokens: Tensor, onto: Tensor) -> Tensor:
    """Values of tokens, [..., M] and [..., M] or [M], put into `onto` [..., V]."""
    return onto.scatter_(-1, tokens.expand_as(values), values)


def _portions(tokens: Tensor, p: Tensor, k: int) -> tuple[Tensor, ...]:
    """Tokens [..., M] or [M] in runs, each of few enough tokens for k neighbours of all of them at
    all positions of p [..., V] at once.
    """
    step = max(1, AT_ONCE // max(1, p.shape[:-1].numel() * k))
    return torch.split(tokens, step, -1)


def _gather(p: Tensor, near: Tensor) -> Tensor:
    """p [..., V] at M·k tokens, [..., M, k], or [M, k] for all positions alike: -> [..., M, k]."""
    flat = near.flatten(-2).expand(*p.shape[:-1], -1)
    return p.gather(-1, flat).view(*p.shape[:-1], *near.shape[-2:])


def _places_away(p: Tensor, near: Tensor, most: int) -> Tensor:
    """Which of some tokens are at most so many places from the first of them in the order of
    `_ranks`, found without a sort: [..., V] and int64 [..., k] -> bool [..., k].

    A token's key is the bits of its probability, which grow with it, then its index; so no two keys
    are equal.
    """
    index = torch.arange(p.shape[-1], device=p.device)
    keys = (p.float().abs().view(torch.int32).long() << 32) - index
    own = keys.gather(-1, near)
    first, count = own[..., :1], min(most + 1, p.shape[-1])
    above = keys.masked_fill(keys < first, torch.iinfo(torch.int64).max)
    below = keys.masked_fill(keys > first, torch.iinfo(torch.int64).min)
    highest = above.topk(count, largest=False, sorted=False).values.amax(-1, keepdim=True)
    lowest = below.topk(count, sorted=False).values.amin(-1, keepdim=True)
    return (own <= highest) & (own >= lowest)


def _ranks(p: Tensor) -> Tensor:
    """Place of every token in the order of p, the most probable first: int64 [..., V]."""
    order = p.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(p.shape[-1], device=p.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _jensen_shannon(own: Tensor, moved: Tensor) -> Tensor:
    """D_JS(p_{A,x}, p) in nats, where p(x) = own and p(A without x) = moved: all other tokens are
    the same in both.
    """
    mean = own + moved / 2
    here = torch.xlogy(own + moved, (own + moved) / mean) + torch.xlogy(own, own / mean)
    return torch.where(mean > 0, (moved * math.log(2) + here) / 2, 0.0)


def _known(residual: str) -> str:
    if residual not in get_args(Residual):
        raise TemperaError(
            f"residual={residual} is not known; choose one of {', '.join(get_args(Residual))}"
        )
    return residual


def _assign(rule: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(rule, name, value)
