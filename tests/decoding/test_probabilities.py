import math
from dataclasses import replace

import pytest
import torch
from random_drafts import new_draws
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tempera.decoding import probabilities
from tempera.decoding.probabilities import (
    Sampling,
    kl_divergence,
    kth_largest,
    normalise,
    one_hot,
    sample,
    sample_without_replacement,
    total_variation,
)
from tempera.errors import TemperaError

torch.manual_seed(0)
PLAIN = Sampling(guidance=1.0)
END = 1 - 2.0**-53


def test_guidance_combines_the_two_rows_of_a_prompt():
    c, u = torch.randn(3, 4, 7), torch.randn(3, 4, 7)
    p = Sampling(guidance=3.0).distribution(torch.cat([c, u]))
    torch.testing.assert_close(p, (u + 3 * (c - u)).softmax(-1))
    assert Sampling(guidance=3.0).rows == 2
    assert PLAIN.rows == 1
    torch.testing.assert_close(PLAIN.distribution(c), c.softmax(-1))


def test_the_order_is_guidance_temperature_top_k_top_p():
    c, u = torch.randn(5, 20), torch.randn(5, 20)
    p = Sampling(guidance=2.0, temperature=0.7, top_k=8, top_p=0.8).distribution(torch.cat([c, u]))
    for row in range(5):
        logits = (u + 2 * (c - u))[row] / 0.7
        kept = logits.topk(8).indices
        q = torch.zeros(20)
        q[kept] = logits[kept].softmax(-1)
        mass, chosen = 0.0, []
        for token in q.argsort(descending=True).tolist():
            if mass >= 0.8:
                break
            chosen.append(token)
            mass += q[token].item()
        expected = torch.zeros(20)
        expected[chosen] = q[chosen] / q[chosen].sum()
        torch.testing.assert_close(p[row], expected)


@pytest.mark.parametrize("k", [1, 2, 7, 39, 40])
def test_a_search_over_bits_keeps_the_tokens_of_topk(k, monkeypatch):
    """As compiled rounds on a GPU search: ties, both zeros, infinities and NaN among them."""
    x = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(k))
    x[0] = x[0].bfloat16()
    x[1] = x[1].round()  # ties
    x[2, :, 3:] = -torch.inf
    x[3] = torch.where(x[3] > 0, 0.0, -0.0)
    x[4, 0, ::2] = torch.inf
    x[4, 1] = x[4, 1] * torch.finfo(torch.float32).tiny / 8  # not normal
    x[5, 0, 0], x[5, 1, 1] = torch.nan, -torch.nan
    for sampling in (Sampling(1.0, top_k=k), Sampling(1.0, 0.7, top_k=k, top_p=0.9)):
        expected = sampling.distribution(x)
        least = x[:5].topk(k).values[..., -1:]
        assert kth_largest(x[:5], k).equal(least)
        with monkeypatch.context() as patch:
            patch.setattr(probabilities, "one_kernel", lambda logits: True)
            patch.setattr(torch.Tensor, "topk", None)
            found = sampling.distribution(x)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        assert found[5].isnan().all()


@pytest.mark.parametrize("k", [1, 4, 10])
def test_the_mass_of_the_largest_is_that_of_topk(k, monkeypatch):
    """As compiled rounds on a GPU add it up: ties before, at and behind the k-th among them."""
    p = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(k)).softmax(-1)
    p[0] = p[0].bfloat16()
    p[1] = (20 * p[1]).round() / 20
    p[2] = one_hot(torch.tensor([0, 39]), 40)
    p[3] = 1 / 40
    p[4, :, 3:] = 0
    expected = p.topk(k).values.sum(-1)
    assert probabilities.mass_of_largest(p, k).equal(expected)
    monkeypatch.setattr(probabilities, "one_kernel", lambda p: True)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    found = probabilities.mass_of_largest(p, k)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    whole = probabilities.mass_of_largest(p[..., :k], k)
    torch.testing.assert_close(whole, p[..., :k].sum(-1), rtol=1e-6, atol=0)


def test_min_p_keeps_a_share_of_the_most_probable_token_after_top_p():
    p = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
    kept = torch.tensor([[0.5, 0.2, 0.15, 0, 0]])
    found = Sampling(1.0, min_p=0.3).distribution(p.log())
    torch.testing.assert_close(found, kept / kept.sum())
    both = Sampling(1.0, top_p=0.6, min_p=0.3).distribution(p.log())
    torch.testing.assert_close(both, torch.tensor([[0.5, 0.2, 0, 0, 0]]) / 0.7)
    assert Sampling(1.0, min_p=1.0).distribution(p.log()).tolist() == [[1, 0, 0, 0, 0]]


