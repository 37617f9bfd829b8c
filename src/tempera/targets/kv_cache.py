"""Keys and values of every layer in one preallocated tensor; each row writes at its own offset and
sees its own length.

A rejected entry needs no erasing: the row's length masks it out and a later round overwrites it. A
chain's accepted path is already contiguous; a tree's is compacted by one gather and scatter over
all layers. Shapes are static: nothing depends on data, nothing is read back to the host, so that a
round can be compiled or captured as a CUDA graph.

Shapes: R rows (2B under guidance), S capacity, T tokens of a forward pass, K visible keys
(`reach`), D head size.
"""

from typing import Any

import torch
from torch import Tensor

from tempera.runtime.huggingface import Cache, CacheLayerMixin


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a `RowCache`, which a decoder layer also takes in place of the whole one.

    A compiled decoder layer serves all layers of a network, so nothing here may tell it which one
    it is: its index is not read then.
    """

    is_compileable = True

    def __init__(self, cache: "RowCache", index: int, storage: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.index, self.is_initialized = cache, index, True
        self._keys, self._values = storage[0].flatten(0, 1), storage[1].flatten(0, 1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.write(
            key_states.transpose(1, 2).flatten(0, 1), value_states.transpose(1, 2).flatten(0, 1)
        )

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._keys.index_copy_(0, self.cache.where, keys)
        self._values.index_copy_(0, self.cache.where, values)
        # of two inputs that are views of each other, one of them written to, a graph makes copies
        if torch.compiler.is_compiling():
            return self._first(self._keys), self._first(self._values)
        return self.cache.seen[self.index]

    def _first(self, entries: Tensor) -> Tensor:
        """As many of every row's as may be seen, [R·S, heads, D] -> [R, heads, K, D]."""
        return entries.view(self.cache.rows, -1, *entries.shape[1:])[
            :, : self.cache.reach
        ].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.reach, 0

    def get_seq_length(self) -> int:
        """Rows have lengths of their own and pass `position_ids`; this answers only those who ask
        whether a cache is empty.
        """
        return 0

    def get_max_length(self) -> int:
        return self.cache.capacity

    def reset(self) -> None:
        self.cache.storage.zero_()


class RowCache(Cache):
    """A `transformers` cache whose rows run at their own pace.

    Before each forward pass call `place`: it says where every row's new entries go and how many
    keys the pass may see. What a query really sees is the business of the attention mask
    (`RoundMask`).

    Args:
        layers: number of decoder layers.
        rows: R.
        heads: key/value heads.
        head_dim: D.
        capacity: S, entries a row can hold.

    Attributes:
        storage: [layers, 2, R, S, heads, D], keys then values; a token's heads lie together, so
            that writing is one contiguous copy and `[R, heads, K, D]` is a view that scaled
            dot-product attention takes without copying.
        where: entries that the coming forward pass writes, counted over all rows, int64 [R·T].
        seen: each layer's keys and values that it may see, two of [R, heads, K, D], as views.
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
            layers, 2, rows, capacity, heads, head_dim, dtype=dtype, device=device
        )
        super().__init__(
            layers=[_RowLayer(self, index, storage) for index, storage in enumerate(self.storage)]
        )
        self.rows, self.capacity, self.reach = rows, capacity, capacity
        self._stacked = self.storage.view(2 * layers, rows * capacity, heads * head_dim)
        self._offsets = torch.arange(rows, device=device)[:, None] * capacity
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.seen = self._view(capacity)
        self.where = torch.zeros(0, dtype=torch.int64, device=device)

    def place(self, slots: Tensor, reach: int) -> None:
        """Set where the coming forward pass writes.

        Args:
            slots: entry of each new token, int64 [R, T], below the capacity.
            reach: K, the keys it may see: all slots below K. A plain number, not read from the
                device.
        """
        self.where = (slots + self._offsets).flatten()
        self.reach = reach
        self.seen = self._view(reach)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [R, heads, T, D] of one layer at the slots; return the visible keys and values [R,
        heads, K, D], as views.
        """
        return self._layer(layer_idx).update(key_states, value_states)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `update`, from keys and values token by token, [R·T, heads, D]."""
        return self._layer(layer).write(keys, values)

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Move entries `source` [R, J] to slots `target` [R, J], in all layers at once; sources are
        read before any is overwritten.
        """
        moved = self._stacked.index_select(1, (source + self._offsets).flatten())
        self._stacked.index_copy_(1, (target + self._offsets).flatten(), moved)

    def _layer(self, index: int) -> _RowLayer:
        layer: Any = self.layers[index]
        return layer  # type: ignore[no-any-return]

    def _view(self, reach: int) -> list[tuple[Tensor, Tensor]]:
        if reach not in self._views:
            self._views[reach] = [
                (layer[0, :, :reach].transpose(1, 2), layer[1, :, :reach].transpose(1, 2))
                for layer in self.storage
            ]
        return self._views[reach]


class RoundMask:
    """Additive attention masks of a round, as windows on one strip.

    Query i of a row whose root stands in slot s sees every slot below s, of the slots s, s + 1, …
    those that `visible[i]` names, and none beyond. That is the strip `0 … 0 | visible[i] | −∞ … −∞`
    read from a place that depends on s alone: one gather makes the mask.

    Args:
        visible: which of the round's W slots each of its Q queries sees, bool [Q, W] for all rows
            or [R, Q, W] for each.
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
        """The mask of rows whose roots stand in slots `root`, int64 [R], over the first `reach`
        slots: [R, 1, Q, reach].
        """
        windows, start = self._window(reach), self.capacity - root
        mask = windows.index_select(0, start) if self._rows is None else windows[self._rows, start]
        return mask.unsqueeze(1)

    def _window(self, reach: int) -> Tensor:
        """Every window of `reach` columns on the strip, without a copy: [S + 1, Q, reach], or [R, S
        + 1, Q, reach] per row.
        """
        if reach not in self._windows:
            *rows, queries, _ = self._strip.shape
            size, stride = self._strip.shape[-1], self._strip.stride()
            shape = (*rows, self.capacity + 1, queries, reach)
            self._windows[reach] = self._strip.as_strided(shape, (*stride[:-2], 1, size, 1))
        return self._windows[reach]
