"""What every round drafted and what became of it, kept so that a decode can be shown again round by
round.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Verdict
from tempera.decoding.loop import Images, Output

UNTESTED, REJECTED, KEPT = 0, 1, 2
"""What became of a drafted token: the walk never came to it, it was tested in vain, or accepted."""
LARGEST = 2**18
"""Most drafted tokens that a replay holds, of one image."""
REPLAYS = "replays"
"""Where a run directory keeps them."""
COLUMNS = ("rows", "columns", "place", "origin", "nodes")
"""What nothing can be shown without, of a replay's columns."""


@dataclass(frozen=True)
class _DraftedRound:
    """A round of B rows: drafted tokens [B, N], parents and depths [N] or [B, N], the accepted path
    [B, L], and how many tokens each row kept [B].
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    path: Tensor
    emitted: Tensor

    @cached_property
    def fates(self) -> Tensor:
        """`UNTESTED`, `REJECTED` or `KEPT` for every node, int64 [B, N].

        Siblings are tested in the order of their numbers, and no more after one is kept.
        """
        depths = self.depths.expand_as(self.tokens)
        parents = self.parents.expand_as(self.tokens)
        chosen = self.path.gather(1, depths - 1)
        nodes = torch.arange(self.tokens.shape[1]).expand_as(chosen)
        kept = chosen == nodes
        reached = (parents < 0) | kept.gather(1, parents.clamp(min=0))
        rejected = reached & ((chosen < 0) | (nodes < chosen))
        return torch.where(kept, KEPT, torch.where(rejected, REJECTED, UNTESTED))

    def on_host(self) -> "_DraftedRound":
        columns = (self.tokens, self.parents, self.depths, self.path, self.emitted)
        return _DraftedRound(*(column.cpu() for column in columns))


@dataclass
class DraftLog:
    """Every round of a batch, on the device until it is read."""

    _rounds: list[_DraftedRound] = field(default_factory=list)

    def add(self, images: Images, draft: Draft, verdict: Verdict) -> None:
        """Add a round: an `observe` of `decode`. Copies, since buffers may be used again."""
        self._rounds.append(
            _DraftedRound(
                draft.tokens.clone(),
                draft.tree.parents.clone(),
                draft.tree.depths.clone(),
                verdict.path.clone(),
                images.emitted.clone(),
            )
        )

    def columns(self, row: int) -> dict[str, list[int]]:
        """One image's drafts, round after round.

        Returns:
            `nodes`, how many were drafted in each round; and of every drafted token `drafted`, its
            id, `parent`, its parent in its round's tree (-1: the root), and `fate`. The last
            three are empty where there are more than `LARGEST`.
        """
        self._rounds = [one.on_host() for one in self._rounds] if self._away() else self._rounds
        rounds = [one for one in self._rounds if int(one.emitted[row]) > 0]
        columns: dict[str, list[int]] = {"nodes": [one.tokens.shape[1] for one in rounds]}
        few = sum(columns["nodes"]) <= LARGEST
        for name in ("drafted", "parent", "fate"):
            columns[name] = []
        for one in rounds if few else []:
            columns["drafted"] += one.tokens[row].tolist()
            columns["parent"] += one.parents.expand_as(one.tokens)[row].tolist()
            columns["fate"] += one.fates[row].tolist()
        return columns

    def _away(self) -> bool:
        return any(one.tokens.device.type != "cpu" for one in self._rounds)


def replays(
    ids: Sequence[str],
    output: Output,
    log: DraftLog,
    grid: tuple[int, int],
    wanted: Collection[str],
) -> list[dict[str, Any]]:
    """All that a replay needs besides the picture, a row for each wanted image of a decoded batch.

    Args:
        ids: the prompts' ids, in the batch's order.
        output: of the batch.
        log: of the same batch; empty for continuous tokens, which have no ids.
        grid: rows and columns of the token grid.
        wanted: ids of the images to make rows of.

    Returns:
        `id`, `rows` and `columns` of the grid, `tokens` where they have ids, the columns of
        `Trace.columns` as lists over the tokens in the order of decoding, and those of
        `DraftLog.columns`.
    """
    columns = {name: values.cpu().tolist() for name, values in output.trace.columns().items()}
    if not output.tokens.is_floating_point():
        columns["tokens"] = output.tokens.cpu().tolist()
    return [
        {
            "id": name,
            "rows": grid[0],
            "columns": grid[1],
            **{key: values[row] for key, values in columns.items()},
            **log.columns(row),
        }
        for row, name in enumerate(ids)
        if name in wanted
    ]
