"""Embedding, head and sampling by themselves."""

import pytest
import torch
from tiny_networks import TextLlama, lively, llamagen

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.targets.token_head import TokenHead


def test_guidance_of_hidden_states_equals_guidance_of_logits():
    network, hidden = llamagen(), torch.randn(4, 3, 16)
    sampling = Sampling(3.0, temperature=0.7, top_k=5)
    head = TokenHead(network, sampling, 20)
    found = head.distribution(hidden, torch.zeros(2, dtype=torch.int64), torch.arange(3))
    torch.testing.assert_close(found, sampling.distribution(network.lm_head(hidden)))
    other = head.distribution(
        hidden, torch.zeros(2, dtype=torch.int64), torch.arange(3), Sampling(9.0)
    )  # its guidance is ignored
    torch.testing.assert_close(other, Sampling(3.0).distribution(network.lm_head(hidden)))


def test_target_tokens_select_network_ids():
    network, ids = lively(TextLlama()), torch.tensor([29, 11, 12])
    head = TokenHead(network, Sampling(1.0), 6, token_ids=ids)
    hidden = torch.randn(2, 1, 16)
    assert (head.vocab_size, head.hidden_size) == (3, 16)
    torch.testing.assert_close(head.lm_logits(hidden), network.lm_head(hidden)[..., ids])
    assert torch.equal(head.embed(torch.tensor([[1]])), network.embed_tokens(ids[1])[None, None])


def test_embeddings_are_doubled_under_guidance():
    head = TokenHead(llamagen(), Sampling(2.0), 20)
    embeds = head.embed(torch.tensor([[3], [4]]))
    assert embeds.shape == (4, 1, 16) and torch.equal(embeds[:2], embeds[2:])


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
