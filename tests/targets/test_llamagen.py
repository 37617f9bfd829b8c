"""LlamaGen: rotary angles, condition tokens, and sizes."""

import pytest
import torch

from tempera.errors import TemperaError
from tempera.targets.llamagen import GridRotary, LlamaGen, LlamaGenConfig
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
