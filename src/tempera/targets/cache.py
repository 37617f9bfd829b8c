"""The KV cache: each row writes at its own offset and attends to its own length.

Rollback costs nothing: a rejected entry lies beyond the row's length, where the mask hides it, and
a later round overwrites it. The accepted path of a chain is already contiguous; that of a tree is
compacted by a gather and a scatter. Buffers are written in place, shapes do not depend on data, and
nothing is copied to the host, so a pass can be compiled.

Shapes: B prompts, R rows (2B under guidance), S capacity, Q tokens of a pass, K loaded keys, D head
size.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from tempera.decoding.trees import Block


def head_size(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """The head size of a cache: on CUDA the fast attention kernels for half precision need a
    multiple of 8 (LlamaGen-3B has 100).
    """
    padded = device.type == "cuda" and dtype.itemsize == 2
    return -(-size // 8) * 8 if padded else size


class Keys(Protocol):
    """Where decoder layers leave keys and values, and find those of earlier tokens.

    Attributes:
        reached: see `attention.attend`.
    """

    reached: Tensor | None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Add one layer's new keys and values, [R, heads, Q, D]; returns all of them, [R, heads, K,
        D] each.
        """


class KVCache:
    """A cache whose rows have different lengths. Decoder layers call `update`, ours and those of
    transformers.

    `begin` starts a batch. Call `write` before each pass: it sets where each row's new entries go
    and how many keys the pass loads; the mask (`Layout`) decides which of them a query attends to.

    Args:
        layers: number of decoder layers.
        heads: key/value heads.
        head_dim: D, at least that of the layers; further numbers are 0.

    Attributes:
        entries: of each layer, [2·R·heads·S, D], ordered by key or value, row, head and slot.
            Attention reads the tokens of a head one after the other.
        layouts: what `forward.ModelRunner.layout_of` has computed for this capacity.
        padding: additive mask [R, 1, 1, S] of the batch's padded prefix tokens, if there are any.
        write_index: the entries that the next pass writes, int64 [2·R·heads·Q].
        kv_length: K, the number of keys that the pass loads.
        reached: how many of them each row of the pass has reached, int64 [R]; None: all are loaded.
        room: slots from a row's root on that the passes of a round may read.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.heads = heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.entries: list[Tensor] = []
        self.layouts: dict[Block, Layout] = {}
        self.padding: Tensor | None = None
        self.rows = self.capacity = self.kv_length = self.room = 0
        self.write_index = torch.zeros(0, dtype=torch.int64, device=device)
        self.reached: Tensor | None = None
        self._some: Tensor | None = None  # the rows of the pass, if not all

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, heads, capacity and head size."""
        return self._shape[1:]

    def begin(self, rows: int, capacity: int) -> None:
        """Start a batch without entries. The buffers are kept if they have as many rows and room
        enough, so that plain decoding and a method can take turns; otherwise they are freed first.
        """
        if rows == self.rows and capacity <= self.capacity:
            for entries in self.entries:
                entries.zero_()  # a mask hides old entries, but not NaN among them
            return
        self.rows = 0  # until there are new buffers, for which memory may not suffice
        self.entries.clear()
        self.layouts.clear()
        count = 2 * rows * self.heads
        self._shape = 2, rows, self.heads, capacity, self.head_dim
        starts = torch.arange(0, count * capacity, capacity, device=self.device)
        self._starts = starts.view(2, rows, self.heads, 1)
        for _ in range(self.layers):
            shape = count * capacity, self.head_dim
            entries = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self.entries.append(entries)
        self.rows = rows
        self.capacity = capacity

    def nbytes(self, keys: int | None = None) -> int:
        """Bytes of the first `keys` keys and values of all rows and layers; by default of all."""
        per_key = sum(entries.nbytes for entries in self.entries) // self.capacity
        return per_key * (self.capacity if keys is None else keys)

    def write(
        self,
        slots: Tensor,
        kv_length: int,
        rows: Tensor | None = None,
        reached: Tensor | None = None,
    ) -> None:
        """Set where the next pass writes and what it loads.

        Args:
            slots: slot of each new token, int64 [R, Q], below the capacity.
            kv_length: K; the pass loads slots 0 … K − 1. A Python integer, so nothing is read from
                the device.
            rows: which rows the pass has, int64 [R']; by default all, R.
            reached: number of slots of each of them that its tokens may attend to, int64 [R']; by
                default K.
        """
        self.reached = reached
        self.write_index = self._index(slots, rows)
        self.kv_length = kv_length
        self._some = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [R, heads, Q, D], into the slots set by `write`.

        Returns:
            the layer's first K keys and values, [R, heads, K, D] each.
        """
        entries = self.entries[layer_idx]
        new = torch.cat([key_states, value_states])
        padding = self.shape[-1] - new.shape[-1]
        if padding:
            new = torch.nn.functional.pad(new, (0, padding))
        entries.index_copy_(0, self.write_index, new.flatten(0, 2))
        loaded = entries.view(self._shape).narrow(3, 0, self.kv_length)
        if self._some is not None:
            loaded = loaded.index_select(1, self._some)
        keys, values = loaded.unbind()
        return keys, values

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries in slots `source`, int64 [R, J], to slots `target`, int64 [R, J], in all
        layers. All sources are read before any target is written.
        """
        source, target = self._index(source), self._index(target)
        for entries in self.entries:
            entries.index_copy_(0, target, entries.index_select(0, source))

    def _index(self, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """Where a layer's entries of slots [R, J] lie."""
        starts = self._starts if rows is None else self._starts[:, rows]
        return (slots.unsqueeze(1) + starts).flatten()


class Layout:
    """The masks of a block's Q tokens (`trees.Block`) in a cache, wherever in a row they lie.

    The mask of query i is the part of the strip `0 … 0 | visible[i] | −∞ … −∞` that begins S − s
    from its start.

    Args:
        block: the tokens.
        cache: the cache that they are for.
        copies: rows per prompt.
    """

    def __init__(self, block: Block, cache: KVCache, copies: int) -> None:
        self.offsets = block.offsets
        self.ahead = block.ahead
        self.capacity = cache.capacity
        visible = block.visible.repeat(copies, 1, 1) if block.per_row else block.visible
        width = visible.shape[-1]
        shape = *visible.shape[:-1], 2 * self.capacity + width
        self._strip = torch.zeros(shape, dtype=cache.dtype, device=visible.device)
        self._strip[..., self.capacity :].fill_(torch.finfo(cache.dtype).min)
        self._strip[..., self.capacity : self.capacity + width].masked_fill_(visible, 0.0)
        self._columns = torch.arange(self.capacity, device=visible.device)

    @property
    def width(self) -> int:
        """Slots from s on that some token may attend to. No number, which a graph would check."""
        return self._strip.shape[-1] - 2 * len(self._columns)

    def mask(self, start: Tensor, kv_length: int) -> Tensor:
        """The additive masks of rows with s = `start`, int64 [R], over the first `kv_length` slots:
        [R, 1, Q, kv_length].
        """
        columns = (self.capacity - start)[:, None] + self._columns[:kv_length]
        strip = self._strip.expand(len(start), -1, -1)
        index = columns.unsqueeze(1).expand(-1, strip.shape[1], -1)
        return strip.gather(2, index).unsqueeze(1)
