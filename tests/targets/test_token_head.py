"""Embedding, head and sampling by themselves."""

import pytest
import torch
from tiny_networks import PROMPTS, VOCAB, llamagen, random_draft, text_target, tiny_target

from tempera.decoding.probabilities import Sampling, one_hot
from tempera.decoding.trees import Tree
from tempera.targets.token_format import ModelSpec
from tempera.targets.token_head import TokenHead


def test_forced_positions_start_at_each_rows_length():
    network = llamagen()
    network.spec = ModelSpec(2, 2, 7, 0, ("{text}",), (), 99, line_end=10)
    head = TokenHead(network, Sampling(1.0), 6)
    p = head.distribution(torch.randn(2, 3, 16), torch.tensor([0, 4]), torch.arange(3))
    certain = p[..., 7] == 1
    # positions 0, 1, 2 and 4, 5, 5: past the image the last position counts
    assert certain.tolist() == [[False, False, True], [False, True, True]]
    assert (p[..., 7][~certain] == 0).all(), "it is drawn nowhere else"
    assert not head.directions(torch.zeros(1, 16)).any()  # a bias is no direction
    log = head.lm_logits(torch.randn(1, 16)).log_softmax(-1)
    assert torch.isfinite(log).all() and log.exp()[0, 7] == 0


def test_tokens_are_ids_of_the_network():
    target = text_target(Sampling(1.0))
    expected = target.network.embed_tokens(torch.tensor([[4 + 1]]))  # codes begin at id 4
    assert torch.equal(target.head.embed(torch.tensor([[1]])), expected)


def test_greedy_scores_have_the_distribution_at_temperature_1_beside_them():
    target = tiny_target(Sampling(1.0, temperature=0, top_k=3))
    target.begin(PROMPTS, 0)
    scores = target.score(random_draft(Tree.empty(), 4, torch.Generator()), 0)
    assert (scores.untempered > 0).sum(-1).eq(3).all()
    assert torch.equal(scores.p, one_hot(scores.untempered.argmax(-1), VOCAB))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_line_end_has_no_mass_where_it_is_not_forced_at_any_temperature(guidance, temperature):
    network = llamagen()
    network.spec = ModelSpec(2, 2, 7, 0, ("{text}",), (), 99, line_end=10)
    head = TokenHead(network, Sampling(guidance, temperature), 6)
    hidden = torch.randn(head.sampling.rows, 6, 16)
    p = head.distribution(hidden, torch.zeros(1, dtype=torch.int64), torch.arange(6))
    assert p[0, :, 7].tolist() == [0, 0, 1, 0, 0, 1]
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 6))
