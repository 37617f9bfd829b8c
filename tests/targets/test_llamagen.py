"""LlamaGen: the rotary table, vanishing condition tokens, the official layout, and an independent
computation in float64.
"""

import pytest
import torch
from reference_llamagen import reference_logits

from tempera.errors import TemperaError
from tempera.targets.llamagen import (
    GridRotary,
    LlamaGen,
    LlamaGenConfig,
    from_official,
    permute_pairs,
    to_official,
)
from tempera.targets.masks import causal_mask

TINY = LlamaGenConfig(13, 16, 24, 2, 2, (2, 3), 4, caption_dim=6)


def network() -> LlamaGen:
    torch.manual_seed(0)
    return LlamaGen(TINY).eval()


def test_condition_tokens_have_zero_rotary_tables() -> None:
    rotary = GridRotary(TINY)
    cos, sin = rotary(torch.zeros(1), torch.arange(10)[None])
    assert cos[0, :4].abs().max() == 0 and sin[0, :4].abs().max() == 0
    assert torch.allclose(cos[0, 4:] ** 2 + sin[0, 4:] ** 2, torch.ones(6, 8))
    assert torch.equal(cos[0, 4], torch.ones(8))  # row 0, column 0


def test_official_layout_round_trips() -> None:
    state = network().state_dict()
    official = to_official(state, 2)
    assert (
        official["layers.1.attention.wqkv.weight"].shape == (48, 16)
        and "cls_embedding.uncond_embedding" in official
    )
    back = from_official(official, 2)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)


def test_permute_pairs_inverts() -> None:
    weight = torch.randn(16, 16)
    assert not torch.equal(permute_pairs(weight, 2), weight)
    assert torch.equal(permute_pairs(permute_pairs(weight, 2), 2, inverse=True), weight)


def test_logits_equal_an_independent_float64_computation() -> None:
    net = network()
    for p in net.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    features, tokens = torch.randn(2, 4, 6), torch.randint(13, (2, 6))
    keep = torch.tensor([[False, True, True, True], [True, True, True, True]])
    _, hidden, _ = net(features, keep, torch.zeros(2, dtype=torch.bool), tokens)
    wanted = reference_logits(to_official(net.state_dict(), 2), features, keep, tokens)
    got = net.lm_head(hidden)
    assert (got[1] - wanted[1]).abs().max() < 1e-5
    assert (
        got[0, 1:] - wanted[0, 1:]
    ).abs().max() < 1e-5  # its padded condition token has no meaning


def test_dropped_captions_are_the_null_caption() -> None:
    net, features = network(), torch.randn(2, 4, 6)
    embedded = net.embed_prefix(features, torch.tensor([False, True]))
    assert torch.allclose(embedded[1], net.caption_projection(net.null_caption))
    assert not torch.allclose(embedded[0], embedded[1])


def test_class_conditional_models_have_one_condition_token() -> None:
    config = LlamaGenConfig(13, 16, 24, 1, 2, (2, 3), 1, num_classes=10)
    net = LlamaGen(config)
    embedded = net.embed_prefix(torch.tensor([3, 3]), torch.tensor([False, True]))
    assert embedded.shape == (2, 1, 16) and torch.equal(
        embedded[1, 0], net.class_embedding.weight[10]
    )


def test_every_token_attends_to_itself_and_not_to_padding() -> None:
    mask = causal_mask(torch.tensor([[False, True]]), 4, torch.float32)[0, 0] == 0
    assert torch.equal(
        mask,
        torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool),
    )


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(TemperaError, match="multiple of 4"):
        LlamaGenConfig(13, 12, 24, 1, 2, (2, 3), 4, caption_dim=6)
    with pytest.raises(TemperaError, match="exactly one"):
        LlamaGenConfig(13, 16, 24, 1, 2, (2, 3), 4)
