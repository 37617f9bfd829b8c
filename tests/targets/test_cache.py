import gc
import weakref

import pytest
import torch

from tempera.targets import cache as module
from tempera.targets.cache import KVCache, Layout, head_size


def new_cache(size: int = 4, capacity: int = 12) -> KVCache:
    """Two layers of two heads for three rows."""
    cache = KVCache(2, 2, size, dtype=torch.float32, device=torch.device("cpu"))
    cache.begin(3, capacity)
    return cache


def test_each_row_writes_at_its_own_offset_into_the_buffers_themselves():
    cache = new_cache()
    slots = torch.tensor([[0, 1], [4, 5], [9, 2]])
    cache.place(slots, kv_length=10)
    key, value = torch.randn(2, 3, 2, 2, 4)
    keys, values = cache.update(key, value, 1)
    assert keys.shape == values.shape == (3, 2, 10, 4) and keys.stride()[2:] == (4, 1)
    for row in range(3):
        assert torch.equal(keys[row][:, slots[row]], key[row])
        assert torch.equal(values[row][:, slots[row]], value[row])
    assert keys.untyped_storage().data_ptr() == cache.entries[1].data_ptr()
    untouched = keys.clone()
    untouched.scatter_(2, slots[:, None, :, None].expand(3, 2, 2, 4), 0.0)
    assert not untouched.any() and not cache.entries[0].any()


def test_compaction_reads_all_sources_before_it_writes():
    cache = new_cache()
    for entries in cache.entries:
        entries.normal_()
    before = [entries.view(2, 3, 2, 12, 4).clone() for entries in cache.entries]
    source = torch.tensor([[5, 6, 7], [9, 4, 4], [2, 2, 2]])
    target = torch.tensor([[4, 5, 6], [3, 4, 5], [2, 3, 4]])
    cache.compact(source, target)
    for entries, old in zip(cache.entries, before, strict=True):
        for row in range(3):
            expected = old[:, row].clone()
            expected[..., target[row], :] = old[:, row][..., source[row], :]
            assert torch.equal(entries.view(2, 3, 2, 12, 4)[:, row], expected)


def test_heads_are_padded_with_zeros():
    assert head_size(100, torch.bfloat16, torch.device("cuda")) == 104
    assert head_size(100, torch.float32, torch.device("cuda")) == 100
    assert head_size(100, torch.bfloat16, torch.device("cpu")) == 100
    cache = new_cache(size=8)
    cache.place(torch.tensor([[3], [4], [5]]), kv_length=8)
    key, value = torch.randn(2, 3, 2, 1, 6)
    for padded, part in zip(cache.update(key, value, 0), (key, value), strict=True):
        assert all(torch.equal(padded[i, :, 3 + i, :6], part[i, :, 0]) for i in range(3))
        assert not padded[..., 6:].any()


def test_buffers_are_kept_while_there_is_room_and_have_no_old_entries():
    cache = new_cache()
    cache.entries[1].fill_(torch.nan)
    first, cache.layouts["any"] = cache.entries[0].data_ptr(), Layout.of(1, cache, 1)
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


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kv_length", [7, 12])
def test_masks_show_the_prefix_and_the_ancestors(per_row, kv_length):
    generator, roots = torch.Generator().manual_seed(0), torch.tensor([0, 3, 8])
    visible = torch.rand(*[3] * per_row, 2, 4, generator=generator) < 0.5
    mask = Layout(torch.arange(2), torch.arange(2), visible, new_cache()).mask(roots, kv_length)
    assert mask.shape == (3, 1, 2, kv_length)
    for row, root in enumerate(roots.tolist()):
        for query in range(2):
            sees = visible[row, query] if per_row else visible[query]
            expected = [
                slot < root or (slot < root + 4 and bool(sees[slot - root]))
                for slot in range(kv_length)
            ]
            assert (mask[row, 0, query] == 0).tolist() == expected
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}
