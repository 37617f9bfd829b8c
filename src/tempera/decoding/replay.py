"""What every round drafted and what became of it, kept so that a decode can be shown again round by
round.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Round, Verdict
from tempera.decoding.loop import Output

UNTESTED, REJECTED, KEPT = 0, 1, 2
"""What became of a drafted token: the walk never came to it, it was tested in vain, or accepted."""
LARGEST = 2**18
"""Most drafted tokens that a replay holds, of one image."""
REPLAYS = "replays"
"""Where a run directory keeps them."""


class DraftLog:
    """A watcher: every round of the last batch, on the device until it is read."""

    def __init__(self) -> None:
        # of each round: tokens, parents and fates of its nodes, [3, B, N], and which rows it is of
        self._rounds: list[tuple[Tensor, Tensor]] = []

    def __call__(self, round: Round) -> None:
        """Add a round."""
        if round.images.rounds == 1:
            self._rounds = []
        draft = round.draft
        parents = draft.tree.parents.expand_as(draft.tokens)
        columns = torch.stack([draft.tokens, parents, _fates(draft, round.verdict)])
        self._rounds.append((columns, round.images.emitted > 0))

    def columns(self, row: int) -> dict[str, list[int]]:
        """One image's drafts, round after round.

        Returns:
            `nodes`, how many were drafted in each round; and of every drafted token `drafted`, its
            id, `parent`, its parent in its round's tree (-1: the root), and `fate`. The last
            three are empty where there are more than `LARGEST`.
        """
        self._rounds = [(columns.cpu(), there.cpu()) for columns, there in self._rounds]
        rounds = [columns[:, row] for columns, there in self._rounds if there[row]]
        nodes = [columns.shape[1] for columns in rounds]
        shown = torch.cat(rounds, 1) if 0 < sum(nodes) <= LARGEST else torch.empty(3, 0)
        named = zip(("drafted", "parent", "fate"), shown.tolist(), strict=True)
        return {"nodes": nodes, **dict(named)}


def _fates(draft: Draft, verdict: Verdict) -> Tensor:
    """`UNTESTED`, `REJECTED` or `KEPT` for every node, int64 [B, N].

    Siblings are tested in the order of their numbers, and no more after one is kept.
    """
    tree = draft.tree
    shape = draft.tokens.shape
    parents = tree.parents.expand(shape)
    nodes = tree.ids.expand(shape)
    chosen = verdict.path.gather(1, tree.depths.expand(shape) - 1)
    kept = chosen == nodes
    reached = (parents < 0) | kept.gather(1, parents.clamp(min=0))
    rejected = reached & ((chosen < 0) | (nodes < chosen))
    return torch.where(kept, KEPT, torch.where(rejected, REJECTED, UNTESTED))


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
