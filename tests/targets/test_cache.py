import pytest
import torch

from tempera.targets.cache import KVCache, SlotMask, head_size


def new_cache(
    layers: int = 2, rows: int = 3, heads: int = 2, size: int = 4, capacity: int = 12
) -> KVCache:
    return KVCache(
        layers, rows, heads, size, capacity, dtype=torch.float32, device=torch.device("cpu")
    )


def test_each_row_writes_at_its_own_offset():
    cache = new_cache()
    slots = torch.tensor([[0, 1], [4, 5], [9, 2]])
    cache.place(slots, kv_length=10)
    key, value = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 4)
    keys, values = cache.update(key, value, 1)
    assert keys.shape == values.shape == (3, 2, 10, 4)
    for row in range(3):
        assert torch.equal(keys[row][:, slots[row]], key[row])
        assert torch.equal(values[row][:, slots[row]], value[row])
    untouched = keys.clone()
    untouched.scatter_(2, slots[:, None, :, None].expand(3, 2, 2, 4), 0.0)
    assert not untouched.any() and not cache.entries[0].any()


def test_attention_reads_the_buffers_themselves():
    cache = new_cache()
    before = cache.entries[0].data_ptr()
    cache.place(torch.tensor([[3], [4], [5]]), kv_length=8)
    for part in cache.update(torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 4), 0):
        assert part.untyped_storage().data_ptr() == before == cache.entries[0].data_ptr()
        assert part.stride()[2:] == (4, 1)


def test_compaction_reads_all_sources_before_it_writes():
    cache = new_cache()
    for entries in cache.entries:
        entries.normal_()
    before = [entries.view(2, 3, 2, 12, 4).clone() for entries in cache.entries]
    source, target = (
        torch.tensor([[5, 6, 7], [9, 4, 4], [2, 2, 2]]),
        torch.tensor([[4, 5, 6], [3, 4, 5], [2, 3, 4]]),
    )
    cache.compact(source, target)
    for entries, old in zip(cache.entries, before, strict=True):
        for row in range(3):
            after, earlier = entries.view(2, 3, 2, 12, 4)[:, row], old[:, row]
            assert torch.equal(after[..., target[row], :], earlier[..., source[row], :])
            rest = [slot for slot in range(12) if slot not in target[row].tolist()]
            assert torch.equal(after[..., rest, :], earlier[..., rest, :])


def test_heads_are_padded_with_zeros():
    assert head_size(100, torch.bfloat16, torch.device("cuda")) == 104
    assert head_size(100, torch.float32, torch.device("cuda")) == 100
    assert head_size(100, torch.bfloat16, torch.device("cpu")) == 100
    cache = new_cache(size=8)
    cache.place(torch.tensor([[3], [4], [5]]), kv_length=8)
    key, value = torch.randn(2, 3, 2, 1, 6)
    keys, values = cache.update(key, value, 0)
    for row, slot in enumerate((3, 4, 5)):
        assert torch.equal(keys[row, :, slot, :6], key[row, :, 0])
        assert torch.equal(values[row, :, slot, :6], value[row, :, 0])
    assert not keys[..., 6:].any() and not values[..., 6:].any()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kv_length", [7, 12])
def test_masks_show_the_prefix_and_the_ancestors(per_row, kv_length):
    generator = torch.Generator().manual_seed(0)
    roots = torch.tensor([0, 3, 8])
    visible = (
        torch.rand(3, 2, 4, generator=generator) < 0.5
        if per_row
        else torch.rand(2, 4, generator=generator) < 0.5
    )
    mask = SlotMask(visible, capacity=12, dtype=torch.float32).at(roots, kv_length)
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
