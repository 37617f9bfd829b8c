"""Attention of grouped heads, against PyTorch's own with repeated keys; and which keys are skipped
on a GPU.
"""

import json
from functools import partial

import pytest
import torch
from tiny_networks import PROMPTS, TREE, tiny_target
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from tempera.targets import attention
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


def two_lengths(tokens, heads, size, device="cpu", dtype=torch.float32):
    """Two rows of 300 keys, of which the second has reached 170, in two heads; a mask that hides
    what tokens in a row do not see, and the first key; and what the rows have reached.
    """
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    query = random(2, tokens, heads, size).to(device, dtype).transpose(1, 2)
    keys, values = random(2, 2, 2, 300, size).to(device, dtype)
    reached, slots = torch.tensor([300, 170]), torch.arange(300)
    last = reached[:, None] - tokens + torch.arange(tokens)
    hidden = (slots > last[..., None]) | (slots == 0)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min)[:, None]
    return query, keys, values, mask.to(device, dtype), reached.to(device)


def check_skipping(query, keys, values, mask, reached, **bounds):
    """The compiled code that skips keys computes what attention does, of the keys of two blocks in
    the second row.
    """
    wide = query.float(), keys.float(), values.float(), mask.float()
    expected = attend(*wide, 0.3).to(query.dtype)
    keys[1, :, 256:] = torch.nan
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    found = compiled(query, keys, values, mask, 0.3, reached=reached)
    torch.testing.assert_close(found, expected, **bounds)


@pytest.mark.slow
@torch.no_grad()
def test_blocks_of_keys_that_a_row_has_not_reached_are_skipped(monkeypatch, tmp_path):
    """By the code that PyTorch generates for a CPU."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_skipping(*two_lengths(3, 8, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 104, 128])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 2), (1, 8), (6, 14), (61, 2), (130, 2)])
@torch.no_grad()
def test_keys_are_skipped_on_a_gpu(tokens, heads, size):
    given = two_lengths(tokens, heads, size, "cuda", torch.bfloat16)
    check_skipping(*given, atol=0.02, rtol=0.02)


def test_a_row_has_reached_the_last_key_that_its_mask_shows(monkeypatch):
    monkeypatch.setattr(attention, "skips", lambda *_: True)
    target = tiny_target()
    target.begin(PROMPTS, 5)
    runner = target.runner
    start = runner.roots() + torch.arange(2 * len(PROMPTS))
    mask, _ = runner.prepare(runner.layout_of(TREE.block), start)
    seen = (mask == 0).any(2).flatten(1)
    last = torch.where(seen, torch.arange(seen.shape[1]), 0).amax(1)
    assert runner.cache.reached.equal(last + 1)


def test_keys_are_skipped_where_that_is_faster(monkeypatch, tmp_path):
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "of this test")
    monkeypatch.setattr(attention, "is_supported", lambda device: True)
    monkeypatch.setattr(attention, "TIMED_ENTRIES", 2**21)
    timed = []

    def nanoseconds(compute, inputs):
        timed.append(len(inputs))
        if inputs[0].shape[3] == 4096 and len(timed) % 2 == 0:
            raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("large"), None)
        return {512: [5, 4], 1024: [5, 6], 4096: [5]}[inputs[0].shape[3]][len(timed) % 2 - 1]

    monkeypatch.setattr(attention, "nanoseconds", nanoseconds)

    def chosen(slots, tokens=5, rows=2):
        shape = tokens, 20, (rows, 20, slots, 64), torch.bfloat16
        return attention.skipping_is_faster(*shape, torch.device("cpu"))

    assert [chosen(slots) for slots in (512, 1024, 4096, 512)] == [True, False, False, True]
    assert chosen(512, tokens=8) and len(timed) == 6  # as five tokens
    assert not chosen(64) and len(timed) == 6


@pytest.mark.gpu
def test_both_ways_are_timed_once_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path))
    shape = 1, 20, (16, 20, 512, 64), torch.bfloat16, torch.device("cuda:0")
    found = attention.skipping_is_faster(*shape)
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text()).keys() == {"all", "reached"}
    monkeypatch.setattr(attention, "_times", None)
    assert attention.skipping_is_faster(*shape) == found
