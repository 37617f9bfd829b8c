"""What a run did, token by token: which were accepted drafts, how probable they were, and how far from the target they may be.

Everything is kept per row and per position on the device until the run ends, so results can be keyed by prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempera.acceptance import Exact, at
from tempera.errors import TemperaError
from tempera.probs import normalise
from tempera.trees import take
from tempera.types import Draft, Rule, Scores, Verdict
from tempera.verify import Greedily, GreedyRule, JointRule, keep_probs, mean_residual

BONUS, RESAMPLED, ACCEPTED = 0, 1, 2
"""How a token came about: drawn from the target at a leaf (nothing was tested), drawn from a residual, or an accepted draft."""


@dataclass
class Trace:
    """Per-position record of a batch of images of T tokens each. B rows, L depth of the draft.

    Attributes:
        max_depth: L.
        place: place of the token in its round, int16 [B, T], from 1. An accepted draft at place d is a node of depth d.
        origin: `BONUS`, `RESAMPLED` or `ACCEPTED`, int8 [B, T].
        logprob: log-probability of the token under the target's sampled distribution, float32 [B, T].
        tv: TV(p, q) between target and draft where a draft was tested, float32 [B, T]; NaN elsewhere. Diagnostics only.
        bound: this position's term of the TV bound (Cool-SD Eq. 8), float32 [B, T]. Diagnostics only. See `diagnose`.
        kl: this position's term of KL(emitted law ‖ target), in nats, float32 [B, T]. Diagnostics only. See `diagnose`.
    """

    max_depth: int
    place: Tensor
    origin: Tensor
    logprob: Tensor
    tv: Tensor | None = None
    bound: Tensor | None = None
    kl: Tensor | None = None

    @classmethod
    def blank(cls, batch: int, length: int, max_depth: int, device: torch.device, diagnostics: bool) -> "Trace":
        """A trace to record into. One spare column takes what falls past the image."""

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, length + 1, dtype=dtype, device=device)

        extra = [column(torch.float32) for _ in range(3)] if diagnostics else [None] * 3
        return cls(max_depth, column(torch.int16), column(torch.int8), column(torch.float32), *extra)

    def record(self, draft: Draft, verdict: Verdict, scores: Scores, rule: Rule | JointRule, slots: Tensor) -> None:
        """Add a round. slots: where in the image the verdict's tokens went, int64 [B, L + 1]; T for those that did not go anywhere."""
        places = torch.arange(1, slots.shape[1] + 1, dtype=torch.int16, device=slots.device)
        self.place.scatter_(1, slots, places.expand_as(slots))
        visited = torch.nn.functional.pad(1 + verdict.path, (1, 0))  # the node before each token, root first
        drawn = has_children(draft, visited).to(torch.int8)
        self.origin.scatter_(1, slots, torch.where(places <= verdict.accepted.unsqueeze(1), ACCEPTED, drawn).to(torch.int8))
        flat = visited * scores.p.shape[-1] + verdict.tokens
        self.logprob.scatter_(1, slots, scores.p.flatten(1).gather(1, flat).log())
        if self.tv is not None and self.bound is not None and self.kl is not None:
            for column, values in zip((self.tv, self.bound, self.kl), diagnose(draft, verdict, scores.p, rule, scores.soft), strict=True):
                column.scatter_(1, slots, values)

    def finished(self) -> "Trace":
        """Without the spare column."""
        return self._map(lambda column: column[:, :-1])

    def cpu(self) -> "Trace":
        """On the host: one copy a field, once, when a run has ended."""
        return self._map(lambda column: column.to("cpu"))

    @property
    def round(self) -> Tensor:
        """Round that emitted each token, int64 [B, T], from 0."""
        return (self.place == 1).cumsum(-1) - 1

    @property
    def depth(self) -> Tensor:
        """Depth of an accepted draft, 0 for a token that the target drew, int16 [B, T]: the acceptance map."""
        return torch.where(self.origin == ACCEPTED, self.place, 0)

    @property
    def rounds(self) -> Tensor:
        """Target forward passes each row needed, int64 [B]."""
        return (self.place == 1).sum(-1)

    @property
    def accepted_length(self) -> Tensor:
        """Tokens emitted ÷ rounds, float32 [B]; 1 for plain autoregression, so this is the step compression as well."""
        return self.place.shape[1] / self.rounds

    @property
    def tau(self) -> Tensor:
        """Accepted drafted tokens ÷ rounds, float32 [B]. Drafts past the end of the image do not count."""
        return (self.origin == ACCEPTED).sum(-1) / self.rounds

    @property
    def tested(self) -> Tensor:
        """How often a drafted token was tested at each depth (siblings count once), int64 [B, L]."""
        return self._by_depth(self.origin != BONUS)

    @property
    def accepted(self) -> Tensor:
        """How often one was accepted at each depth, int64 [B, L]."""
        return self._by_depth(self.origin == ACCEPTED)

    def by_tenth(self, which: Tensor) -> Tensor:
        """How many of some tokens, bool [B, T], are in each tenth of the image in the order of decoding, int64 [B, 10]."""
        length = which.shape[1]
        tenths = torch.arange(length, device=which.device) * 10 // length
        return torch.zeros(len(which), 10, dtype=torch.int64, device=which.device).index_add(1, tenths, which.long())

    @property
    def acceptance_rate(self) -> Tensor:
        """Accepted ÷ tested at each depth over all rows, float32 [L]; NaN at a depth that was never reached."""
        return self.accepted.sum(0) / self.tested.sum(0)

    @property
    def tv_sums(self) -> Tensor | None:
        """TV(p, q) summed over the tests at each depth, float32 [B, L]; divide by `tested` for its mean. None without diagnostics."""
        if self.tv is None:
            return None
        depths = torch.arange(1, self.max_depth + 1, device=self.tv.device)
        known = self.tv.nan_to_num(0.0)
        if self.max_depth == 0:
            return known[:, :0]
        return torch.stack([torch.where(self.place == depth, known, 0.0).sum(-1) for depth in depths], -1)

    @property
    def running_bound(self) -> Tensor | None:
        """The TV bound up to and including each position, float32 [B, T]; None without diagnostics."""
        return None if self.bound is None else self.bound.cumsum(-1)

    def summary(self) -> dict[str, Tensor]:
        """One number a row under each name, float32 [B]."""
        rows = {
            "rounds": self.rounds.float(),
            "accepted_length": self.accepted_length,
            "tau": self.tau,
            "logprob": self.logprob.sum(-1),
            "perplexity": (-self.logprob.mean(-1)).exp(),
        }
        if self.tv is not None and self.bound is not None and self.kl is not None:
            rows |= {"tv": self.tv.nanmean(-1), "tv_bound": self.bound.sum(-1), "kl_per_token": self.kl.mean(-1)}
        return rows

    def _by_depth(self, which: Tensor) -> Tensor:
        depths = torch.arange(1, self.max_depth + 1, device=which.device)
        return torch.stack([(which & (self.place == depth)).sum(-1) for depth in depths], -1) if self.max_depth else which[:, :0].long()

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Trace":
        extra = [None if column is None else change(column) for column in (self.tv, self.bound, self.kl)]
        return Trace(self.max_depth, change(self.place), change(self.origin), change(self.logprob), *extra)


