"""The window of guesses that Jacobi decoding refines: its nodes, and how new positions start.

A window has one guess for each of the S positions after the last emitted token (the *spine*, a
chain). Proactive drafting adds candidates for the first positions; the window is then a tree whose
first path is the spine. `jacobi` shows the numbers of one window.
"""

import copy
import math
from typing import Literal, Self

import torch
from torch import Tensor

from tempera.decoding.trees import Tree
from tempera.errors import TemperaError

Initialisation = Literal[
    "random", "horizontal_repeat", "vertical_repeat", "horizontal_sample", "vertical_sample"
]
Shape = Literal["ranked", "full"]


class Window:
    """A chain of guesses, or the tree and chain of SJD-PAC's proactive drafting: a tree of D levels
    with K candidates each, whose first path continues as a chain. The tree and the chain together
    have N nodes, so that a larger tree shortens the chain. There are two shapes of trees:

    - "full": all K^d paths to each level d, as in the public code. The code and the paper count the
      root among the nodes and the levels, so that the paper's K = 4, D = 3 and W = 64 are here
      K = 4, D = 2 and N = 63: 4 + 16 nodes, and a chain of 43.
    - "ranked": the paths of candidates r_1, r_2, … (ranks from 1) with Π r_i ≤ K. Candidates that
      are tested later, and hence reached less often, have fewer continuations. With K = 4 and D = 3
      these are 25 nodes, and with N = 64 a chain of 39.

    Args:
        nodes: N.
        branches: candidates K of each of the first places; 1 for a chain.
        levels: how many places D have K candidates; 0 for a chain.
        shape: of the tree.

    Attributes:
        tree: the N nodes.
        length: S, places of the spine.
        columns: candidate number of each node, int64 [N]: s for place s of the spine, and
            S + s·(K - 1) + k for the k-th further candidate (from 0) of place s. Nodes of the same
            place and rank under different parents are the same candidate.
        reading: node to read the distribution of each place from after a walk that stopped at a
            given node, int64 [1 + N, S + 1]; 0 is the root, 1 + n is node n. The nodes are those of
            the path to the stop, then its first children, then the spine.
        ahead: places of the spine, int64 [S].
        depths: depths of the root and of every node, int64 [1 + N].

    Raises:
        TemperaError: the window is empty, there are no candidates, or the tree does not fit into
            the window.
    """

    def __init__(
        self, nodes: int, branches: int = 1, levels: int = 0, shape: Shape = "ranked"
    ) -> None:
        if nodes < 1:
            raise TemperaError(f"window={nodes} is empty; give at least 1 token")
        if branches < 1 or levels < 0:
            raise TemperaError(
                f"branches={branches} and levels={levels} do not make a tree; give at least 1 "
                "branch and 0 levels"
            )
        self.branches, self.levels = (branches, levels) if branches > 1 and levels else (1, 0)
        paths = _tree(nodes, self.branches, self.levels, shape)
        self.length = spine(nodes, self.branches, self.levels, shape)
        self.tree = Tree.chain(self.length)
        self.ahead = self.columns = torch.arange(self.length)
        self.reading = torch.arange(self.length + 1).expand(self.length + 1, -1)
        if paths:
            paths += [(0,) * depth for depth in range(levels + 1, self.length + 1)]
            paths.sort(key=lambda path: (len(path), path))  # the order of `Tree.from_paths`
            self.tree = Tree.from_paths(paths)
            self.columns = torch.tensor([_column(path, self.length, branches) for path in paths])
            self.reading = torch.tensor(_reading(paths, self.length))
        self.depths = torch.nn.functional.pad(self.tree.depths, (1, 0))

    def to(self, device: torch.device) -> Self:
        """The same window on a device."""
        moved = copy.copy(self)
        for name in ("tree", "ahead", "columns", "reading", "depths"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


def spine(nodes: int, branches: int, levels: int, shape: Shape) -> int:
    """`Window.length`: the levels of its tree, and the chain that shares the window with it."""
    if branches <= 1 or levels <= 0:
        return nodes
    return levels + nodes - len(_tree(nodes, branches, levels, shape))


def _tree(nodes: int, branches: int, levels: int, shape: Shape) -> list[tuple[int, ...]]:
    """The paths of the tree's nodes, level by level; raises TemperaError for more than `nodes`."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(levels):
        level = [(*path, rank) for path in level for rank in range(branches)]
        if shape == "ranked":
            level = [path for path in level if math.prod(1 + rank for rank in path) <= branches]
        paths += level
        if len(paths) > nodes:
            raise TemperaError(
                f"branches={branches} and levels={levels} make a {shape} tree that is larger than "
                f"window={nodes}; give fewer branches or levels, or a larger window"
            )
    return paths


def _column(path: tuple[int, ...], length: int, branches: int) -> int:
    index = len(path) - 1
    rank = path[-1]
    return index if rank == 0 else length + index * (branches - 1) + rank - 1


def _reading(paths: list[tuple[int, ...]], length: int) -> list[list[int]]:
    index = {(): 0} | {path: 1 + node for node, path in enumerate(paths)}

    def at(stop: tuple[int, ...], depth: int) -> int:
        path = stop[:depth] + (0,) * (depth - len(stop))
        return index.get(path, index[(0,) * depth])

    return [[at(stop, depth) for depth in range(length + 1)] for stop in index]


class WindowInit:
    """Initial tokens of positions that enter the window, and their q.

    A round that emits e tokens has distributions for all places of the next window except the last
    e - 1, which are new. A new position's *neighbour* is the token before it in raster order
    (horizontal; for the start of a line that is the end of the line above) or above it (vertical).
    If that is new as well, it is the neighbour's neighbour. The initialisations:

    - "random": any token; q is uniform over the vocabulary. (SJD's public code uses a one-hot q.
      That is exact too, but accepts with probability p(x), which is 1/V on average; the uniform q
      accepts with Σ min(p, 1/V).)
    - "horizontal_repeat", "vertical_repeat": the neighbour's token; q is one-hot, because the token
      is not random given its neighbour. It is accepted with probability p(x).
    - "horizontal_sample", "vertical_sample": a token drawn from the neighbour's distribution, which
      is its q: the stale distribution of an undecided neighbour, the target's of an emitted one.
      (The public code takes the most probable token with a one-hot q, and has no vertical
      initialisation.)

    A position without a neighbour (in the first window, and for "vertical" in the first line) is
    random.

    Args:
        kind: the initialisation.
        grid: rows and columns of the image.
        length: S.
        refinement: whether unaccepted guesses are redrawn; otherwise every position of the window
            is new in every round.

    Attributes:
        repeats: whether new positions repeat their neighbour's token.
        samples: whether they are drawn from their neighbour's distribution.
        lookback: number of emitted positions before the last round whose distributions are needed.
    """

    def __init__(
        self, kind: Initialisation, grid: tuple[int, int], length: int, refinement: bool = True
    ) -> None:
        self.length = length
        self.refinement = refinement
        self.repeats = kind.endswith("repeat")
        self.samples = kind.endswith("sample")
        self._columns = grid[1] if kind.startswith("vertical") else 1
        reach = length if refinement else 0
        self.lookback = max(0, self._columns - 1 - reach) if kind == "vertical_sample" else 0

    def neighbours(self, indices: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the new positions and their neighbours.

        Args:
            indices: place of every position of the window in the last round, int64 [B, S].
            base: position of place 0 in the last round, int64 [B, 1].

        Returns:
            which positions are new, bool [B, S]; place of each new position's neighbour, int64
            [B, S], at most S; and which new positions have a neighbour, bool [B, S].
        """
        # the last place that no new position has: S, or that of the last emitted token
        last = indices[:, :1] - 1
        if self.refinement:
            last = torch.full_like(last, self.length)
        new = indices > last
        steps = (indices - last + self._columns - 1).div(self._columns, rounding_mode="floor")
        sources = indices - steps * self._columns
        has_neighbour = torch.zeros_like(new)
        if self.repeats or self.samples:
            has_neighbour = base + sources >= 0
        return new, sources, new & has_neighbour
