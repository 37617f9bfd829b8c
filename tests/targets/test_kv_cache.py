import pytest
import torch
from operations import Operations

from tempera.targets.kv_cache import RoundMask, RowCache


def new_cache(
    layers: int = 2, rows: int = 3, heads: int = 2, size: int = 4, capacity: int = 12
) -> RowCache:
    return RowCache(
        layers, rows, heads, size, capacity, dtype=torch.float32, device=torch.device("cpu")
    )


def test_each_row_writes_at_its_own_offset():
    cache = new_cache()
    slots = torch.tensor([[0, 1], [4, 5], [9, 2]])
    cache.place(slots, reach=10)
    key, value = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 4)
    keys, values = cache.update(key, value, 1)
    assert keys.shape == values.shape == (3, 2, 10, 4)
    for row in range(3):
        assert torch.equal(keys[row][:, slots[row]], key[row])
        assert torch.equal(values[row][:, slots[row]], value[row])
    untouched = keys.clone()
    untouched.scatter_(2, slots[:, None, :, None].expand(3, 2, 2, 4), 0.0)
    assert not untouched.any() and not cache.storage[0].any()


def test_attention_reads_the_views_without_copying():
    cache = new_cache()
    cache.place(torch.tensor([[3], [4], [5]]), reach=8)
    keys, values = cache.update(torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 4), 0)
    assert keys.untyped_storage().data_ptr() == cache.storage.untyped_storage().data_ptr()
    query, mask = torch.randn(3, 2, 1, 4), torch.zeros(3, 1, 1, 8)
    with Operations() as ran:
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    assert ran.names == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_compaction_reads_all_sources_before_it_writes():
    cache = new_cache()
    cache.storage.normal_()
    before = cache.storage.clone()
    source, target = (
        torch.tensor([[5, 6, 7], [9, 4, 4], [2, 2, 2]]),
        torch.tensor([[4, 5, 6], [3, 4, 5], [2, 3, 4]]),
    )
    cache.compact(source, target)
    for row in range(3):
        after, earlier = cache.storage[:, :, row], before[:, :, row]
        assert torch.equal(after[..., target[row], :], earlier[..., source[row], :])
        rest = [slot for slot in range(12) if slot not in target[row].tolist()]
        assert torch.equal(after[..., rest, :], earlier[..., rest, :])


def test_a_layer_writes_its_own_part_of_the_cache():
    cache = new_cache()
    cache.place(torch.zeros(3, 1, dtype=torch.int64), reach=5)
    cache.layers[1].update(torch.ones(3, 2, 1, 4), torch.ones(3, 2, 1, 4))
    assert cache.storage[1, ..., 0, :].all() and not cache.storage[0].any()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("reach", [7, 12])
def test_masks_show_the_prefix_and_the_ancestors(per_row, reach):
    generator = torch.Generator().manual_seed(0)
    roots = torch.tensor([0, 3, 8])
    visible = (
        torch.rand(3, 2, 4, generator=generator) < 0.5
        if per_row
        else torch.rand(2, 4, generator=generator) < 0.5
    )
    mask = RoundMask(visible, capacity=12, dtype=torch.float32).at(roots, reach)
    assert mask.shape == (3, 1, 2, reach)
    for row, root in enumerate(roots.tolist()):
        for query in range(2):
            sees = visible[row, query] if per_row else visible[query]
            expected = [
                slot < root or (slot < root + 4 and bool(sees[slot - root]))
                for slot in range(reach)
            ]
            assert (mask[row, 0, query] == 0).tolist() == expected
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}
