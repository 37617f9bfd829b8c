"""The topology of draft trees.

A chain is a tree with one branch; plain autoregression is the empty tree. Nodes are sorted by
depth, and the children of a node are in test order. The topology is shared by all rows (`parents`
[N]) or differs by row (`parents` [B, N], EAGLE-2). In a table with 1 + N entries, entry 0 is the
root and entry 1 + n is node n, as in `tempera.decoding.interfaces.Scores`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from heapq import heappop, heappush
from importlib import resources
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tempera.errors import TemperaError

T = TypeVar("T")


class _Once(Generic[T]):
    """A property of a tree or level that is computed once. It takes no lock, unlike
    `functools.cached_property`, which `torch.compile` cannot trace.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, _: type) -> T:
        value = self.compute(owner)
        object.__setattr__(owner, self.compute.__name__, value)  # found before this from now on
        return value


@dataclass(frozen=True, eq=False)
class Block:
    """The Q tokens of one pass and who sees whom among them, relative to a slot s of each row of
    the cache. Token i sees every slot below s, slot s + j where `visible[i, j]`, and no other.

    Caches keep what they compute of a block, so keep the block too: as long as its tree, or from
    batch to batch.

    Attributes:
        offsets: slots of the tokens, counted from s, int64 [Q].
        ahead: their positions, counted from that of s, int64 [Q], or [B, Q] if rows differ.
        visible: bool [Q, W], or [B, Q, W] if rows differ.
    """

    offsets: Tensor
    ahead: Tensor
    visible: Tensor

    @classmethod
    def in_a_row(cls, visible: Tensor) -> "Block":
        """Tokens at consecutive positions: bool [Q, Q], lower triangular if each sees those before
        it and itself, and full if all see each other.
        """
        indices = torch.arange(len(visible), device=visible.device)
        return cls(indices, indices, visible)

    @property
    def per_row(self) -> bool:
        """Whether rows differ."""
        return self.visible.dim() == 3


@dataclass(frozen=True, eq=False)
class InnerNodes:
    """The P *inner* nodes of one depth, which have children.

    Attributes:
        depth: 1-based depth of these nodes.
        inner_parents: index of every inner node's parent among the inner nodes of the level above
            (0 at depth 1), int64 [P], or [B, P] if the topology is per row.
        ancestors: bool [P, E] or [B, P, E]: which of the E inner nodes of this and all upper levels
            are ancestors of, or are, the inner node.
    """

    depth: int
    inner_parents: Tensor
    ancestors: Tensor

    @property
    def per_row(self) -> bool:
        """Whether every row has its own topology."""
        return self.ancestors.dim() == 3

    @_Once
    def block(self) -> Block:
        """The inner nodes in one pass; the root of their tree lies in slot s."""
        count, width = self.ancestors.shape[-2:]
        device = self.ancestors.device
        offsets = torch.arange(1 + width - count, 1 + width, device=device)
        ahead = torch.full((count,), self.depth, dtype=torch.int64, device=device)
        return Block(offsets, ahead, torch.nn.functional.pad(self.ancestors, (1, 0), value=True))


@dataclass(frozen=True, eq=False)
class TreeLevel(InnerNodes):
    """The nodes of one depth of a static tree, for a drafter: M nodes, P of which are inner (have
    children).

    Attributes:
        slots: node index of every (inner parent of the level above, sibling rank), int64 [P_above,
            K]; -1 in an unused slot.
        picks: position of each node in the flattened `slots`, int64 [M].
        inner: places among the M nodes of those that have children, int64 [P].
        in_order: whether `picks` is 0 … M - 1, and there is no unused slot.
    """

    slots: Tensor
    picks: Tensor
    inner: Tensor
    in_order: bool


def take(x: Tensor, index: Tensor) -> Tensor:
    """Entries of x [B, N, ...] along its second dimension, at int64 [M] for all rows or [B, M] for
    each: [B, M, ...]. Index -1 gives an arbitrary valid entry.
    """
    if index.dim() == 1:
        return x.index_select(1, index.clamp(min=0))
    return x.gather(1, _along(index.clamp(min=0), x))