def test_the_entropy_temperature_follows_the_paper():
    """Of the guided, top-k'd logits; then temperature and top-k, then top-p."""
    c, u = 3 * torch.randn(5, 20), torch.randn(5, 20)
    options = {"guidance": 2.0, "temperature": 0.7, "top_k": 8}
    p = Sampling(**options, entropy_temperature=(2.5, 3.0, 0.6)).distribution(torch.cat([c, u]))
    for row in range(5):
        kept = (u + 2 * (c - u))[row].topk(8)
        entropy = torch.distributions.Categorical(logits=kept.values).entropy()
        temperature = 0.7 * (2.5 * math.exp(-entropy / 3) + 0.6)
        torch.testing.assert_close(p[row, kept.indices], (kept.values / temperature).softmax(-1))
    same = Sampling(**options, entropy_temperature=(0.0, 3.0, 1.0)).distribution(torch.cat([c, u]))
    assert same.equal(Sampling(**options).distribution(torch.cat([c, u])))
    flat = Sampling(1.0, entropy_temperature=(2.5, 0.01, 0.6)).distribution(c / 10)
    torch.testing.assert_close(flat, (c / 10 / 0.6).softmax(-1))


def test_divergences_of_distributions_with_zeros():
    a, b = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    assert kl_divergence(a, b).tolist() == pytest.approx([math.log(2), math.inf])
    assert total_variation(a, b).tolist() == pytest.approx([0.5, 1.0])


def test_ties_with_the_kth_token_are_kept():
    p = Sampling(guidance=1.0, top_k=2).distribution(torch.tensor([[2.0, 1.0, 1.0, 0.0]]))
    assert (p > 0).tolist() == [[True, True, True, False]]
    assert (Sampling(guidance=1.0, top_k=9).distribution(torch.zeros(1, 4)) > 0).all()


def test_the_token_that_reaches_top_p_is_kept_and_the_first_always():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert (Sampling(1.0, top_p=0.75).distribution(logits) > 0).tolist() == [[True, True, False]]
    assert (Sampling(1.0, top_p=0.5).distribution(torch.zeros(1, 2))).tolist() == [[0, 1]]
    assert (Sampling(1.0, top_p=0.01).distribution(logits) > 0).tolist() == [[True, False, False]]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.75, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 7, 2000])
@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(1, 4),
        torch.zeros(3, 33),
        torch.randn(40, 12).round(),
        (2 * torch.randn(40, 300)).round(),
        (2 * torch.randn(20, 8192)).bfloat16(),
        (2 * torch.randn(20, 16384)).half(),
        5 * torch.randn(20, 16384),
        torch.randn(20, 5)
        .masked_fill(torch.rand(20, 5) < 0.3, -torch.inf)
        .index_fill(1, torch.tensor([2]), 0.0),
    ],
    ids=lambda logits: f"{logits.dtype} {list(logits.shape)}",
)
def test_top_p_keeps_the_tokens_of_transformers(logits, top_k, top_p):
    """Also of equal logits: of those of bfloat16, many are."""
    scores = logits.float()
    if top_k:
        scores = TopKLogitsWarper(min(top_k, scores.shape[1]))(None, scores)
    kept = TopPLogitsWarper(top_p)(None, scores).isfinite()
    p = Sampling(1.0, top_k=top_k, top_p=top_p).distribution(logits)
    expected = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    assert (p > 0).equal(expected > 0)
    torch.testing.assert_close(p, expected)


def test_temperature_zero_is_greedy():
    logits = torch.randn(2, 3, 9)
    p = Sampling(guidance=1.0, temperature=0).distribution(logits)
    assert p.argmax(-1).equal(logits.argmax(-1))
    assert p.amax(-1).eq(1).all()
    assert p.sum(-1).eq(1).all()


def test_forced_positions_are_one_hot():
    logits = torch.randn(2, 3, 5)
    forced = torch.tensor([[-1, 4, -1], [0, -1, -1]])
    p = PLAIN.distribution(logits, forced)
    assert p[0, 1].tolist() == [0, 0, 0, 0, 1]
    assert p[1, 0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(p[1, 1:], logits[1, 1:].softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_probabilities_are_float32_whatever_the_logits_are(dtype):
    assert PLAIN.distribution(torch.randn(2, 5, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, Sampling(3.0), Sampling(1.0, 0), Sampling(3.0, 1.0, 2), Sampling(1.0, 0.5, 0, 0.7)],
)
def test_a_nan_logit_makes_the_whole_distribution_nan_and_no_other(sampling):
    logits = torch.randn(2 * sampling.rows, 3, 6)
    logits[1, 2, 4] = torch.nan
    p = sampling.distribution(logits)
    assert p[1, 2].isnan().all()
    assert not p[0].isnan().any()
    assert not p[1, :2].isnan().any()


@pytest.mark.parametrize("rows", [0, 1, slice(None)], ids=["conditional", "unconditional", "both"])
def test_a_forbidden_token_stays_forbidden_under_guidance(rows):
    logits = torch.zeros(2, 4)
    logits[rows, 1] = -torch.inf
    assert Sampling(3.0).distribution(logits).tolist()[0] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_a_draw_inverts_the_cdf():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, END], dtype=torch.float64)
    assert sample(p.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]
    assert sample(torch.tensor([1.0, 1e-9, 1.0]), torch.tensor(0.5)) == 1  # sums are float64


