"""Attention of grouped heads, against PyTorch's own with repeated keys."""

import pytest
import torch
from torch import nn

from tempera.targets.attention import SharedMask, _shared, attend


@pytest.mark.parametrize("spread", [False, True, None])
@pytest.mark.parametrize("stored", [6, 8])
def test_groups_attend_to_their_own_keys(spread, stored):
    generator = torch.Generator().manual_seed(0)
    cached = torch.randn(2, 3, 2, 9, stored, generator=generator)
    cached[..., 6:] = 0
    keys, values = cached.narrow(3, 0, 7).unbind()
    query = torch.randn(3, 4, 6, 6, generator=generator).transpose(1, 2)
    mask = torch.randn(3, 1, 4, 7, generator=generator)
    found = attend(query, keys, values, mask, 0.3, spread)
    expected = nn.functional.scaled_dot_product_attention(
        query,
        keys[..., :6].repeat_interleave(3, 1),
        values[..., :6].repeat_interleave(3, 1),
        attn_mask=mask,
        scale=0.3,
    )
    torch.testing.assert_close(found, expected)
    assert _shared(keys, 3).data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("heads", [2, 6])
def test_a_mask_that_rows_share_hides_the_padding_of_each(heads):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads, 5, 6, generator=generator)
    keys, values = torch.randn(2, 3, 2, 5, 6, generator=generator)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 1, 1, 1, 1]]).bool()
    found = attend(query, keys, values, SharedMask(visible, padding), 0.3)
    allowed = (visible & ~padding[:, None, :])[:, None]
    each = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    torch.testing.assert_close(found, attend(query, keys, values, each, 0.3, True))
