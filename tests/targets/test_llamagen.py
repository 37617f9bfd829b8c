"""LlamaGen: the condition of a class, and sizes. test_model_families.py tests its logits."""

import pytest
import torch

from tempera.errors import TemperaError
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig


def test_the_null_class_is_the_last_one() -> None:
    net = LlamaGen(LlamaGenConfig(13, 16, 24, 1, 2, (2, 3), 1, num_classes=10))
    keep = torch.ones(2, 1, dtype=torch.bool)
    embedded, _ = net.embed_prefix(torch.tensor([3, 3]), keep, torch.tensor([False, True]))
    assert torch.equal(embedded[:, 0], net.class_embedding.weight[[3, 10]])


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(TemperaError, match="multiple of 4"):
        LlamaGenConfig(13, 12, 24, 1, 2, (2, 3), 4, caption_dim=6)
    with pytest.raises(TemperaError, match="exactly one"):
        LlamaGenConfig(13, 16, 24, 1, 2, (2, 3), 4)
