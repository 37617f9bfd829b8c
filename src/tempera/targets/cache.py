"""The KV cache: each row writes at its own offset and attends to its own length.

Rollback costs nothing: a rejected entry lies beyond the row's length, where the mask hides it, and
a later round overwrites it. The accepted path of a chain is already contiguous; that of a tree is
compacted by a gather and a scatter. Buffers are made once and written in place, shapes do not
depend on data, and nothing is copied to the host, so a pass can be compiled.

Shapes: R rows (2B under guidance), S capacity, T tokens of a pass, K loaded keys, D head size.
"""

from typing import Any

import torch
from torch import Tensor


def head_size(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """The head size of a cache: on CUDA the fast attention kernels for half precision need a
    multiple of 8 (LlamaGen-3B has 100).
    """
    padded = device.type == "cuda" and dtype.itemsize == 2
    return -(-size // 8) * 8 if padded else size


class KVCache:
    """A cache whose rows have different lengths, for decoder layers of transformers, which call
    `update`.

    Call `place` before each pass. It sets where each row's new entries go and how many keys the
    pass loads; the mask (`SlotMask`) decides which of them a query attends to.

    Args:
        layers: number of decoder layers.
        rows: R.
        heads: key/value heads.
        head_dim: D, at least that of the layers; further numbers are 0.
        capacity: S, entries a row can hold.

    Attributes:
        entries: of each layer, [2·R·heads·S, D], ordered by key or value, row, head and slot.
            Attention reads the tokens of a head one after the other.
        write_index: the entries that the next pass writes, int64 [2·R·heads·T].
        kv_length: K, the number of keys that the pass loads.
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
        self.rows, self.capacity, self.kv_length = rows, capacity, capacity
        self.head_dim, self._shape = head_dim, (2, rows, heads, capacity, head_dim)
        count = 2 * rows * heads
        self.entries = [
            torch.zeros(count * capacity, head_dim, dtype=dtype, device=device)
            for _ in range(layers)
        ]
        starts = torch.arange(0, count * capacity, capacity, device=device)
        self._starts = starts.view(2, rows, heads, 1)
        self.write_index = torch.zeros(0, dtype=torch.int64, device=device)

    def nbytes(self, keys: int | None = None) -> int:
        """Bytes of the first `keys` keys and values of all rows and layers; by default of all."""
        per_key = sum(entries.nbytes for entries in self.entries) // self.capacity
        return per_key * (self.capacity if keys is None else keys)

    def reset(self) -> None:
        """Forget all entries. A mask hides old entries from a new batch, but not NaN among them."""
        for entries in self.entries:
            entries.zero_()

    def place(self, slots: Tensor, kv_length: int) -> None:
        """Set where the next pass writes and what it loads.

        Args:
            slots: slot of each new token, int64 [R, T], below the capacity.
            kv_length: K; the pass loads slots 0 … K − 1. A Python integer, so nothing is read from
                the device.
        """
        self.write_index, self.kv_length = self._index(slots), kv_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [R, heads, T, D], into the slots set by `place`.

        Returns:
            views of the layer's first K keys and values, [R, heads, K, D] each.
        """
        entries, new = self.entries[layer_idx], torch.cat([key_states, value_states])
        if self.head_dim > new.shape[-1]:
            new = torch.nn.functional.pad(new, (0, self.head_dim - new.shape[-1]))
        entries.index_copy_(0, self.write_index, new.flatten(0, 2))
        keys, values = entries.view(self._shape)[..., : self.kv_length, :]
        return keys, values

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries in slots `source`, int64 [R, J], to slots `target`, int64 [R, J], in all
        layers. All sources are read before any target is written.
        """
        source, target = self._index(source), self._index(target)
        for entries in self.entries:
            entries.index_copy_(0, target, entries.index_select(0, source))

    def _index(self, slots: Tensor) -> Tensor:
        """Where a layer's entries of slots [R, J] lie."""
        return (slots.unsqueeze(1) + self._starts).flatten()


class SlotMask:
    """Additive attention masks of a pass, cut from one strip.

    Let s be the slot where a row's window begins. Query i attends to every slot below s, to slot
    s + j where `visible[i, j]`, and to no other. Its mask is the part of the strip `0 … 0 |
    visible[i] | −∞ … −∞` that begins S − s from its start.

    Args:
        visible: which of a window's W slots each of its Q queries attends to, bool [Q, W] for all
            rows alike or [R, Q, W] for each row.
        capacity: S of the cache.
    """

    def __init__(self, visible: Tensor, capacity: int, dtype: torch.dtype) -> None:
        self.capacity, width = capacity, visible.shape[-1]
        shape = *visible.shape[:-1], 2 * capacity + width
        self._strip = torch.zeros(shape, dtype=dtype, device=visible.device)
        self._strip[..., capacity:].fill_(torch.finfo(dtype).min)
        self._strip[..., capacity : capacity + width].masked_fill_(visible, 0.0)
        self._columns = torch.arange(capacity, device=visible.device)

    def at(self, start: Tensor, kv_length: int) -> Tensor:
        """The masks of rows whose windows begin in slots `start`, int64 [R], over the first
        `kv_length` slots: [R, 1, Q, kv_length].
        """
        columns = (self.capacity - start)[:, None] + self._columns[:kv_length]
        strip = self._strip.expand(len(start), -1, -1)
        index = columns.unsqueeze(1).expand(-1, strip.shape[1], -1)
        return strip.gather(2, index).unsqueeze(1)
