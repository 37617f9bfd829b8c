"""Embedding, head and sampling by themselves."""

import pytest
import torch
from tiny_networks import llamagen

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.targets.token_head import TokenHead


def test_forced_positions_start_at_each_rows_length():
    forced = torch.full((6,), -1)
    forced[[2, 5]] = 7
    head = TokenHead(llamagen(), Sampling(1.0), 6, forced=forced)
    p = head.distribution(torch.randn(2, 3, 16), torch.tensor([0, 4]), torch.arange(3))
    certain = p[..., 7] == 1
    # positions 0, 1, 2 and 4, 5, 5: past the image the last position counts
    assert certain.tolist() == [[False, False, True], [False, True, True]]
    assert (p[..., 7][~certain] == 0).all(), "it is drawn nowhere else"
    log = head.lm_logits(torch.randn(1, 16)).log_softmax(-1)
    assert torch.isfinite(log).all() and log.exp()[0, 7] == 0
    with pytest.raises(TemperaError, match="forced positions do not fit an image of 6 tokens"):
        TokenHead(llamagen(), Sampling(1.0), 6, forced=torch.zeros(3, dtype=torch.int64))