def take_one(x: Tensor, index: Tensor) -> Tensor:
    """Entries of x [B, N, ...] at one place of each of its rows, int64 [B] -> [B, ...]."""
    return take(x, index.unsqueeze(1)).squeeze(1)


def put(x: Tensor, index: Tensor, values: Tensor) -> None:
    """Write values [B, M, ...] into x [B, N, ...] where `take` with the same index, none of it -1,
    would read them.
    """
    x.scatter_(1, _along(index.expand(len(x), -1), x), values)


def _along(index: Tensor, x: Tensor) -> Tensor:
    """An index [B, M] for `gather` and `scatter` of whole entries of x [B, N, ...]."""
    return index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])


@dataclass(frozen=True, eq=False)
class SiblingTest:
    """The k-th children of all parents that have one. They are tested in parallel.

    Attributes:
        parents: the parents, counted 0..N with the root first, int64 [M]; where the topology is per
            row, as many of each row as may have one, [B, M].
        nodes: their k-th children; -1 where a row's parent has none.
        earlier: their children before these, to be rejected first (for k = 0 the same as `nodes`).
    """

    parents: Tensor
    nodes: Tensor
    earlier: Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """A draft tree of N nodes. Build it with `chain`, `named`, `sequoia`, `from_paths`,
    `from_parents` or `empty`.

    Attributes:
        parents: parent of every node, int64 [N] or [B, N]; -1 is the root.
        max_depth: depth of the deepest node, L (an upper bound where the topology is per row).
        max_children: most children of any node, K (an upper bound where the topology is per row).
    """

    parents: Tensor
    max_depth: int
    max_children: int

    @classmethod
    def empty(cls) -> "Tree":
        """No drafted node: plain autoregression."""
        return _chain(0)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """`length` drafted tokens, each continuing the one before.

        Raises:
            TemperaError: the length is negative.
        """
        if length < 0:
            raise TemperaError(f"a chain cannot have {length} tokens; give a depth of 0 or more")
        return _chain(length)

    @classmethod
    def named(cls, name: str) -> "Tree":
        """A public static tree by name (EAGLE-1, LANTERN++); see `tree_names`.

        Raises:
            TemperaError: the name is unknown.
        """
        if name not in _named_paths():
            raise TemperaError(
                f"there is no draft tree '{name}': choose one of {', '.join(tree_names())}",
                option="tree",
            )
        return _named(name)

    @classmethod
    def sequoia(cls, nodes: int, depth: int, rates: Sequence[float]) -> "Tree":
        """The static tree that accepts most (Chen et al. 2024, Sequoia, arXiv 2402.12374, §3.1): if
        the k-th child of any node is accepted with probability `rates[k]`, a node is accepted with
        the product along its path. Rates fall with k, so the N largest products form a tree, which
        is the one of Sequoia's dynamic program.

        Args:
            nodes: N.
            depth: most tokens of a path.
            rates: of the children of a node in test order, each in (0, 1], the largest first.

        Raises:
            TemperaError: a rate is impossible or larger than the one before, or there are not so
                many nodes.
        """
        if list(rates) != sorted(rates, reverse=True) or not all(0 < rate <= 1 for rate in rates):
            raise TemperaError(
                f"rates={list(rates)} are not valid acceptance rates: give numbers in (0, 1], the "
                "largest first",
                option="tree.rates",
            )
        found: list[tuple[int, ...]] = []
        reached: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while reached and len(found) <= nodes:
            score, path = heappop(reached)
            found.append(path)
            for rank, rate in enumerate(rates if len(path) < depth else ()):
                heappush(reached, (score * rate, (*path, rank)))
        if len(found) <= nodes:
            raise TemperaError(
                f"a tree of depth {depth} with {len(rates)} children per node has "
                f"{len(found) - 1} nodes, not {nodes}: give fewer nodes, or a larger depth",
                option="nodes",
            )
        return cls.from_paths(found[1:])

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "Tree":
        """A static tree from each node's path of child ranks from the root, in any order.

        Raises:
            TemperaError: a parent or an earlier sibling is missing, or a path is given twice.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(ordered)}
        for path in ordered:
            if not path or len(index) != len(ordered):
                raise TemperaError("the paths of a draft tree must be distinct and not empty")
            if len(path) > 1 and path[:-1] not in index:
                raise TemperaError(
                    f"draft tree: node {list(path)} has no parent {list(path[:-1])}; add it"
                )
            if path[-1] != 0 and (*path[:-1], path[-1] - 1) not in index:
                raise TemperaError(
                    f"draft tree: node {list(path)} has no sibling before it; number children 0, "
                    "1, 2, … without gaps"
                )
        return cls.from_parents(
            torch.tensor([index.get(path[:-1], -1) for path in ordered], dtype=torch.int64)
        )

    @classmethod
    def from_parents(cls, parents: Tensor) -> "Tree":
        """A tree from parents on the host, int64 [N] or [B, N], sorted by depth. (A drafter whose
        trees differ by round knows their sizes and makes a `Tree` of them, which reads nothing.)

        Raises:
            TemperaError: a parent comes after its child, or the nodes are not sorted by depth.
        """
        return cls(parents, *_measure(parents))

    @property
    def nodes(self) -> int:
        """Number of drafted nodes, N."""
        return self.parents.shape[-1]

    @property
    def per_row(self) -> bool:
        """Whether every row has its own topology."""
        return self.parents.dim() == 2

    @property
    def is_chain(self) -> bool:
        """Whether this is one branch."""
        return self.max_children <= 1

    def to(self, device: torch.device | str) -> "Tree":
        """The same tree on a device. Static trees are kept, so that this costs nothing from the
        second call.
        """
        device = torch.device(device)
        if self.parents.device == device:
            for name in () if self.per_row else TABLES:
                getattr(self, name)
            return self
        return _moved(self, device)

    @_Once
    def depths(self) -> Tensor:
        """1-based depth of every node, int64 [N] or [B, N]."""
        return self.ancestors.sum(-1)

    @_Once
    def ancestors(self) -> Tensor:
        """Mask, bool [N, N] or [B, N, N]: entry (i, j) says that j is an ancestor of i, or i
        itself.

        Add the prefix to make an attention mask.
        """
        step = self.ids.expand_as(self.parents)
        lineage = self.ids == step.unsqueeze(-1)
        for _ in range(self.max_depth - 1):
            step = self.parents.gather(-1, step.clamp(min=0))  # node 0 is the root's child
            lineage = lineage | (self.ids == step.unsqueeze(-1))
        return lineage

    @_Once
    def block(self) -> Block:
        """The root, in slot s, and all nodes in one pass."""
        pad = torch.nn.functional.pad
        offsets = torch.arange(1 + self.nodes, device=self.parents.device)
        visible = pad(self.ancestors, (1, 0, 1, 0))
        visible[..., 0] = True
        return Block(offsets, pad(self.depths, (1, 0)), visible)

    @_Once
    def ids(self) -> Tensor:
        """0..N-1, int64 [N]."""
        return torch.arange(self.nodes, device=self.parents.device)

    @_Once
    def children(self) -> Tensor:
        """Children of the root and of every node in test order, int64 [1 + N, K] or [B, 1 + N, K],
        padded with -1.
        """
        width = self.max_children
        lead = self.parents.shape[:-1]
        ranks = self.earlier_siblings.sum(-1)
        table = torch.full((*lead, (1 + self.nodes) * width), -1, device=self.parents.device)
        table.scatter_(-1, (1 + self.parents) * width + ranks, self.ids.expand_as(self.parents))
        return table.view(*lead, 1 + self.nodes, width)

    @_Once
    def path_score(self) -> Tensor:
        """Scores that decide whether the walk reaches a node, float32 [N, N] or [B, N, N].

        Entry (i, j) is 1 if j is node i or an ancestor of it, and below -N if j is an earlier
        sibling of one of those, to which the walk would go if j passed. The walk reaches i if and
        only if the scores of all nodes that pass sum to the depth of i.
        """
        above = (self.ancestors.float() @ self.earlier_siblings.float()) > 0
        return self.ancestors.float() - (1 + self.nodes) * above.float()

    def walk(self, passed: Tensor) -> Tensor:
        """Where a walk from the root ends that always takes the first child that passes its test,
        counted 0..N with the root first: bool [B, N] -> int64 [B].
        """
        # a sum, not a product of matrices, which would be a kernel of its own in compiled rounds
        scores = torch.where(passed.unsqueeze(-2), self.path_score, 0.0).sum(-1)
        reached = scores == self.depths  # scores are whole numbers: exact in float32
        # nodes are sorted by depth: the last one that is reached is the deepest
        indices = torch.where(reached, 1 + self.ids, 0)
        return torch.nn.functional.pad(indices, (1, 0)).amax(-1)

    def depth_at(self, stop: Tensor) -> Tensor:
        """Depths of a place in each row, counted 0..N with the root first: int64 [B] -> [B]."""
        return self.at_stop(torch.nn.functional.pad(self.depths, (1, 0)), stop)

    def route_to(self, stop: Tensor) -> Tensor:
        """The way from the root to a place in each row, int64 [B] -> [B, 2 + L]: the root, and the
        nodes down to that place, counted 0..N with the root first; 0 after it.
        """
        on_route = self.at_stop(torch.nn.functional.pad(self.ancestors, (0, 0, 1, 0)), stop)
        depths = torch.arange(2 + self.max_depth, device=stop.device).unsqueeze(-1)
        is_there = on_route.unsqueeze(1) & (self.depths.unsqueeze(-2) == depths)
        # a compiled `scatter_` of integers would be two kernels of its own
        indices = torch.where(is_there, 1 + self.ids, 0)
        return torch.nn.functional.pad(indices, (1, 0)).amax(-1)

    def at_stop(self, table: Tensor, stop: Tensor) -> Tensor:
        """Entries of a table, [1 + N, ...] or [B, 1 + N, ...], for a place in each row, counted
        0..N with the root first: int64 [B] -> [B, ...].
        """
        return take_one(table, stop) if self.per_row else table.index_select(0, stop)

    @_Once
    def earlier_siblings(self) -> Tensor:
        """Mask, bool [N, N] or [B, N, N]: entry (i, j) says that j is an earlier sibling of i."""
        return (self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)).tril(-1)

    @_Once
    def post_order(self) -> Tensor:
        """When each node's turn comes if a node follows all its descendants and those of its
        earlier siblings, counted 0..N-1, int64 [N] or [B, N].
        """
        below = self.ancestors.float().mT  # a node and its descendants
        earlier = (self.ancestors.float() @ self.earlier_siblings.float()) @ below
        return (below + earlier).sum(-1).long() - 1

    @_Once
    def last_children(self) -> Tensor:
        """The child tested last at the root and at every node, int64 [1 + N] or [B, 1 + N]; -1 at a
        leaf.
        """
        return torch.nn.functional.pad(self.children, (1, 0), value=-1).amax(-1)

    @_Once
    def sibling_tests(self) -> tuple[SiblingTest, ...]:
        """The tests of verification, one per sibling rank; K of them. For a static tree, on the
        host: `to` moves them.
        """
        counts = (self.children >= 0).sum(-1)
        by_count = counts.argsort(dim=-1, descending=True, stable=True)
        tests = []
        for rank in range(self.max_children):
            # where the topology is per row: at most N ÷ k nodes have k children
            most = self.nodes // (rank + 1) if self.per_row else int((counts > rank).sum())
            parents = by_count[..., :most]
            nodes = self.children[..., rank].gather(-1, parents)
            earlier = self.children[..., max(0, rank - 1)].gather(-1, parents)
            tests.append(SiblingTest(parents, nodes, earlier))
        return tuple(tests)

    @_Once
    def levels(self) -> tuple[TreeLevel, ...]:
        """The tree by depth, for a drafter that grows it from the root.

        Raises:
            TemperaError: the rows of the batch have trees of their own.
        """
        if self.per_row:
            raise TemperaError(
                "a per-row draft tree has no shared levels; only a static tree can be grown "
                "level by level"
            )
        levels = []
        above = torch.tensor([-1])  # inner nodes, -1 the root
        seen = self.ids[:0]
        for depth in range(1, 1 + self.max_depth):
            slots = self.children[1 + above]
            slots = slots[:, : (slots >= 0).sum(-1).amax()]
            nodes = (self.depths == depth).nonzero().squeeze(1)
            picks = slots.flatten().argsort()[-len(nodes) :]
            inner = (self.last_children[1 + nodes] >= 0).nonzero().squeeze(1)
            inner_parents = torch.searchsorted(above, self.parents[nodes[inner]])
            above = nodes[inner]
            seen = torch.cat([seen, above])
            ancestors = self.ancestors[above][:, seen]
            in_order = picks.tolist() == list(range(slots.numel()))
            levels.append(TreeLevel(depth, inner_parents, ancestors, slots, picks, inner, in_order))
        return tuple(levels)


TABLES = (
    "ids",
    "depths",
    "ancestors",
    "children",
    "path_score",
    "earlier_siblings",
    "post_order",
    "last_children",
    "sibling_tests",
    "levels",
    "block",
)
"""What a static tree computes once."""


def tree_names() -> list[str]:
    """The names of `Tree.named`."""
    return sorted(_named_paths())


@lru_cache(maxsize=8)
def _moved(tree: Tree, device: torch.device) -> Tree:
    """`Tree.to` another device."""
    moved = Tree(tree.parents.to(device), tree.max_depth, tree.max_children)
    if not tree.per_row:  # tables whose sizes depend on the topology are made on the host
        for name in ("sibling_tests", "levels"):
            tables = tuple(_table_on(device, table) for table in getattr(tree, name))
            object.__setattr__(moved, name, tables)
    return moved.to(moved.parents.device)  # `cuda` is `cuda:0` here


def _table_on(device: torch.device, table: Any) -> Any:
    """A table of a static tree with its tensors on a device."""
    tensors = {name: part for name, part in vars(table).items() if isinstance(part, Tensor)}
    return replace(table, **{name: tensor.to(device) for name, tensor in tensors.items()})


@lru_cache(maxsize=64)
def _chain(length: int) -> Tree:
    return Tree(torch.arange(length) - 1, length, min(length, 1))


@cache
def _named(name: str) -> Tree:
    return Tree.from_paths(_named_paths()[name])


@cache
def _named_paths() -> dict[str, list[list[int]]]:
    text = resources.files("tempera.decoding").joinpath("trees.json").read_text(encoding="utf-8")
    return {name: paths for name, paths in json.loads(text).items() if not name.startswith("_")}


def _measure(parents: Tensor) -> tuple[int, int]:
    """Depth and branching of a tree on the host, and a check that its nodes are sorted by depth."""
    deepest, widest = 0, 0
    for row in [parents.tolist()] if parents.dim() == 1 else parents.tolist():
        depths: list[int] = []
        for node, parent in enumerate(row):
            if not -1 <= parent < node:
                raise TemperaError(
                    f"draft tree: node {node} has parent {parent}; a parent must be -1 (the "
                    "root) or an earlier node"
                )
            depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths != sorted(depths):
            raise TemperaError("draft tree: the nodes must be sorted by depth")
        deepest = max([deepest, *depths])
        widest = max([widest, *(row.count(parent) for parent in set(row))])
    return deepest, widest
