"""Acceptance rules: when to keep a drafted token, and what replaces a rejected one.

A rule is a pair: f(x; p, q, i), the probability of keeping x at depth i, and the residual
distribution. It is exact only as a pair: when q·f + (1 - Σ q·f)·residual = p. 0/0 counts as 1, and
a residual without mass is p. The maths of each: docs/methods.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from tempera.decoding.interfaces import Draft, Rule, Scores
from tempera.decoding.probabilities import at, excess, normalise, one_hot, ratio, sample
from tempera.decoding.sequences import Sequences
from tempera.decoding.trees import take_one
from tempera.decoding.verification import TokenRule
from tempera.errors import TemperaError
from tempera.rules.optimal import RESIDUALS
from tempera.rules.schedules import LARGEST, by_depth


@dataclass(frozen=True)
class Exact(TokenRule):
    """Lossless speculative decoding (Leviathan et al. 2023; Chen et al. 2023; Cool-SD Eq. 1-2): f =
    min(1, p/q), Norm[p - q]+.
    """

    @property
    @override
    def exact(self) -> bool:
        return type(self) is Exact  # not of a rule that changes this one

    @property
    @override
    def local(self) -> bool:
        return type(self) is Exact

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, p/q) of every token: [..., V] -> [..., V]."""
        return ratio(p, q)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q]+, [..., V]."""
        return excess(p, q)


@dataclass(frozen=True)
class Relaxed(TokenRule):
    """Relaxed speculative decoding: f = min(1, ω_i·p/q) (Cool-SD Eq. 12). Cool-SD and UniformRSD
    are this rule with their schedules.

    Args:
        schedule: ω_1..ω_L; deeper nodes use ω_L. See `tempera.rules.schedules`.
        residual_kind: "optimal", `G*` = Norm[p - q·f]+ (Eq. 10), "vanilla", Norm[p - q]+ (Eq. 11),
            or "kl", Norm[c·p - q·f]+, the one of least KL divergence (docs/optimal.md). The first
            two are the same where ω_i ≥ 1 (Proposition 1); below 1 vanilla is biased, and "kl" is
            `G*`. At ω_i < 1 vanilla is ill-conditioned where p ≈ q: it normalises a difference of
            almost equal numbers, yet many tokens are rejected. `G*` minimises the TV bound (Eq. 8)
            and not the exact TV of whole sequences, in which errors at different positions may
            cancel: there vanilla is sometimes nearer to the target.

    Raises:
        TemperaError: the schedule is empty or has an ω that is not above 0 or not finite in
            float32.
    """

    schedule: Sequence[float]
    residual_kind: Literal["optimal", "vanilla", "kl"] = "optimal"

    def __post_init__(self) -> None:
        schedule = tuple(map(float, self.schedule))
        object.__setattr__(self, "schedule", schedule)
        if not schedule or not all(0 < omega <= LARGEST for omega in schedule):
            raise TemperaError(
                f"the relaxation schedule {list(schedule)} must hold at least one number, all "
                f"above 0 and at most {LARGEST:g}"
            )

    @property
    @override
    def exact(self) -> bool:
        """Where no ω_i is above 1, so that the residual fills up what is missing."""
        most = max(self.schedule)
        fills = self.residual_kind != "vanilla" or most == min(self.schedule) == 1
        return type(self) is Relaxed and most <= 1 and fills

    @property
    @override
    def local(self) -> bool:
        """Where nothing is left of p(x) after a rejection."""
        removes = self.residual_kind == "optimal" and min(self.schedule) >= 1
        return type(self) is Relaxed and (removes or self.residual_kind == "vanilla")

    def accept(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """min(1, ω_i·p/q) of every token, at depth i: [..., V] -> [..., V]."""
        return ratio(self.omega(depth).unsqueeze(-1) * p, q)

    def accept_at(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """min(1, ω_i·p/q) of one token: [..., V] and [...] -> [...]."""
        return ratio(self.omega(depth) * at(p, token), at(q, token))

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Norm[p - q·f]+, where q·f = min(q, ω_i·p); Norm[p - q]+; or Norm[c·p - q·f]+."""
        if self.residual_kind == "vanilla":
            return excess(p, q)
        accepted = torch.minimum(q, self.omega(depth).unsqueeze(-1) * p)
        return RESIDUALS[self.residual_kind](p, accepted)

    def omega(self, depth: Tensor) -> Tensor:
        """ω at 1-based depths, [...] -> [...]."""
        return by_depth(tuple(self.schedule), depth)


