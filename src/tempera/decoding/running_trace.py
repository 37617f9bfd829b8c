"""The columns of a trace while a batch is decoded.

Rounds record what cannot be derived afterwards. All tensors stay on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tempera.decoding.diagnostics import certainty, diagnose, proximity
from tempera.decoding.interfaces import Draft, JointRule, Rule, Scores, Verdict
from tempera.decoding.trace import ACCEPTED, BONUS, RESAMPLED, Trace
from tempera.decoding.trees import Tree, take

DIAGNOSTICS = 7
"""Columns of `Trace` that are there with diagnostics alone."""


@dataclass
class RunningTrace:
    """The columns of images of T tokens, [B, T + 1 + L] each; the last 1 + L entries are for tokens
    past the image.

    Attributes:
        max_depth: L, depth of the draft.
        origin: see `Trace`, int8.
        prob: probability of the token under the target's sampled distribution, float32.
        diagnostics: `Trace`'s columns from `tv` on, float32, or none.
    """

    max_depth: int
    origin: Tensor
    prob: Tensor
    diagnostics: tuple[Tensor, ...]

    @classmethod
    def blank(
        cls, batch: int, length: int, max_depth: int, device: torch.device, diagnostics: bool
    ) -> "RunningTrace":
        """Empty columns."""

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, length + 1 + max_depth, dtype=dtype, device=device)

        more = [column(torch.float32) for _ in range(DIAGNOSTICS if diagnostics else 0)]
        return cls(max_depth, column(torch.int8), column(torch.float32), tuple(more))

    def record(
        self, draft: Draft, verdict: Verdict, scores: Scores, rule: Rule | JointRule, slots: Tensor
    ) -> None:
        """Add a round.

        Args:
            slots: where the verdict's tokens belong, for `put_flat`, int64 [B·(L + 1)]. Later
                rounds overwrite what follows the emitted tokens.
        """
        count = verdict.tokens.shape[1]
        put_flat(self.origin, slots, _origins(draft.tree, verdict.stop, count))
        flat = verdict.visited * scores.p.shape[-1] + verdict.tokens
        put_flat(self.prob, slots, scores.p.flatten(1).gather(1, flat))
        if self.diagnostics:
            soft = scores.p if scores.soft is None else scores.soft
            values = (
                *diagnose(draft, verdict, scores.p, rule, scores.soft),
                *certainty(take(scores.p, verdict.visited)),
                proximity(draft, verdict, soft, rule),
            )
            for column, value in zip(self.diagnostics, values, strict=True):
                put_flat(column, slots, value)

    def tensors(self) -> tuple[Tensor, ...]:
        """All columns."""
        return self.origin, self.prob, *self.diagnostics

    def with_tensors(self, tensors: Sequence[Tensor]) -> "RunningTrace":
        """The same with these in place of `tensors`."""
        origin, prob, *diagnostics = tensors
        return replace(self, origin=origin, prob=prob, diagnostics=tuple(diagnostics))

    def finished(self) -> Trace:
        """The trace of complete images."""
        past = 1 + self.max_depth
        origin, prob, *diagnostics = (column[:, :-past] for column in self.tensors())
        return Trace(self.max_depth, _places(origin), origin, prob.log(), *diagnostics)


def put_flat(column: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [B, M] to places in a column's flat memory, int64 [B·M]. On a CPU this takes
    less time than `scatter_`.
    """
    column.view(-1).index_copy_(0, slots, values.flatten())


def _origins(tree: Tree, stop: Tensor, count: int) -> Tensor:
    """Origins of a round's first `count` tokens, int8 [B, count], for walks that stopped at `stop`,
    int64 [B]. Those after the drawn token are arbitrary.
    """
    if not tree.per_row:  # a tape makes this table once, and only chooses rows
        every = torch.arange(1 + tree.nodes, device=stop.device)
        return _origins_after(tree, every, count).index_select(0, stop)
    return _origins_after(tree, stop, count)


def _origins_after(tree: Tree, stops: Tensor, count: int) -> Tensor:
    """The same, computed for walks that stopped at `stops`, int64 [M] -> [M, count]."""
    accepted = torch.arange(count, device=stops.device) < tree.depth_at(stops).unsqueeze(1)
    drawn = torch.where(tree.at_stop(tree.last_children, stops) < 0, BONUS, RESAMPLED).unsqueeze(1)
    return torch.where(accepted, ACCEPTED, drawn).to(torch.int8)


def _places(origin: Tensor) -> Tensor:
    """`Trace.place`, int16 [B, T]: a round begins at the first token, and after every drawn one."""
    begins = torch.nn.functional.pad(origin[:, :-1] != ACCEPTED, (1, 0), value=True)
    columns = torch.arange(origin.shape[1], device=origin.device)
    first = torch.where(begins, columns, 0).cummax(-1).values
    return (1 + columns - first).to(torch.int16)
