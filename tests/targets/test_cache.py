import gc
import weakref

import pytest
import torch

from tempera.decoding.trees import Tree
from tempera.targets import cache as module
from tempera.targets.cache import KVCache, Layout, head_size


def new_cache(size: int = 4, capacity: int = 12) -> KVCache:
    """Two layers of two heads for three rows."""
    cache = KVCache(2, 2, size, dtype=torch.float32, device=torch.device("cpu"))
    cache.begin(3, capacity)
    return cache


def test_heads_are_padded_with_zeros():
    assert head_size(100, torch.bfloat16, torch.device("cuda")) == 104
    assert head_size(100, torch.float32, torch.device("cuda")) == 100
    assert head_size(100, torch.bfloat16, torch.device("cpu")) == 100
    cache = new_cache(size=8)
    cache.write(torch.tensor([[3], [4], [5]]), kv_length=8)
    key, value = torch.randn(2, 3, 2, 1, 6)
    for padded, part in zip(cache.update(key, value, 0), (key, value), strict=True):
        assert all(torch.equal(padded[i, :, 3 + i, :6], part[i, :, 0]) for i in range(3))
        assert not padded[..., 6:].any()


def test_buffers_are_kept_while_there_is_room_and_have_no_old_entries():
    cache = new_cache()
    cache.entries[1].fill_(torch.nan)
    block, first = Tree.chain(1).block, cache.entries[0].data_ptr()
    cache.layouts[block] = Layout(block, cache, 1)
    cache.begin(3, 10)
    assert cache.entries[0].data_ptr() == first and cache.layouts and not cache.entries[1].any()
    for rows, capacity in ((3, 13), (2, 13), (2, 20)):
        cache.begin(rows, capacity)
        assert (cache.rows, cache.capacity, len(cache.layouts)) == (rows, capacity, 0)
        assert [len(entries) for entries in cache.entries] == [2 * rows * 2 * capacity] * 2


def test_buffers_that_make_room_for_others_are_freed_first_and_made_again_after_a_failure(
    monkeypatch,
):
    cache = new_cache()
    old, make = [weakref.ref(entries) for entries in cache.entries], torch.zeros

    def full(*_, **__):
        assert [entries() for entries in old] == [None, None]
        raise torch.OutOfMemoryError("no")

    gc.disable()
    try:
        monkeypatch.setattr(module.torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.begin(3, 20)
    finally:
        gc.enable()
    monkeypatch.setattr(module.torch, "zeros", make)
    cache.begin(3, 12)  # as large as the first ones were
    assert [len(entries) for entries in cache.entries] == [2 * 3 * 2 * 12] * 2
