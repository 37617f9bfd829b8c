"""Mentored decoding, Cactus and the static mixture: the laws of their papers' own words."""

import math

import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_laws import distribution, fast, pair, weights
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding.probabilities import kl_divergence, total_variation
from tempera.errors import TemperaError
from tempera.rules.cactus import Cactus
from tempera.rules.fly import FLy
from tempera.rules.mentored import POINTS, STAGES, Mentored
from tempera.rules.mixture import Mixture
from tempera.rules.optimal import HALVINGS, HIGHEST, Priced

DEPTH = torch.tensor(1)


def random_tables(seed, vocab_size=3):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    return p, q


def in_its_words(p, q, budget):
    """α and β of the least KL(p ‖ π) within the budget, by roots in α and β one inside the other:
    β makes Σ π = 1, and α spends the budget.
    """

    def beta_of(alpha):
        def lack(beta):
            return float(torch.maximum(torch.minimum(q, p / alpha), p / beta).sum()) - 1 - 1e-12

        return scipy.optimize.brentq(lack, 1.0, 1e9) if lack(1.0) > 0 else 1.0

    def left(alpha):
        law = torch.maximum(torch.minimum(q, p / alpha), p / beta_of(alpha))
        return float(kl_divergence(p, law)) - budget

    alpha = 1e-8 if left(1e-8) <= 0 else scipy.optimize.brentq(left, 1e-8, 1.0)
    return alpha, beta_of(alpha)


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_rule_of_its_own_words(seed, budget):
    p, q = random_tables(seed, 5)
    alpha, beta = in_its_words(p, q, budget)
    law, f, residual = pair(Mentored(budget), p, q)
    torch.testing.assert_close(f, (p / (alpha * q)).clamp(max=1), atol=3e-3, rtol=0)
    lack = (p / beta - q).clamp(min=0)
    if lack.sum() > 1e-6:
        torch.testing.assert_close(residual, lack / lack.sum(), atol=2e-2, rtol=0)
    median = torch.stack([p / beta, q, p / alpha]).median(0).values
    torch.testing.assert_close(law, median, atol=3e-3, rtol=0)


def priced_law(p, q, price):
    """median(c·p, q, c·exp(price)·p) with c such that it sums to 1, by a root in log c."""
    p, q = (one.double() / one.double().sum() for one in (p, q))

    def law(log):
        return q.clamp(math.exp(log) * p, math.exp(log + price) * p)

    def lack(log):
        return float(law(log).sum()) - 1

    wider = 1e-9  # so that rounding does not decide the signs at the ends
    return law(scipy.optimize.brentq(lack, -price - wider, wider))


@given(weights, weights, st.floats(0.001, 1), st.sampled_from(["target", "emitted"]))
@fast
def test_its_law_is_that_of_a_price(p, q, budget, divergence):
    """Price and budget take laws from one family; they differ in what is equal at all tokens."""
    p, q = distribution(p), distribution(q)
    rule = Mentored(budget, divergence)
    law, f, _ = pair(rule, p, q)
    c, omega = rule.solve(p, q, DEPTH)
    price = (omega / c).log()
    exactly = priced_law(p, q, price.item())
    torch.testing.assert_close(law, exactly.to(law), atol=1e-6, rtol=0)
    priced, same, _ = pair(Priced(min(HIGHEST, price.item())), p, q)
    found = HIGHEST / 2**HALVINGS  # how near `Priced` comes to its log c
    torch.testing.assert_close(law, priced, atol=found, rtol=0)
    torch.testing.assert_close(f, same, atol=found, rtol=0)
    median = q.clamp(c * p, omega * p)
    torch.testing.assert_close(law, median)
    spent = kl_divergence(p, median) if divergence == "target" else kl_divergence(median, p)
    assert spent <= budget + 1e-6
    if price < 19:
        beyond, _, _ = pair(Priced(price.item() + 0.01), p, q)
        further = kl_divergence(p, beyond) if divergence == "target" else kl_divergence(beyond, p)
        more = torch.minimum(beyond, q).sum() - torch.minimum(law, q).sum()
        step = HIGHEST / POINTS**STAGES  # how near the rule comes to its log c
        assert further > budget - 1e-6 or more < step  # the budget is spent


@pytest.mark.parametrize("divergence", ["target", "emitted"])
@pytest.mark.parametrize("seed", range(3))
def test_no_law_within_the_budget_keeps_more(seed, divergence):
    p, q = random_tables(seed)
    _, f, _ = pair(Mentored(0.1, divergence), p, q)
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)
    first, second = torch.meshgrid(grid, grid, indexing="ij")
    laws = torch.stack([first, second, 1 - first - second], -1)[first + second <= 1]
    spent = kl_divergence(p, laws) if divergence == "target" else kl_divergence(laws, p)
    best = torch.minimum(laws, q)[spent <= 0.1].sum(-1).max()
    assert (q * f).sum() >= best - 1e-3


