"""Mentored decoding: most kept drafts within a budget of KL divergence at every token."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from tempera.decoding.probabilities import running_sum
from tempera.errors import TemperaError
from tempera.rules.optimal import HIGHEST, Median

Divergence = Literal["target", "emitted"]
STAGES = 4
POINTS = 64
"""Each stage of the search for log c tries so many values at once between two of the stage before:
together they find it to about a millionth of a nat.
"""


@dataclass(frozen=True)
class Mentored(Median):
    """Mentored decoding (V. Tran-Thien, 2023): of all rules whose emitted distribution π has KL(p ‖
    π) ≤ D at each test, the one that keeps most drafts. In its words x is kept with probability
    min(1, p/(α·q)), else drawn from Norm[p/β - q]+, with α ≤ 1 ≤ β such that Σπ = 1 and the budget
    is spent.

    So π = median(p/β, q, p/α): with c = 1/β and ω = 1/α the laws of `Priced`, where the price
    log(ω/c) = log(β/α) is the same at every token, and here the budget D is. Where KL(p ‖ q) is
    within the budget, every draft is kept, unless that costs more than `HIGHEST` nats. In greedy
    decoding the rule is exact.

    Args:
        budget: D, nats; 0 is exact decoding.
        divergence: "target", KL(p ‖ π) as published in 2023, or "emitted", KL(π ‖ p), which the
            metrics add up; one of the f-divergences of V. Tran-Thien and R. Nock (2026, arXiv
            2609.30474).

    Raises:
        TemperaError: the budget is negative or not finite.
    """

    budget: float
    divergence: Divergence = "target"

    def __post_init__(self) -> None:
        if not 0 <= self.budget < math.inf:
            raise TemperaError(
                f"kl_budget={self.budget} is not a divergence; give nats, 0 (exact decoding) or "
                "more",
                option="kl_budget",
            )

    @property
    @override
    def exact(self) -> bool:
        return type(self) is Mentored and self.budget == 0

    @override
    def solve(self, p: Tensor, q: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """See `Median.solve`: c, the smallest that spends at most the budget, and ω, [..., 1]."""
        one = torch.ones_like(p[..., :1])
        if self.budget == 0:
            return one, one
        laws = _Medians.of(p, q, self.divergence)
        points = torch.arange(1, 1 + POINTS, dtype=torch.float64, device=p.device)
        lowered = torch.zeros_like(one, dtype=torch.float64)  # -log c
        step = HIGHEST
        for _ in range(STAGES):
            step = step / POINTS
            c = (-lowered - step * points).exp()
            omega, spent = laws.at(c)
            fits = (omega <= c * math.exp(HIGHEST)) & (spent <= self.budget)
            lowered = lowered + step * fits.sum(-1, keepdim=True)
        c = (-lowered).exp()
        omega, _ = laws.at(c)
        highest = c * math.exp(HIGHEST)  # where p and q share next to no token
        return c.to(p.dtype), torch.minimum(omega, highest).to(p.dtype)


@dataclass(frozen=True)
class _Medians:
    """All laws median(c·p, q, ω·p) of mass 1 between p and q, from sums over the tokens in the
    order of q/p, [..., V], float64: c finds ω and the divergence without a pass over the
    vocabulary.

    Attributes:
        divergence: of p from the law, "target", or of the law from p, "emitted".
        ratios: q/p; infinite where p is 0.
        lacks: Σ (ω·p - q) over the tokens behind each, at ω = its q/p: minus what q has more there.
        p, q, log: sums over the tokens before each, [..., V + 1], of p, of q, and of what the
            divergence is where the law is q.
        p_behind, q_behind: sums over each token and those behind it, [..., V + 1].
    """

    divergence: Divergence
    ratios: Tensor
    lacks: Tensor
    p: Tensor
    q: Tensor
    log: Tensor
    p_behind: Tensor
    q_behind: Tensor

    @classmethod
    def of(cls, p: Tensor, q: Tensor, divergence: Divergence) -> "_Medians":
        """Of two distributions, [..., V]."""
        p, q = (mass.double() / mass.double().sum(-1, keepdim=True) for mass in (p, q))
        ratios, order = torch.where(p > 0, q / p, torch.inf).sort(dim=-1)
        p, q = p.gather(-1, order), q.gather(-1, order)
        both = (p > 0) & (q > 0)
        log = torch.where(both, (p if divergence == "target" else -q) * (p / q).log(), 0.0)
        p_behind, q_behind = _behind(p), _behind(q)
        lacks = torch.where(p > 0, ratios * p_behind[..., 1:] - q_behind[..., 1:], torch.inf)
        before = _before(p), _before(q), _before(log)
        return cls(divergence, ratios, lacks, *before, p_behind, q_behind)

    def at(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """ω and the divergence at some c, [..., n] each; ω is infinite where no law has this c."""
        first = torch.searchsorted(self.ratios, c)  # c·p is below the law's median from here on
        p = self.p.gather(-1, first)
        moved = c * p - self.q.gather(-1, first)  # mass that the law takes from the other end of q
        last = torch.searchsorted(self.lacks, -moved)
        behind = self.p_behind.gather(-1, last)
        omega = ((self.q_behind.gather(-1, last) - moved) / behind).clamp(min=1)
        between = self.log.gather(-1, last) - self.log.gather(-1, first)
        if self.divergence == "target":
            return omega, between - p * c.log() - behind * omega.log()
        return omega, between + c * p * c.log() + omega * behind * omega.log()


def _before(mass: Tensor) -> Tensor:
    """Sums of the entries before each place along the last dimension, [..., V] -> [..., V + 1]."""
    return pad(running_sum(mass, torch.float64), (1, 0))


def _behind(mass: Tensor) -> Tensor:
    """Sums of each entry and those behind it along the last dimension, [..., V] -> [..., V + 1]."""
    return _before(mass.flip(-1)).flip(-1)
