"""LlamaGen: rotary angles, condition tokens, and sizes."""

import pytest
import torch

from tempera.errors import TemperaError
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig
from tempera.targets.masks import causal_mask


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
