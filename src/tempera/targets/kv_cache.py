"""The KV cache: one preallocated tensor for all layers. Each row writes at its own offset and
attends to its own length.

Rollback costs nothing: a rejected entry lies beyond the row's length, where the mask hides it, and
a later round overwrites it. The accepted path of a chain is already contiguous; that of a tree is
compacted by one gather and scatter over all layers. Shapes do not depend on data and nothing is
copied to the host, so a round can be compiled or captured as a CUDA graph.

Shapes: R rows (2B under guidance), S capacity, T tokens of a forward pass, K visible keys
(`reach`), D head size.
"""

from typing import Any

import torch
from torch import Tensor


class RowLayer:
    """One layer of a `RowCache`. A decoder layer of transformers accepts it as its cache, since it
    calls `update` and nothing else.

    One compiled decoder layer serves all layers of a network, so compiled code must not read
    `index`: it would be compiled again for each layer.
    """

    def __init__(self, cache: "RowCache", index: int, storage: Tensor) -> None:
        self.cache, self.index = cache, index
        self._shape, self._entries = storage.shape, storage.flatten(0, 3)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `RowCache.update`."""
        return self.write(
            key_states.transpose(1, 2).flatten(0, 1), value_states.transpose(1, 2).flatten(0, 1)
        )

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like `update`, with the keys and values token by token, [R·T, heads, D]."""
        new = torch.cat([keys, values], 1)
        self._entries.index_copy_(0, self.cache.where, new.flatten(0, 1))
        # a compiled graph copies inputs that are views of an input it writes to: slice inside it
        if torch.compiler.is_compiling():
            first = self._entries.view(self._shape)[..., : self.cache.reach, :]
            return first[0], first[1]
        return self.cache.seen[self.index]


class RowCache:
    """A cache whose rows have different lengths, for decoder layers of transformers.

    Call `place` before each forward pass. It sets where each row's new entries go and how many keys
    the pass loads; the attention mask (`RoundMask`) decides which of them a query attends to.

    Args:
        layers: number of decoder layers.
        rows: R.
        heads: key/value heads.
        head_dim: D.
        capacity: S, entries a row can hold.

    Attributes:
        layers: a `RowLayer` for each decoder layer.
        storage: [layers, 2, R, heads, S, D], keys then values. The tokens of a head are adjacent:
            attention reads them one after the other, which on a CPU takes down to half of the time
            that heads of a token next to each other take.
        where: the places in a layer that the next forward pass writes to, flat over all dimensions
            but the last one of the storage, ordered by row, token, key or value, and head; int64
            [R·T·2·heads].
        seen: for each layer, views of the keys and values that the pass loads, [R, heads, K, D]
            each.
        reach: K, the number of keys that the pass loads.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.storage = torch.zeros(
            layers, 2, rows, heads, capacity, head_dim, dtype=dtype, device=device
        )
        self.layers = [RowLayer(self, index, storage) for index, storage in enumerate(self.storage)]
        self.rows, self.capacity, self.reach = rows, capacity, capacity
        self._stacked = self.storage.flatten(1, 4)
        count = 2 * rows * heads
        starts = torch.arange(0, count * capacity, capacity, device=device).view(2, rows, heads)
        self._starts = starts.transpose(0, 1).unsqueeze(1).contiguous()
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.seen = self._view(capacity)
        self.where = torch.zeros(0, dtype=torch.int64, device=device)

    def place(self, slots: Tensor, reach: int) -> None:
        """Set where the next forward pass writes and what it loads.

        Args:
            slots: slot of each new token, int64 [R, T], below the capacity.
            reach: K; the pass loads slots 0 … K − 1. A Python integer, so nothing is read from the
                device.
        """
        self.where = self._places(slots)
        self.reach = reach
        self.seen = self._view(reach)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [R, heads, T, D], into the slots set by `place`.

        Returns:
            views of the layer's first K keys and values, [R, heads, K, D] each.
        """
        return self.layer(layer_idx).update(key_states, value_states)

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries in slots `source`, int64 [R, J], to slots `target`, int64 [R, J], in all
        layers at once. All sources are read before any target is written.
        """
        moved = self._stacked.index_select(1, self._places(source))
        self._stacked.index_copy_(1, self._places(target), moved)

    def release(self) -> None:
        """Free the memory at once, whoever still refers to it, such as a recorded round; the cache
        cannot be used any more.
        """
        self.storage.untyped_storage().resize_(0)
        self.layers.clear()
        self._views.clear()
        self.seen = []
        self.storage = self._stacked = self.storage.new_empty(0)

    def layer(self, index: int) -> RowLayer:
        """The keys and values of one decoder layer."""
        return self.layers[index]

    def _places(self, slots: Tensor) -> Tensor:
        """Where a layer's entries of slots [R, J] lie, as `where`."""
        return (slots[:, :, None, None] + self._starts).flatten()

    def _view(self, reach: int) -> list[tuple[Tensor, Tensor]]:
        """For each layer, views of the first `reach` keys and values."""
        if reach not in self._views:
            self._views[reach] = [
                (layer[0, ..., :reach, :], layer[1, ..., :reach, :]) for layer in self.storage
            ]
        return self._views[reach]


class RoundMask:
    """Additive attention masks of a round, as windows on one strip.

    Let s be the slot of a row's root. Query i attends to every slot below s, to slot s + j where
    `visible[i, j]`, and to no other. Its mask is a window on the strip
    `0 … 0 | visible[i] | −∞ … −∞` whose start depends on s alone, so one gather builds the masks of
    all rows.

    Args:
        visible: which of the round's W slots each of its Q queries attends to, bool [Q, W] for all
            rows alike or [R, Q, W] for each row.
        capacity: S of the cache.
    """

    def __init__(self, visible: Tensor, capacity: int, dtype: torch.dtype) -> None:
        self.per_row = visible.dim() == 3
        self.capacity = capacity
        width = visible.shape[-1]
        strip = torch.zeros(
            *visible.shape[:-1], 2 * capacity + width, dtype=dtype, device=visible.device
        )
        strip[..., capacity:].fill_(torch.finfo(dtype).min)
        strip[..., capacity : capacity + width].masked_fill_(visible, 0.0)
        self._strip = strip
        self._rows = torch.arange(len(visible), device=visible.device) if self.per_row else None
        self._windows: dict[int, Tensor] = {}

    def at(self, root: Tensor, reach: int) -> Tensor:
        """The masks of rows with roots in slots `root`, int64 [R], over the first `reach` slots:
        [R, 1, Q, reach].
        """
        windows, start = self._window(reach), self.capacity - root
        mask = windows.index_select(0, start) if self._rows is None else windows[self._rows, start]
        return mask.unsqueeze(1)

    def _window(self, reach: int) -> Tensor:
        """All windows of `reach` columns on the strip, as a view: [S + 1, Q, reach], or per row
        [R, S + 1, Q, reach].
        """
        if reach not in self._windows:
            *rows, queries, _ = self._strip.shape
            size, stride = self._strip.shape[-1], self._strip.stride()
            shape = (*rows, self.capacity + 1, queries, reach)
            self._windows[reach] = self._strip.as_strided(shape, (*stride[:-2], 1, size, 1))
        return self._windows[reach]
