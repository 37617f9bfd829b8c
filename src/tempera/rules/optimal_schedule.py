"""The relaxation schedule that minimises Cool-SD's TV bound at a given accepted length, from
measured chains of p and q.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its submodules are imported when they are used
import torch
from torch import Tensor

from tempera.decoding.probabilities import Tables
from tempera.errors import TemperaError
from tempera.rules.schedules import Omegas, check_reachable

CEILING = 100.0
"""Default for the largest ω of `schedule_for`, which rejects almost no token that the target
could draw.
"""


@dataclass(frozen=True)
class Chains:
    """Drafted chains x̃_1..x̃_L ~ Q, given by p/q at the drafted tokens, which is all that Eqs. 7
    and 8 need for any schedule.

    With the optimal residual a visited position adds Σ[q·f - p]+ to the bound (Eq. 8). For
    f = min(1, ω·p/q) and ω ≥ 1 this is the mass kept beyond exact decoding, Σ q·(f - min(1, p/q)),
    since only tokens with q > p contribute to either; for ω ≤ 1 it is 0. So both sides of Theorem 2
    are means over chains of products of f_i = min(1, ω_i·ratio_i):

        E[τ + 1] = 1 + E_Q Σ_i Π_{j≤i} f_j
        bound    = E_Q Σ_i (Π_{j<i} f_j)·[f_i - min(1, ratio_i)]+

    This does not assume that acceptance at different depths is independent. The means are exact for
    enumerated chains, and unbiased Monte Carlo estimates for drafted ones, provided that whole
    drafts are recorded, including their rejected tokens.

    Attributes:
        ratios: p/q at the drafted tokens, float64 [C, L].
        weights: weight of each chain, float64 [C]; they sum to 1.
    """

    ratios: Tensor
    weights: Tensor

    @classmethod
    def enumerated(cls, p: Tables, q: Tables) -> "Chains":
        """All V^L chains of L = len(q) tokens, weighted by the draft's tables."""
        weights = torch.ones(1, dtype=torch.float64)
        ratios = torch.zeros(1, 0, dtype=torch.float64)
        for target, draft in zip(p, q, strict=False):
            weights = (weights.unsqueeze(-1) * draft).flatten()
            here = torch.where(draft > 0, target / draft, 1.0).double()
            ratios = torch.cat(
                [ratios.repeat_interleave(draft.shape[-1], 0), here.reshape(-1, 1)], -1
            )
        return cls(ratios, weights)

    @property
    def length(self) -> int:
        """L, the draft length."""
        return self.ratios.shape[1]

    def expected_emitted(self, schedule: Sequence[float]) -> float:
        """E[τ + 1] of a round (Eq. 7)."""
        return 1 + float(self.weights @ self._acceptance(schedule).cumprod(-1).sum(-1))

    def tv_bound(self, schedule: Sequence[float]) -> float:
        """The bound on TV(P̂, P) of a round with the optimal residual (Eq. 8)."""
        acceptance = self._acceptance(schedule)
        reach = torch.nn.functional.pad(acceptance.cumprod(-1), (1, -1), value=1.0)
        return float(
            self.weights @ (reach * (acceptance - self._acceptance([1.0])).clamp(min=0)).sum(-1)
        )

    def _acceptance(self, schedule: Sequence[float]) -> Tensor:
        """f of every drafted token, [C, L]."""
        return (self.ratios * torch.tensor(schedule, dtype=torch.float64)).clamp(max=1)


def schedule_for(chains: Chains, expected_length: float, ceiling: float = CEILING) -> Omegas:
    """The schedule 1 ≤ ω_i ≤ `ceiling` that minimises the TV bound (Eq. 8) at E[τ + 1] =
    `expected_length` (Eq. 7), by sequential quadratic programming (SLSQP) over log ω.

    The problem is not convex, so the search starts L + 1 times: from the uniform schedule, and from
    all relaxation at one depth. The tests compare with brute force. ω < 1 is excluded: it has the
    same bias as ω = 1 and accepts fewer drafts.

    Raises:
        TemperaError: no schedule between exact decoding and `ceiling` has this expected length.
    """
    lengths = reachable(chains, ceiling)
    check_reachable(expected_length, lengths, chains.length)
    if expected_length <= lengths[0]:
        return (1.0,) * chains.length
    most = math.log(ceiling)

    def bound(logs: np.ndarray) -> float:
        return chains.tv_bound(np.exp(logs).tolist())

    def longer(logs: np.ndarray) -> float:
        return chains.expected_emitted(np.exp(logs).tolist()) - expected_length

    def at_length(logs: np.ndarray) -> np.ndarray:
        """The nearest schedule of the expected length on the line to the longest or the shortest
        one.
        """
        end = np.full(chains.length, most if longer(logs) < 0 else 0.0)
        if longer(end) * longer(logs) >= 0:
            return end if abs(longer(end)) < abs(longer(logs)) else logs
        share = scipy.optimize.brentq(
            lambda share: longer(logs + share * (end - logs)), 0, 1, xtol=1e-13
        )
        moved: np.ndarray = logs + float(share) * (end - logs)
        return moved

    found = []
    for start in np.vstack([np.zeros(chains.length), most * np.eye(chains.length)]):
        solved = scipy.optimize.minimize(
            bound,
            at_length(start),
            method="SLSQP",
            bounds=[(0, most)] * chains.length,
            constraints={"type": "eq", "fun": longer},
            options={"ftol": 1e-10},
        )
        found += [at_length(start), at_length(solved.x.clip(0, most))]
    best = np.exp(min(found, key=bound))
    least = chains.ratios.masked_fill(chains.ratios <= 0, 1.0).amin(0)
    # at this ω a depth accepts every token that the target could draw
    needless = (1 / least).clamp(min=1).tolist()
    return tuple(min(omega, limit) for omega, limit in zip(best.tolist(), needless, strict=True))


def reachable(chains: Chains, ceiling: float = CEILING) -> tuple[float, float]:
    """The expected lengths of exact decoding, and of ω = `ceiling` at every depth (≤ L + 1).

    Raises:
        TemperaError: the ceiling is below 1 or infinite.
    """
    if not 1 <= ceiling < math.inf:
        raise TemperaError(f"ceiling={ceiling} is not valid; the largest ω is at least 1")
    return chains.expected_emitted([1.0] * chains.length), chains.expected_emitted(
        [ceiling] * chains.length
    )