@dataclass(frozen=True)
class Match(Rule):
    """Accept the tokens that the target draws: it draws one token after every node, and a child is
    accepted if it is that token.

    With the draws of `drafters.jacobi.by_fixed_draws` this is Jacobi decoding (Song et al. 2021);
    with new draws in each round it is the naive verification of SpecInfer (Miao et al. 2023), which
    SJD's public code also calls Jacobi decoding. Exact for every draft: every emitted token is a
    draw from the target.
    """

    @property
    @override
    def exact(self) -> bool:
        return True

    @override
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = scores.p
        tree = draft.tree
        draws = uniforms[:, : 1 + tree.nodes].roll(1, 1) if draft.draws is None else draft.draws
        drawn = sample(p, draws)
        parents = (1 + tree.parents).expand_as(draft.tokens)
        stop = tree.walk(draft.tokens == drawn.gather(1, parents))
        return stop, one_hot(take_one(drawn, stop), p.shape[-1])


@dataclass(frozen=True)
class BlockVerification(Rule):
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): a chain is accepted by
    its joint prefix. Exact.

    With weights w_0 = 1 and w_i = min(1, w_{i-1}·p(x_i)/q(x_i)), the first i drafted tokens are all
    accepted with probability w_i. Each prefix is tested and passes with probability
    h_i = a_i / (a_i + 1 - w_i), h_L = w_L, where a_i = Σ_x [w_i·p - q]+ is the mass that the target
    lacks after it. The longest prefix that passes is accepted, and the next token is drawn from
    Norm[w_i·p - q]+, or from p after a whole draft. (If longer prefixes are accepted with
    probability w_i - a_i on average, which is the mean of the next weight, then at least i tokens
    are accepted with probability h_i + (1 - h_i)(w_i - a_i) = w_i.) On average it accepts at least
    as many tokens as testing them one by one, where that probability is Π min(1, p/q) ≤ w_i.

    q must be a token's distribution given the tokens drafted before it, and guesses must not
    survive a round: later tokens influence the acceptance of earlier ones, so with Jacobi drafters
    other than SJD's the law would differ.
    """

    chains_only = True

    @property
    @override
    def exact(self) -> bool:
        return True

    @override
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Rule.walk`.

        Raises:
            TemperaError: the draft contains guesses from earlier rounds.
        """
        p = scores.p
        tree = draft.tree
        passing, lacking = self._tests(draft, p)
        accepted = (tree.depths * (uniforms[:, : tree.nodes] < passing)).amax(-1)
        lack = take_one(lacking, accepted.clamp(max=tree.nodes - 1))
        stopped = normalise(lack, otherwise=take_one(p, accepted))
        return accepted, torch.where((accepted == tree.nodes).unsqueeze(-1), p[:, -1], stopped)

    def prefix_acceptance_probs(self, draft: Draft, p: Tensor) -> Tensor:
        """The probability that at least 1..N drafted tokens are accepted, float64 [B, N]."""
        passing, _ = self._tests(draft, p)
        return 1 - (1 - passing).flip(-1).cumprod(-1).flip(-1)

    def _tests(self, draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
        """h_1..h_N, float64 [B, N], and [w_i·p - q]+ after 0..N - 1 tokens, [B, N, V]."""
        if not draft.fresh:
            raise TemperaError(
                f"{type(self).__name__} is not lossless with guesses that are kept from round to "
                "round: draw new ones in every round (drafter=sjd), or choose rule=exact",
                option="rule",
            )
        q = draft.drawn_from(p.shape[-1])
        above = at(p[:, :-1], draft.tokens).double()
        below = at(q, draft.tokens).double()
        ratios = (above / below).masked_fill(below <= 0, 0.0)  # not drawn from q: never kept
        steps = torch.nn.functional.pad(ratios.log().cumsum(-1), (1, 0))
        # of the prefixes of 0..N tokens: the product since its last cut to 1
        weights = (steps - steps.cummax(-1).values).exp()
        lacking = (weights[:, :-1, None].to(p.dtype) * p[:, :-1] - q).clamp(min=0)
        wanting = lacking.sum(-1)[:, 1:].double()
        return torch.cat([passes(weights[:, 1:-1], wanting), weights[:, -1:]], -1), lacking


def passes(weight: Tensor, lack: Tensor) -> Tensor:
    """a / (a + 1 - w), the probability that a prefix of weight w passes by itself if the target
    lacks a mass a after it; 1 if w is: [...] each.
    """
    return torch.where(weight < 1, lack / (lack + (1 - weight)), 1.0)
