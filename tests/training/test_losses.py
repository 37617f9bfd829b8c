"""Every loss of conf/loss, and the two of them by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tempera.decoding.probabilities import Sampling, kl_divergence, total_variation
from tempera.training.losses import AcceptanceLoss, EagleLoss, Head

LOSSES: dict[str, Any] = {
    "eagle": EagleLoss(cross_entropy=0.1),
    "acceptance": AcceptanceLoss(eta=3.0),
    "parallel": AcceptanceLoss(eta=3.0, regression=2.0),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def states() -> tuple[torch.Tensor, torch.Tensor, Head]:
    """Hidden states of two guided pairs, and a head of 11 tokens."""
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randn(4, 7, 8, generator=generator).requires_grad_()
    linear = torch.nn.Linear(8, 11, bias=False).requires_grad_(False)
    torch.nn.init.normal_(linear.weight, generator=generator)
    return predicted, torch.randn(4, 7, 8, generator=generator), Head(linear, Sampling(2.0))


@each_loss
def test_both_rows_of_a_pair_learn_and_a_perfect_draft_has_no_gradient(name: str) -> None:
    predicted, hidden, head = states()
    parts = LOSSES[name](predicted, hidden, head)
    assert all(part.dim() == 0 and part.isfinite() for part in parts.values())
    (gradient,) = torch.autograd.grad(parts["loss"], predicted)
    assert (gradient.abs().sum((-1, -2)) > 0).all()
    better = (predicted - 0.1 * gradient / gradient.norm()).detach()
    assert LOSSES[name](better, hidden, head)["loss"] < parts["loss"]
    perfect = hidden.clone().requires_grad_()
    parts = LOSSES[name](perfect, hidden, head)
    (gradient,) = torch.autograd.grad(parts["loss"], perfect)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)
    for part, best in (("regression", 0.0), ("kl", 0.0), ("tv", 0.0), ("acceptance", 1.0)):
        assert parts.get(part, torch.tensor(best)).item() == pytest.approx(best, abs=1e-6)


@each_loss
def test_chunks_of_logits_change_neither_value_nor_gradient(name: str) -> None:
    predicted, hidden, head = states()
    whole = LOSSES[name](predicted, hidden, head)
    (gradient,) = torch.autograd.grad(whole["loss"], predicted)
    seen: list[int] = []

    def logits(states: torch.Tensor) -> torch.Tensor:
        seen.append(states[..., 0].numel())
        return head.logits(states)

    parts = LOSSES[name](predicted, hidden, Head(logits, head.sampling, chunk=9))
    (chunked,) = torch.autograd.grad(parts["loss"], predicted)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(chunked, gradient)
    assert 4 <= max(seen) <= 9 and len(seen) < 30  # as long as they may be


def test_eagle_is_smooth_l1_plus_weighted_soft_cross_entropy() -> None:
    predicted, hidden, head = states()
    parts = EagleLoss(cross_entropy=0.3)(predicted, hidden, head)
    expected = F.cross_entropy(
        head.logits(predicted).flatten(0, 1), head.logits(hidden).softmax(-1).flatten(0, 1)
    )
    torch.testing.assert_close(parts["cross_entropy"], expected)
    torch.testing.assert_close(parts["regression"], F.smooth_l1_loss(predicted, hidden))
    torch.testing.assert_close(parts["loss"], parts["regression"] + 0.3 * expected)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(2.0), Sampling(1.0), Sampling(3.0, temperature=0.7)],
    ids=["guided", "unguided", "cold"],
)
def test_acceptance_is_lk_on_the_distributions_that_decoding_draws_from(sampling: Sampling) -> None:
    """Its share of KL has no gradient, and the regression joins by its weight."""
    predicted, hidden, head = states()
    loss = AcceptanceLoss(eta=2.0, regression=2.0)
    parts = loss(predicted, hidden, replace(head, sampling=sampling))
    p, q = (sampling.distribution(head.logits(part)) for part in (hidden, predicted))
    assert p.shape == (4 // sampling.rows, 7, 11)
    kl, tv = kl_divergence(p, q), total_variation(p, q)
    share, regression = (-2.0 * (1 - tv)).exp().detach(), F.smooth_l1_loss(predicted, hidden)
    total = (share * kl + (1 - share) * tv).mean() + 2 * regression
    expected = {"kl": kl.mean(), "tv": tv.mean(), "acceptance": 1 - tv.mean(), "loss": total}
    torch.testing.assert_close(parts, expected | {"regression": regression})
    mine, true = (torch.autograd.grad(one, predicted)[0] for one in (parts["loss"], total))
    known = true.isfinite()  # where q is not too small for the definition
    torch.testing.assert_close(mine[known], true[known])
    assert mine.isfinite().all() and known.float().mean() > 0.8


@pytest.mark.parametrize(
    "sampling", [Sampling(2.0, top_k=3), Sampling(2.0, 0.0), Sampling(2.0, top_p=0.5)]
)
def test_acceptance_is_finite_where_sampling_is_truncated_or_greedy(sampling: Sampling) -> None:
    predicted, hidden, head = states()
    parts = AcceptanceLoss()(predicted, hidden, replace(head, sampling=sampling))
    (gradient,) = torch.autograd.grad(parts["loss"], predicted)
    assert gradient.isfinite().all() and gradient.norm() > 0
    assert parts["kl"] > 0 and 0 < parts["acceptance"] < 1
    drawn = replace(sampling, temperature=1.0)
    p, q = (drawn.distribution(head.logits(part)) for part in (hidden, predicted))
    torch.testing.assert_close(parts["tv"], total_variation(p, q).mean())
