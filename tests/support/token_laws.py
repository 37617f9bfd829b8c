"""Laws of one token, and what a rule makes of them."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

weights = st.lists(
    st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 0.5, 1.0, 3.0, 1e3]), min_size=5, max_size=5
).filter(lambda w: sum(w) > 1e-3)
omegas = st.sampled_from([0.05, 0.3, 0.999, 1.0, 1.1, 2.0, 7.0])
kinds = st.sampled_from(["optimal", "vanilla", "kl"])
fast = settings(max_examples=60, deadline=None)


def distribution(weights):
    p = torch.tensor(weights, dtype=torch.float64)
    return p / p.sum()


def pair(rule, p, q, depth=1):
    """The law of a token that is tested and replaced on rejection: q·f + (1 - Σ q·f)·residual, and
    its ingredients.
    """
    depth = torch.tensor(depth)
    f = rule.accept(p, q, depth)
    residual = rule.residual(p, q, torch.tensor(0), depth)
    return q * f + (1 - (q * f).sum()) * residual, f, residual
