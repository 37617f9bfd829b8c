"""The relaxation schedule that minimises Cool-SD's TV bound at a given accepted length, from
measured chains of p and q.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.decoding.probabilities import Tables
from tempera.errors import LengthBeyondDraft, TemperaError
from tempera.rules.schedules import Omegas

CEILING = 100.0
"""Default for the largest ω of `optimal_schedule`, which rejects almost no token that the target
could draw.
"""

_GRID = 33
"""Values of ω that are tried at each of two depths."""


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
    def along(cls, p: Tables, q: Tables, tokens: Tensor | None = None) -> "Chains":
        """Chains of L = len(q) tokens.

        Args:
            p: the target's distributions by depth; p[i] tests the drafted token of depth i + 1. It
                is [C, V] along C drafted chains, or a table [V^i, V]. Depths beyond q's are
                ignored.
            q: the draft's distributions, in the same form.
            tokens: the drafted tokens, int64 [C, L]; by default all V^L chains of the tables,
                weighted by Q.
        """
        if tokens is not None:
            each = [
                target.gather(-1, token[:, None]) / draft.gather(-1, token[:, None])
                for target, draft, token in zip(p, q, tokens.T, strict=False)
            ]
            ratios = torch.cat(each, -1).double()
            return cls(ratios, torch.full_like(ratios[:, 0], 1 / len(ratios)))
        weights, ratios = torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64)
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
        return 1 + float(self.weights @ self.kept(schedule).cumprod(-1).sum(-1))

    def tv_bound(self, schedule: Sequence[float]) -> float:
        """The bound on TV(P̂, P) of a round with the optimal residual (Eq. 8)."""
        kept = self.kept(schedule)
        reach = torch.nn.functional.pad(kept.cumprod(-1), (1, -1), value=1.0)
        return float(
            self.weights @ (reach * (kept - self.ratios.clamp(max=1)).clamp(min=0)).sum(-1)
        )

    def kept(self, schedule: Sequence[float]) -> Tensor:
        """f at the drafted tokens, [C, L]."""
        return (self.ratios * torch.tensor(schedule, dtype=torch.float64)).clamp(max=1)


def optimal_schedule(
    p: Tables,
    q: Tables,
    expected_length: float,
    tokens: Tensor | None = None,
    ceiling: float = CEILING,
) -> Omegas:
    """The schedule 1 ≤ ω_i ≤ `ceiling` that minimises the TV bound (Eq. 8) at E[τ + 1] =
    `expected_length` (Eq. 7).

    Args:
        p, q, tokens: tables, or distributions measured along drafted chains; see `Chains.along`.
        expected_length: tokens emitted per round.
        ceiling: no ω is larger.

    Raises:
        TemperaError: no schedule between exact decoding and `ceiling` has this expected length.
    """
    return schedule_for(Chains.along(p, q, tokens), expected_length, ceiling)


def schedule_for(chains: Chains, expected_length: float, ceiling: float = CEILING) -> Omegas:
    """`optimal_schedule` on chains.

    At a given E the bound is E - 1 minus the expected number of visited drafts that exact decoding
    would also accept (*honest* drafts), so the search maximises that number. It has three starts:
    a uniform schedule, one relaxed from the first depth down, and one relaxed from the last depth
    up. From each it trades relaxation between two depths at a time at constant E, on an ever finer
    grid, until no pair improves. The result is a stationary point of the constrained problem (the
    exchange argument of the paper's Proposition 2). The problem is not convex, so the tests compare
    with brute force. ω < 1 is excluded: it has the same bias as ω = 1 and accepts fewer honest
    drafts.
    """
    low, high = reachable(chains, ceiling)
    if not low - 1e-9 <= expected_length <= high + 1e-9:
        raise LengthBeyondDraft(expected_length, chains.length, low, high)
    if expected_length <= low:
        return (1.0,) * chains.length
    depths = range(chains.length)
    starts = [_spent(chains, order, expected_length, ceiling) for order in (depths, depths[::-1])]
    starts.append(_uniform(chains, expected_length, ceiling))
    best = min(
        (_exchanged(chains, start, expected_length, ceiling) for start in starts),
        key=chains.tv_bound,
    )
    least = chains.ratios.masked_fill(chains.ratios <= 0, 1.0).amin(0)
    # at this ω a depth accepts every token that the target could draw
    needless = (1 / least).clamp(min=1).tolist()
    return tuple(min(omega, limit) for omega, limit in zip(best, needless, strict=True))


def reachable(chains: Chains, ceiling: float = CEILING) -> tuple[float, float]:
    """The expected lengths of exact decoding, and of ω = `ceiling` at every depth (≤ L + 1)."""
    if not 1 <= ceiling < math.inf:
        raise TemperaError(f"ceiling={ceiling} is not possible; the largest ω is at least 1")
    return chains.expected_emitted([1.0] * chains.length), chains.expected_emitted(
        [ceiling] * chains.length
    )


def _uniform(chains: Chains, expected_length: float, ceiling: float) -> Omegas:
    """The same ω at every depth."""

    def emitted(omega: float) -> float:
        return chains.expected_emitted((omega,) * chains.length)

    return (_solve(emitted, expected_length, ceiling),) * chains.length


def _spent(chains: Chains, order: Sequence[int], expected_length: float, ceiling: float) -> Omegas:
    """Relax depths fully in this order, the last one partly, up to the expected length."""
    schedule = [1.0] * chains.length
    for depth in order:
        schedule[depth] = ceiling
        if chains.expected_emitted(schedule) >= expected_length:
            return _adjusted(chains, schedule, depth, expected_length, ceiling)
    return tuple(schedule)


def _adjusted(
    chains: Chains, schedule: Sequence[float], depth: int, expected_length: float, ceiling: float
) -> Omegas:
    """The schedule with ω at one depth (from 0) changed so that E is the expected length, or as
    near to it as ω in 1..ceiling allows.
    """
    before, after = tuple(schedule[:depth]), tuple(schedule[depth + 1 :])

    def emitted(omega: float) -> float:
        return chains.expected_emitted((*before, omega, *after))

    return *before, _solve(emitted, expected_length, ceiling), *after


def _solve(emitted: Callable[[float], float], expected_length: float, ceiling: float) -> float:
    """The ω in 1..ceiling at which the increasing function `emitted` is `expected_length`, by
    bisecting log ω.
    """
    low, high = 0.0, math.log(ceiling)
    for _ in range(36):
        middle = (low + high) / 2
        low, high = (middle, high) if emitted(math.exp(middle)) < expected_length else (low, middle)
    return math.exp(high)


def _exchanged(chains: Chains, schedule: Omegas, expected_length: float, ceiling: float) -> Omegas:
    """Trade relaxation between pairs of depths while the bound falls, over an ever narrower range
    of ω.
    """
    span = math.log(ceiling)
    best = chains.tv_bound(schedule)
    while span > 1e-3:
        before = best
        for first, second in itertools.combinations(range(chains.length), 2):
            tried = _traded(chains, schedule, (first, second), expected_length, ceiling, span)
            bound = chains.tv_bound(tried)
            if bound < best and abs(chains.expected_emitted(tried) - expected_length) < 1e-6:
                schedule, best = tried, bound
        if before - best < 1e-3 * before:
            span /= 4
    return schedule


def _traded(
    chains: Chains,
    schedule: Omegas,
    pair: tuple[int, int],
    expected_length: float,
    ceiling: float,
    span: float,
) -> Omegas:
    """The best schedule that differs at two depths only, of which `pair` names the upper one first.
    log ω of that one is tried on a grid within `span`; ω of the other follows from the expected
    length.

    E and the number H of honest drafts are bilinear in the f of the two depths, so a matrix product
    evaluates a grid of both.
    """
    early, late = pair
    here, most = math.log(schedule[early]), math.log(ceiling)
    ends = (max(here - span, 0.0), min(here + span, most)), (0.0, most)
    grids = [torch.linspace(*end, _GRID, dtype=torch.float64).exp() for end in ends]
    kept, exact = chains.kept(schedule), chains.ratios.clamp(max=1)
    blocked = kept.clone()
    blocked[:, late] = 0
    before = chains.weights * kept[:, :early].prod(-1)
    across = before * kept[:, early + 1 : late].prod(-1)
    f_early, f_late = (
        (grid[:, None] * chains.ratios[:, depth]).clamp(max=1)
        for grid, depth in zip(grids, pair, strict=True)
    )
    tables = []
    for onward, ended in zip(_onward(kept, exact), _onward(blocked, exact), strict=True):
        tables.append(
            (f_early @ (before * ended[:, early]))[:, None]
            + (f_early * (across * onward[:, late])) @ f_late.T
        )
    emitted, honest = tables
    wanted = expected_length - 1 - float(chains.weights @ kept[:, :early].cumprod(-1).sum(-1))
    moved = list(schedule)
    moved[early] = float(grids[0][_matched(emitted, honest, wanted).argmax()])
    return _adjusted(chains, moved, late, expected_length, ceiling)


def _onward(kept: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Given that a depth's draft is accepted: the expected number of accepted drafts from there on,
    and of honest drafts after it, each [C, L].
    """
    emitted, honest = [torch.ones_like(kept[:, 0])], [torch.zeros_like(kept[:, 0])]
    for f, e in zip(kept.T[1:].flip(0), exact.T[1:].flip(0), strict=True):
        emitted.append(1 + f * emitted[-1])
        honest.append(e + f * honest[-1])
    return torch.stack(emitted[::-1], -1), torch.stack(honest[::-1], -1)


def _matched(emitted: Tensor, values: Tensor, wanted: float) -> Tensor:
    """In each row, interpolate the value at which `emitted`, which increases, equals `wanted`; -∞
    if it never does. [A, B] -> [A].
    """
    after = torch.searchsorted(emitted, torch.full_like(emitted[:, :1], wanted)).clamp(
        1, emitted.shape[1] - 1
    )
    low, high = emitted.gather(1, after - 1), emitted.gather(1, after)
    share = ((wanted - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    there = values.gather(1, after - 1) * (1 - share) + values.gather(1, after) * share
    inside = (emitted[:, 0] <= wanted + 1e-9) & (emitted[:, -1] >= wanted - 1e-9)
    return torch.where(inside, there[:, 0], -torch.inf)
