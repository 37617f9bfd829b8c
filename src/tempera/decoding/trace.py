"""A token-by-token record of decoding: accepted drafts, log-probabilities, and bounds on the
distance of their law from the target's.

All tensors stay on the device until decoding ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.diagnostics import certainty, diagnose, proximity
from tempera.decoding.interfaces import Draft, JointRule, Rule, Scores, Verdict
from tempera.decoding.trees import take

BONUS, RESAMPLED, ACCEPTED = 0, 1, 2
"""Origin of a token: the bonus token drawn from the target at a leaf, a token drawn from a
residual, or an accepted draft.
"""


@dataclass
class Trace:
    """Per-position record of a batch of images of T tokens each. B rows, L depth of the draft.

    Attributes:
        max_depth: L.
        place: place of the token in its round, int16 [B, T], from 1. An accepted draft at place d
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
    proximity: Tensor | None = None

    @classmethod
    def blank(
        cls, batch: int, length: int, max_depth: int, device: torch.device, diagnostics: bool
    ) -> "Trace":
        """An empty trace, with a spare column for tokens past the image."""

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, length + 1, dtype=dtype, device=device)

        extra = [column(torch.float32) for _ in range(7)] if diagnostics else []
        return cls(
            max_depth, column(torch.int16), column(torch.int8), column(torch.float32), *extra
        )

    def record(
        self, draft: Draft, verdict: Verdict, scores: Scores, rule: Rule | JointRule, slots: Tensor
    ) -> None:
        """Add a round. slots: positions of the verdict's tokens in the image, int64 [B, L + 1]; T
        beyond its end. Later rounds overwrite what follows the emitted tokens.
        """
        places = torch.arange(1, slots.shape[1] + 1, dtype=torch.int16, device=slots.device)
        self.place.scatter_(1, slots, places.expand_as(slots))
        inner = torch.where(draft.tree.last_children < 0, BONUS, RESAMPLED).to(torch.int8)
        drawn = inner.expand(len(slots), -1).gather(1, verdict.visited)
        origin = torch.where(places <= verdict.accepted.unsqueeze(1), ACCEPTED, drawn)
        self.origin.scatter_(1, slots, origin)
        flat = verdict.visited * scores.p.shape[-1] + verdict.tokens
        self.logprob.scatter_(1, slots, scores.p.flatten(1).gather(1, flat).log())
        columns = [*self._diagnostics]
        if columns:
            soft = scores.p if scores.soft is None else scores.soft
            values = (
                *diagnose(draft, verdict, scores.p, rule, scores.soft),
                *certainty(take(scores.p, verdict.visited)),
                proximity(draft, verdict, soft, rule),
            )
            for column, value in zip(columns, values, strict=True):
                column.scatter_(1, slots, value)

    @property
    def _diagnostics(self) -> Iterator[Tensor]:
        """The columns of diagnostics in the order of the fields; none without."""
        columns = (self.tv, self.bound, self.kl, self.top1, self.top10, self.entropy)
        return (column for column in (*columns, self.proximity) if column is not None)

    def tensors(self) -> list[Tensor]:
        """All columns in the order of the fields."""
        return [self.place, self.origin, self.logprob, *self._diagnostics]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Trace":
        """A trace with these columns in place of `tensors`."""
        return Trace(self.max_depth, *tensors)

    def finished(self) -> "Trace":
        """Without the spare column."""
        return self._map(lambda column: column[:, :-1])

    def cpu(self) -> "Trace":
        """A copy on the host, one transfer per field; call it once, when decoding has ended."""
        return self._map(lambda column: column.to("cpu"))

    @property
    def round(self) -> Tensor:
        """Round that emitted each token, int64 [B, T], from 0."""
        return (self.place == 1).cumsum(-1) - 1

    @property
    def depth(self) -> Tensor:
        """Depth of an accepted draft, 0 for a token that the target drew, int16 [B, T]: the
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

    @property
    def acceptance_rate(self) -> Tensor:
        """Accepted ÷ tested at each depth over all rows, float32 [L]; NaN at a depth that was never
        reached.
        """
        return self.accepted.sum(0) / self.tested.sum(0)

    @property
    def tv_sums(self) -> Tensor | None:
        """TV(p, q) summed over the tests at each depth, float32 [B, L]; divide by `tested` for its
        mean. None without diagnostics.
        """
        if self.tv is None:
            return None
        depths = torch.arange(1, self.max_depth + 1, device=self.tv.device)
        known = self.tv.nan_to_num(0.0)
        if self.max_depth == 0:
            return known[:, :0]
        return torch.stack(
            [torch.where(self.place == depth, known, 0.0).sum(-1) for depth in depths], -1
        )

    @property
    def running_bound(self) -> Tensor | None:
        """The TV bound up to and with each position, float32 [B, T]; None without diagnostics."""
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
            rows |= {
                "tv": self.tv.nanmean(-1),
                "tv_bound": self.bound.sum(-1),
                "kl_per_token": self.kl.mean(-1),
            }
        for name, column in (
            ("top1", self.top1),
            ("top10", self.top10),
            ("entropy", self.entropy),
            ("proximity", self.proximity),
        ):
            if column is not None:
                rows[name] = column.nanmean(-1)
        return rows

    def columns(self) -> dict[str, Tensor]:
        """What a replay shows of every token, in the order of decoding, [B, T] each."""
        return {"place": self.place, "origin": self.origin, "logprob": self.logprob}

    def _by_depth(self, which: Tensor) -> Tensor:
        depths = torch.arange(1, self.max_depth + 1, device=which.device)
        return (
            torch.stack([(which & (self.place == depth)).sum(-1) for depth in depths], -1)
            if self.max_depth
            else which[:, :0].long()
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Trace":
        return self.with_tensors([change(column) for column in self.tensors()])


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of all rows of several batches, in order; they must be of the same method."""
    columns: dict[str, Any] = {
        field.name: torch.cat([getattr(trace, field.name) for trace in traces])
        for field in fields(traces[0])
        if isinstance(getattr(traces[0], field.name), Tensor)
    }
    return replace(traces[0], **columns)
