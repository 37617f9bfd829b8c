"""What every round drafted and what became of it, kept so that a decode can be shown again round by
round.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.interfaces import Draft, Round, Verdict
from tempera.decoding.loop import Output

UNTESTED, REJECTED, PASSED = 0, 1, 2
"""What became of a drafted token: the walk never came to it, it was tested in vain, or accepted."""
LARGEST = 2**18
"""Most drafted tokens that a replay holds, of one image."""
REPLAYS = "replays"
"""Where a run directory keeps them."""


class DraftLog:
    """A watcher: every round of some images, on the device until it is read.

    Args:
        wanted: ids of their prompts.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        self.wanted = wanted
        # of each image and each of its rounds: tokens, parents and fates of the nodes, [3, N]
        self._rounds: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def __call__(self, round: Round) -> None:
        """Add a round."""
        sequences = round.sequences
        rows = [row for row in sequences.live if sequences.ids[row] in self.wanted]
        if not rows:
            return
        draft = round.draft
        parents = draft.tree.parents.expand_as(draft.tokens)
        columns = torch.stack([draft.tokens, parents, _fates(draft, round.verdict)])
        for row in rows:
            self._rounds[sequences.ids[row]].append(columns[:, row].clone())

    def columns(self, name: str) -> dict[str, list[int]]:
        """One image's drafts, round after round.

        Args:
            name: id of its prompt.

        Returns:
            `nodes`, how many were drafted in each round; and of every drafted token `drafted`, its
            id, `parent`, its parent in its round's tree (-1: the root), and `fate`. The last
            three are empty where there are more than `LARGEST`.
        """
        rounds = self._rounds.get(name, [])
        nodes = [columns.shape[1] for columns in rounds]
        shown = torch.cat(rounds, 1).cpu() if 0 < sum(nodes) <= LARGEST else torch.empty(3, 0)
        named = zip(("drafted", "parent", "fate"), shown.tolist(), strict=True)
        return {"nodes": nodes, **dict(named)}


def _fates(draft: Draft, verdict: Verdict) -> Tensor:
    """`UNTESTED`, `REJECTED` or `PASSED` for every node, int64 [B, N].

    Siblings are tested in the order of their numbers, and no more after one is kept.
    """
    tree = draft.tree
    shape = draft.tokens.shape
    parents = tree.parents.expand(shape)
    nodes = tree.ids.expand(shape)
    chosen = verdict.path.gather(1, tree.depths.expand(shape) - 1)
    accepted = chosen == nodes
    reached = (parents < 0) | accepted.gather(1, parents.clamp(min=0))
    rejected = reached & ((chosen < 0) | (nodes < chosen))
    return torch.where(accepted, PASSED, torch.where(rejected, REJECTED, UNTESTED))


def replays(
    ids: list[str], output: Output, log: DraftLog, grid: tuple[int, int]
) -> list[dict[str, Any]]:
    """All that a replay needs besides the picture, a row for each image that the log wants.

    Args:
        ids: the images' prompts.
        output: the images.
        log: of their rounds; empty for continuous tokens, which have no ids.
        grid: rows and columns of the token grid.

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
            **log.columns(name),
        }
        for row, name in enumerate(ids)
        if name in log.wanted
    ]