class Passes(TorchDispatchMode):
    """Counts the operations that give so many numbers or more."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        first = made[0] if isinstance(made, tuple) else made
        self.count += isinstance(first, torch.Tensor) and first.numel() >= self.size
        return made


def test_a_budget_takes_no_more_passes_over_the_vocabulary_than_a_price():
    p, q = random_tables(0, 500)
    counts = {}
    for rule in (Mentored(0.1), Priced(0.5)):
        with Passes(500) as passes:
            rule.accept(p, q, DEPTH)
        counts[type(rule)] = passes.count
    assert 0 < counts[Mentored] <= counts[Priced]


@pytest.mark.parametrize("divergence", ["target", "emitted"])
@pytest.mark.parametrize(
    ("p", "q", "kept"),
    [
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 1.0),
        ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], 0.0),  # nothing in common
        ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 0.0),
        ([1.0, 0.0, 0.0], [0.25, 0.25, 0.5], 0.25),  # a forced token
        ([0.25, 0.25, 0.5], [0.0, 0.5, 0.5], None),
    ],
)
def test_distributions_that_have_tokens_alone(p, q, kept, divergence):
    p, q = torch.tensor(p), torch.tensor(q)
    law, f, residual = pair(Mentored(0.1, divergence), p, q)
    assert law.sum() == pytest.approx(1) and residual.sum() == pytest.approx(1)
    assert (law[p == 0] == 0).all()
    if kept is not None:
        assert (q * f).sum() == pytest.approx(kept)
    spent = kl_divergence(p, law) if divergence == "target" else kl_divergence(law, p)
    assert spent <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Mentored(-0.1), "kl_budget"),
        (lambda: Mentored(float("inf")), "kl_budget"),
        (lambda: Mixture(1.1), "weight"),
        (lambda: Cactus(-1.0), "delta"),
        (lambda: FLy(1.5), "least_entropy"),
        (lambda: FLy(0.3, 0), "ahead"),
    ],
)
def test_impossible_options_are_refused(make, option):
    with pytest.raises(TemperaError, match=option):
        make()


@given(weights, weights, st.floats(0, 1))
@fast
def test_the_law_of_a_mixture_is_the_mixture(p, q, weight):
    p, q = distribution(p), distribution(q)
    law, f, _ = pair(Mixture(weight), p, q)
    mixture = weight * q + (1 - weight) * p
    if (p > 0).all():
        torch.testing.assert_close(law, mixture)
    assert (f[p == 0] == 0).all() and (law[p == 0] == 0).all()
    # nothing that keeps as much is nearer
    apart = total_variation(p, q) - (1 - (q * f).sum())
    assert total_variation(law, p).item() == pytest.approx(apart.item(), abs=1e-9)


@given(weights, weights, st.floats(0.01, 5))
@fast
def test_cactus_tests_against_its_raised_target(p, q, delta):
    """h_x sums to 1, has x raised by the root, and its f and residual are those of h_x."""
    p, q = distribution(p), distribution(q)
    rule = Cactus(delta)
    for token in q.nonzero().flatten():
        raised = (p[token] + (2 * delta * p[token] * (1 - p[token])).sqrt()).clamp(max=1)
        h = p * (1 - raised) / (1 - p[token]) if p[token] < 1 else torch.zeros_like(p)
        h[token] = raised
        assert h.sum().item() == pytest.approx(1)
        f = rule.accept_at(p, q, token, DEPTH)
        assert f.item() == pytest.approx((raised / q[token]).clamp(max=1).item())
        lack = (h - q).clamp(min=0)
        if f < 1 - 1e-9 and lack.sum() > 0:  # else rounding has taken what q lacks
            residual = rule.residual(p, q, token, DEPTH)
            torch.testing.assert_close(residual, lack / lack.sum())


@given(weights, weights)
@fast
def test_the_mean_residual_of_cactus_is_that_of_its_rejected_tokens(p, q):
    p, q = distribution(p), distribution(q)
    rule = Cactus(0.3)
    f, mean = rule.expected(p, q, DEPTH)
    rejected = q * (1 - f)
    each = torch.stack([rule.residual(p, q, torch.tensor(x), DEPTH) for x in range(len(p))])
    if rejected.sum() > 1e-9:
        torch.testing.assert_close(mean, rejected @ each / rejected.sum())