def has_children(draft: Draft, nodes: Tensor) -> Tensor:
    """Whether the tree goes on after these nodes: int64 [B, M] in 0..N, 0 the root -> bool [B, M]."""
    return draft.tree.last_children.expand(len(nodes), -1).gather(1, nodes) >= 0


def diagnose(
    draft: Draft, verdict: Verdict, p: Tensor, rule: Rule | JointRule, soft: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """How far the law of each emitted token may be from the target's, from p and q at the positions visited alone.

    Let t¹ = p be the target's law at a visited node and, for its children k = 1..K in test order, f_k the probability of keeping a token
    and tᵏ⁺¹ = Norm[tᵏ - q_k·f_k]+ what an unbiased continuation would have to draw from. Given tᵏ, a test that another sibling's test would
    follow is compared as a choice between the tokens and "rejected": its distance in total variation from the best unbiased choice is
    Σ[q f - tᵏ]+. The last child's test together with its residual draws from π = q f + r·residual, r = Σ q(1 - f): TV(π, tᵏ); a residual
    that depends on the rejected token counts with its mean. A position's term of the TV bound is the sum over the tests performed there,
    whatever came out of them; a token drawn at a leaf adds 0.

    Such a sum of divergences would be infinite where a late sibling may be one that tᵏ has ruled out. The term of the KL divergence is that
    of the token's law as a whole, given the drafted siblings but the last, had they been rejected: Λ = Σ_k (Π_{j<k} r_j)·q_k f_k +
    (Π_k r_k)·residual, and KL(Λ ‖ p) times Π_{k<K} (1 - f_k(x_k))/r_k, the weight of siblings drawn from q_k as draws of rejected ones.

    On a chain (K = 1) these are exactly the local terms of Cool-SD's Eq. 8, whose expectation over a round is the bound, and the KL
    divergence of the emitted token's law given how the round stands. On a tree they are upper bounds of those in expectation, by the chain
    rule over tests and by convexity. Summed over positions, the expected terms bound the TV and the KL divergence between the whole image's
    law and the target's. A joint rule has no tests of single positions; a lossless one adds 0.

    Args:
        draft: the round's proposal.
        verdict: what `verify` decided.
        p: the target's distributions, float32 [B, 1 + N, V].
        rule: the rule that decided.
        soft: the untempered distributions that it decided by in greedy decoding. A kept token that is not the target's costs 1 in total
            variation, and infinitely many nats.

    Returns:
        TV(p, q) with the first child's q (NaN at a leaf), the term of the TV bound, the term of the KL divergence: float32 [B, L + 1]
        each, for the L + 1 places of the round; places past the verdict's last token are undefined.
    """
    if isinstance(rule, JointRule):
        if not rule.lossless:
            raise TemperaError(f"diagnostics are not defined for {type(rule).__name__}: its tests are coupled; run it without diagnostics")
        tv, bound, kl = diagnose(draft, verdict, p, Exact())
        return tv, torch.zeros_like(bound), torch.zeros_like(kl)
    visited = torch.nn.functional.pad(1 + verdict.path, (1, 0))
    if soft is not None and isinstance(rule, GreedyRule):
        rule = Greedily(rule, take(soft, visited))
    return _terms(draft, verdict, visited, take(p, visited), rule)


def _terms(draft: Draft, verdict: Verdict, visited: Tensor, truth: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """What `diagnose` returns, at the visited nodes [B, L + 1] with the target's laws there, `truth` [B, L + 1, V]."""
    children = take(draft.tree.children.expand(len(truth), -1, -1), visited)
    kept_child = torch.nn.functional.pad(verdict.path, (0, 1), value=-1)
    depths = draft.tree.depths.expand_as(draft.tokens)
    bound = torch.zeros_like(visited, dtype=torch.float32)
    tv, reach, weight = torch.full_like(bound, torch.nan), torch.ones_like(bound), torch.ones_like(bound)
    target = ideal = truth
    law = torch.zeros_like(truth)
    undecided = torch.ones_like(visited, dtype=torch.bool)
    for rank in range(draft.tree.max_children):
        node = children[..., rank]
        last = children[..., rank + 1] < 0 if rank + 1 < draft.tree.max_children else torch.ones_like(undecided)
        q, token, depth = (take(x, node) for x in (draft.q, draft.tokens, depths))
        f = keep_probs(rule, target, q, depth)
        kept, rejected = q * f, q * (1 - f)  # not 1 - Σ q·f, which is not quite 0 where nothing is rejected
        there, drawn = node >= 0, rejected.sum(-1, keepdim=True) * mean_residual(rule, target, q, token, depth)
        ending = 0.5 * (kept + drawn - ideal).abs().sum(-1)
        bound += torch.where(undecided & there, torch.where(last, ending, (kept - ideal).clamp(min=0).sum(-1)), 0.0)
        if rank == 0:
            tv = torch.where(there, 0.5 * (target - q).abs().sum(-1), torch.nan)
        law += (reach * there).unsqueeze(-1) * torch.where(last.unsqueeze(-1), kept + drawn, kept)
        chance, total = 1 - at(f, token), rejected.sum(-1)
        weight = torch.where(there & ~last & (total > 0), weight * chance / total, weight)
        reach = torch.where(there, reach * total, reach)
        undecided = undecided & (node != kept_child)
        target, ideal = rule.residual(target, q, token, depth), normalise((ideal - kept).clamp(min=0), otherwise=ideal)
    divergence = torch.where(law > 0, law * (law / truth).log(), 0.0).sum(-1).clamp(min=0)
    return tv, bound, torch.where((weight > 0) & ~tv.isnan(), weight * divergence, 0.0)
