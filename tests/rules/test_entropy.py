"""Entropy-aware acceptance against the test that the paper describes, draw by draw."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_laws import distribution, fast, pair, weights

from tempera.errors import TemperaError
from tempera.rules.entropy import EntropyAware

nats = st.floats(0.1, 20)
R = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


@given(weights, weights, nats, nats)
@fast
def test_f_is_how_often_the_test_passes(p, q, scale, decay):
    p, q = distribution(p), distribution(q)
    f = EntropyAware(scale, decay).accept(p, q, torch.tensor(1))
    entropy = -(p[p > 0] * p[p > 0].log()).sum()
    threshold = entropy / scale * (0.5 + (1 - entropy / decay) * (R - 0.5))
    for token in q.nonzero().flatten():
        rho = (p[token] / q[token]).clamp(max=1)
        passing = (rho > threshold).double().mean() if rho > 0 else torch.zeros(())
        assert f[token].item() == pytest.approx(passing.item(), abs=1e-3)


@given(weights, weights, nats, st.sampled_from(["published", "optimal"]))
@fast
def test_the_residual_is_a_distribution(p, q, scale, kind):
    p, q = distribution(p), distribution(q)
    _, f, residual = pair(EntropyAware(scale, 16.0, kind), p, q)
    assert ((f >= 0) & (f <= 1)).all() and (f[p == 0] == 0).all()
    assert (residual >= 0).all() and (residual[p == 0] == 0).all()
    assert residual.sum().item() == pytest.approx(1)


def test_more_entropy_accepts_less_and_more_scale_more():
    q = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def accepted(p, scale):  # the first token has ρ = 1/2 in all
        return EntropyAware(scale, 2.0).accept(torch.tensor(p), q, torch.tensor(1))[0].item()

    certain, middling, flat = [0.2, 0.8, 0.0, 0.0], [0.2, 0.6, 0.1, 0.1], [0.2, 0.27, 0.27, 0.26]
    assert accepted(certain, 1.0) > accepted(middling, 1.0) > accepted(flat, 1.0)
    assert accepted(flat, 1.0) < accepted(flat, 1.5) < accepted(flat, 2.0)
    sure, strict = ([0.0, 1.0, 0.0, 0.0], 8.0), (flat, 1e-6)
    for p, scale in (sure, strict):
        f = EntropyAware(scale, 16.0).accept(torch.tensor(p), q, torch.tensor(1))
        assert f.tolist() == ([0, 1, 0, 0] if p is sure[0] else [0, 0, 0, 0])


@pytest.mark.parametrize(("scale", "decay"), [(0, 16), (8, 0), (-1, 16), (8, float("inf"))])
def test_impossible_options_are_refused(scale, decay):
    with pytest.raises(TemperaError, match="above 0"):
        EntropyAware(scale, decay)