def test_a_token_without_mass_is_never_drawn():
    p = torch.rand(2000, 300).masked_fill(torch.rand(2000, 300) < 0.9, 0.0)
    for mass in (normalise(p, p), p, 1e-30 * p, 1e30 * p):
        for u in (0.0, 2.0**-53, 0.5, END):
            drawn = sample(mass, torch.full((2000,), u, dtype=torch.float64))
            assert (p.gather(1, drawn[:, None]) > 0).all()


def test_a_token_of_little_mass_can_be_drawn():
    """In a vocabulary of 2¹⁷, by the 50th to the 53rd bit of a draw."""
    p = torch.cat([torch.ones(1), torch.full((2**17 - 1,), 2.0**-49)]) / (1 + 2.0**-32)
    keys = torch.arange(4, dtype=torch.float64) * 2.0**-49 + 1 - 2.0**-32
    assert sample(p.expand(4, -1), keys).unique().numel() == 4
    streams = new_draws(0, ["a"])
    assert (streams.next(1000) * 2.0**24 % 1 > 0).all()


def test_siblings_are_drawn_without_replacement():
    p = torch.rand(1000, 6).softmax(-1)
    tokens, q = sample_without_replacement(p, torch.rand(1000, 4))
    torch.testing.assert_close(q[:, 0], p)
    torch.testing.assert_close(q.sum(-1), torch.ones(1000, 4))
    for k in range(1, 4):
        left = p.clone().scatter_(1, tokens[:, :k], 0.0)
        torch.testing.assert_close(q[:, k], left / left.sum(-1, keepdim=True))
    assert (q.gather(-1, tokens[..., None]) > 0).all()
    assert all(len(set(row)) == 4 for row in tokens.tolist())


def test_when_the_support_is_exhausted_the_last_token_repeats_with_all_mass():
    p = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    tokens, q = sample_without_replacement(p, torch.tensor([[0.9, 0.5, 0.5, 0.1]]))
    assert tokens.tolist() == [[2, 1, 1, 1]]
    assert q[0, 1:].tolist() == [[0, 1, 0, 0]] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"guidance": math.inf}, "guidance"),
    ],
)
def test_impossible_sampling_is_refused(options, name):
    with pytest.raises(TemperaError, match=name):
        Sampling(**options)


@pytest.mark.parametrize("options", [
    {}, {"guidance": 3.0}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 2},
    {"top_p": 0.5}, {"guidance": 2.0, "temperature": 2.0, "top_k": 3, "top_p": 0.9},
], ids=str)  # fmt: skip
def test_the_callers_logits_stay_as_they_are(options: dict[str, float]) -> None:
    """float32 logits are not copied on the way; drafts and targets read theirs again."""
    sampling = Sampling(**{"guidance": 1.0, **options})
    logits = torch.randn(2 * sampling.rows, 3, 7)
    forced = torch.tensor([[-1, 2, -1]]).expand(2, 3)
    for given in (logits, logits.half()):
        before = given.clone()
        for read in (sampling, sampling.ranking, sampling.drafting, sampling.untempered):
            first = read.distribution(given, forced)
            assert torch.equal(given, before)
            assert torch.equal(read.distribution(given, forced), first)
            read.guide(given)
        assert torch.equal(given, before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-30, 1e-35, 1e-38, 1e-45, 1e-300])
def test_the_smallest_temperatures_are_greedy(temperature):
    """Also those at which dividing float32 logits by them overflows, or that are 0 in float32."""
    logits = torch.tensor([[30.0, 31.0, -40.0, -torch.inf], [5e-3, -2.0, -1e4, 4e-3]])
    sampling = Sampling(1.0, temperature)
    assert torch.equal(sampling.distribution(logits), Sampling(1.0, 0.0).distribution(logits))
    assert sampling.ranking.distribution(logits).isfinite().all()
    for floor in (1e-6, 1e-5):
        uncertain = replace(sampling, entropy_temperature=(0.0, 3.0, floor))
        found = uncertain.distribution(1e4 * logits)
        assert torch.equal(found, sampling.distribution(logits))
