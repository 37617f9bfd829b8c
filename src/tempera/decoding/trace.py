"""A token-by-token record of decoding: accepted drafts, log-probabilities, and bounds on the
distance of their law from the target's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tempera.decoding.interfaces import ACCEPTED, BONUS


@dataclass
class Trace:
    """Per-position record of a batch of images of T tokens each. B rows, L depth of the draft.

    Attributes:
        max_depth: L.
        step: place of the token in its round, int32 [B, T], from 1. An accepted draft at place d
            is a node of depth d.
        origin: `BONUS`, `RESAMPLED` or `ACCEPTED` of `decoding.interfaces`, int8 [B, T].
        logprob: log-probability of the token under the target's sampled distribution, float32 [B,
            T].
        tv: TV(p, q) between target and draft where a draft was tested, float32 [B, T]; NaN
            elsewhere. Diagnostics only.
        bound: this position's term of the TV bound (Cool-SD Eq. 8), float32 [B, T]. Diagnostics
            only. See `diagnose`.
        kl: this position's term of the bound on KL(emitted law ‖ target), in nats, float32 [B, T].
            Diagnostics only. See `diagnose`.
        top1: the target's largest probability there, float32 [B, T]. Diagnostics only, as the next.
        top10: the mass of its ten most probable tokens, float32 [B, T]. See
            `diagnostics.certainty`.
        entropy: of its distribution, in nats, float32 [B, T].
        collision: the probability that two draws from it agree, float32 [B, T].
        figures: what the rule records of itself (`Rule.figures`), by name, float32 [B, T] each.
            Diagnostics only.
    """

    max_depth: int
    step: Tensor
    origin: Tensor
    logprob: Tensor
    tv: Tensor | None = None
    bound: Tensor | None = None
    kl: Tensor | None = None
    top1: Tensor | None = None
    top10: Tensor | None = None
    entropy: Tensor | None = None
    collision: Tensor | None = None
    figures: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, max_depth: int, recorded: Mapping[str, Tensor]) -> Self:
        """Of `Sequences.recorded`; `origin` and `logprob` are among it."""
        named: dict[str, Any] = dict(recorded)
        own = {column.name for column in fields(cls)}
        figures = {name: named.pop(name) for name in named.keys() - own}
        return cls(max_depth, steps(named["origin"]), **named, figures=figures)

    def tensors(self) -> dict[str, Tensor]:
        """The columns that are there, by name; the rule's figures are among them."""
        named = {column.name: getattr(self, column.name) for column in fields(self)} | self.figures
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def having(self, columns: Mapping[str, Tensor]) -> "Trace":
        """The same with other values of all `tensors`."""
        own: dict[str, Any] = {
            name: value for name, value in columns.items() if name not in self.figures
        }
        return replace(self, **own, figures={name: columns[name] for name in self.figures})

    def cpu(self) -> "Trace":
        """A copy on the host, one transfer per field."""
        return self.having({name: it.cpu() for name, it in self.tensors().items()})

    def rows(self, which: Tensor) -> "Trace":
        """The trace of some rows, int64 [M], in this order."""
        return self.having({name: it[which.to(it.device)] for name, it in self.tensors().items()})

    @staticmethod
    def joined(traces: "Sequence[Trace]") -> "Trace":
        """One trace of all rows of several, in order; they must be of the same method."""
        tensors = [trace.tensors() for trace in traces]
        return traces[0].having(
            {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
        )

    @property
    def round(self) -> Tensor:
        """Round that emitted each token, int64 [B, T], from 0."""
        return (self.step == 1).cumsum(-1) - 1

    @property
    def depth(self) -> Tensor:
        """Depth of an accepted draft, 0 for a token that the target drew, int32 [B, T]: the
        acceptance map.
        """
        return torch.where(self.origin == ACCEPTED, self.step, 0)

    @property
    def rounds(self) -> Tensor:
        """Target forward passes each row needed, int64 [B]."""
        return (self.step == 1).sum(-1)

    @property
    def accepted_length(self) -> Tensor:
        """Tokens emitted ÷ rounds, float32 [B]; 1 for plain autoregression, so this is the step
        compression as well.
        """
        return self.step.shape[1] / self.rounds

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
        means = ("tv", "top1", "top10", "entropy", "collision", *self.figures)
        rows |= {name: columns[name].nanmean(-1) for name in means if name in columns}
        if "bound" in columns:
            rows |= {"tv_bound": columns["bound"].sum(-1), "kl_per_token": columns["kl"].mean(-1)}
        return rows

    def columns(self) -> dict[str, Tensor]:
        """What a replay shows of every token, in the order of decoding, [B, T] each."""
        return {"place": self.step, "origin": self.origin, "logprob": self.logprob}

    def _by_depth(self, values: Tensor) -> Tensor:
        """Sums of values [B, T] over the tokens at each place, [B, L]."""
        depths = torch.arange(1, self.max_depth + 1, device=values.device)
        return (values.unsqueeze(-1) * (self.step.unsqueeze(-1) == depths)).sum(1)


def steps(origin: Tensor) -> Tensor:
    """`Trace.step`, int32 [B, T]: a round begins at the first token, and after every drawn one."""
    begins = torch.nn.functional.pad(origin[:, :-1] != ACCEPTED, (1, 0), value=True)
    columns = torch.arange(origin.shape[1], device=origin.device)
    first = torch.where(begins, columns, 0).cummax(-1).values
    return (1 + columns - first).int()
