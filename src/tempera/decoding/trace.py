"""A token-by-token record of decoding: accepted drafts, log-probabilities, and bounds on the
distance of their law from the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.diagnostics import certainty, diagnose, proximity
from tempera.decoding.interfaces import Draft, JointRule, Rule, Scores, Verdict
from tempera.decoding.trees import Tree, take

BONUS, RESAMPLED, ACCEPTED = 0, 1, 2
"""Origin of a token: the bonus token drawn from the target at a leaf, a token drawn from a
residual, or an accepted draft.
"""
RECORDED = {"origin": torch.int8, "logprob": torch.float32}
"""What `recorded` gives of every token, by name, with its dtype."""
CERTAINTY = ("top1", "top10", "entropy", "collision")
"""The columns of `diagnostics.certainty`."""
DIAGNOSED = RECORDED | dict.fromkeys(("tv", "bound", "kl", *CERTAINTY, "proximity"), torch.float32)
"""The same with diagnostics."""


@dataclass
class Trace:
    """Per-position record of a batch of images of T tokens each. B rows, L depth of the draft.

    Attributes:
        max_depth: L.
        place: place of the token in its round, int32 [B, T], from 1. An accepted draft at place d
            is a node of depth d.
        origin: `BONUS`, `RESAMPLED` or `ACCEPTED`, int8 [B, T].
        logprob: log-probability of the token under the target's sampled distribution, float32 [B,
            T].
        tv: TV(p, q) between target and draft where a draft was tested, float32 [B, T]; NaN
            elsewhere. Diagnostics only.
        bound: this position's term of the TV bound (Cool-SD Eq. 8), float32 [B, T]. Diagnostics
            only. See `diagnose`.
        kl: this position's term of the bound on KL(emitted law ‖ target), in nats, float32 [B, T].
            Diagnostics only. See `diagnose`.
        top1: the target's largest probability there, float32 [B, T]. Diagnostics only, as the next.
        top10: the mass of its ten most probable tokens, float32 [B, T]. See `certainty`.
        entropy: of its distribution, in nats, float32 [B, T].
        collision: the probability that two draws from it agree, float32 [B, T].
        proximity: how many tokens LANTERN's set of the first drafted token holds, float32 [B, T];
            NaN where there is none. See `diagnostics.proximity`.
    """

    max_depth: int
    place: Tensor
    origin: Tensor
    logprob: Tensor
    tv: Tensor | None = None
    bound: Tensor | None = None
    kl: Tensor | None = None
    top1: Tensor | None = None
    top10: Tensor | None = None
    entropy: Tensor | None = None
    collision: Tensor | None = None
    proximity: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The columns that are there, by name."""
        named = {column.name: getattr(self, column.name) for column in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def cpu(self) -> "Trace":
        """A copy on the host, one transfer per field."""
        columns: dict[str, Any] = {name: it.cpu() for name, it in self.tensors().items()}
        return replace(self, **columns)

    @property
    def round(self) -> Tensor:
        """Round that emitted each token, int64 [B, T], from 0."""
        return (self.place == 1).cumsum(-1) - 1

    @property
    def depth(self) -> Tensor:
        """Depth of an accepted draft, 0 for a token that the target drew, int32 [B, T]: the
        acceptance map.
        """
        return torch.where(self.origin == ACCEPTED, self.place, 0)

    @property
    def rounds(self) -> Tensor:
        """Target forward passes each row needed, int64 [B]."""
        return (self.place == 1).sum(-1)

    @property
    def accepted_length(self) -> Tensor:
        """Tokens emitted ÷ rounds, float32 [B]; 1 for plain autoregression, so this is the step
        compression as well.
        """
        return self.place.shape[1] / self.rounds

    @property
    def tau(self) -> Tensor:
        """Accepted drafted tokens ÷ rounds, float32 [B]. Drafts past the end of the image do not
        count.
        """
        return (self.origin == ACCEPTED).sum(-1) / self.rounds

    @property
    def tested(self) -> Tensor:
        """How often a drafted token was tested at each depth, siblings once, int64 [B, L]."""
        return self._by_depth(self.origin != BONUS)

    @property
    def accepted(self) -> Tensor:
        """How often one was accepted at each depth, int64 [B, L]."""
        return self._by_depth(self.origin == ACCEPTED)

    def by_tenth(self, which: Tensor) -> Tensor:
        """How many of some tokens, bool [B, T], are in each tenth of the image in the order of
        decoding, int64 [B, 10].
        """
        length = which.shape[1]
        tenths = torch.arange(length, device=which.device) * 10 // length
        return torch.zeros(len(which), 10, dtype=torch.int64, device=which.device).index_add(
            1, tenths, which.long()
        )

    def summary(self) -> dict[str, Tensor]:
        """One number a row under each name, float32 [B]."""
        rows = {
            "rounds": self.rounds.float(),
            "accepted_length": self.accepted_length,
            "tau": self.tau,
            "logprob": self.logprob.sum(-1),
            "perplexity": (-self.logprob.mean(-1)).exp(),
        }
        columns = self.tensors()
        means = ("tv", "top1", "top10", "entropy", "collision", "proximity")
        rows |= {name: columns[name].nanmean(-1) for name in means if name in columns}
        if "bound" in columns:
            rows |= {"tv_bound": columns["bound"].sum(-1), "kl_per_token": columns["kl"].mean(-1)}
        return rows

    def columns(self) -> dict[str, Tensor]:
        """What a replay shows of every token, in the order of decoding, [B, T] each."""
        return {"place": self.place, "origin": self.origin, "logprob": self.logprob}

    def _by_depth(self, values: Tensor) -> Tensor:
        """Sums of values [B, T] over the tokens at each place, [B, L]."""
        depths = torch.arange(1, self.max_depth + 1, device=values.device)
        return (values.unsqueeze(-1) * (self.place.unsqueeze(-1) == depths)).sum(1)


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of all rows of several batches, in order; they must be of the same method."""
    tensors = [trace.tensors() for trace in traces]
    columns: dict[str, Any] = {
        name: torch.cat([batch[name] for batch in tensors]) for name in tensors[0]
    }
    return replace(traces[0], **columns)


def recorded(
    draft: Draft, verdict: Verdict, scores: Scores, diagnosed: Rule | JointRule | None
) -> dict[str, Tensor]:
    """Columns of `Trace` for a round's tokens, [B, L + 1] each; those past the drawn token are
    undefined. `diagnosed` is the rule whose diagnostics are recorded, if any.
    """
    p = scores.p
    visited = verdict.visited
    chosen = visited * p.shape[-1] + verdict.tokens
    columns = {
        "origin": origins(draft.tree, verdict),
        "logprob": p.flatten(1).gather(1, chosen).log(),
    }
    if diagnosed is None:
        return columns
    tv, bound, kl = diagnose(draft, verdict, p, diagnosed, scores.untempered)
    columns |= {"tv": tv, "bound": bound, "kl": kl}
    columns |= dict(zip(CERTAINTY, certainty(take(p, visited)), strict=True))
    columns["proximity"] = proximity(
        draft, verdict, p if scores.untempered is None else scores.untempered, diagnosed
    )
    return columns


def origins(tree: Tree, verdict: Verdict) -> Tensor:
    """Origins of a round's tokens, int8 [B, L + 1]; those after the drawn token are undefined."""
    ahead = torch.arange(verdict.tokens.shape[1], device=verdict.stop.device)
    at_leaf = tree.at_stop(tree.last_children, verdict.stop) < 0
    drawn = torch.where(at_leaf, BONUS, RESAMPLED).unsqueeze(1)
    return torch.where(ahead < verdict.accepted.unsqueeze(1), ACCEPTED, drawn).to(torch.int8)


def places(origin: Tensor) -> Tensor:
    """`Trace.place`, int32 [B, T]: a round begins at the first token, and after every drawn one."""
    begins = torch.nn.functional.pad(origin[:, :-1] != ACCEPTED, (1, 0), value=True)
    columns = torch.arange(origin.shape[1], device=origin.device)
    first = torch.where(begins, columns, 0).cummax(-1).values
    return (1 + columns - first).int()
