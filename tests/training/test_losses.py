import torch
import torch.nn.functional as F

from tempera.training.losses import draft_loss


def states(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randn(3, 7, 8, generator=generator).requires_grad_()
    head = torch.nn.Linear(8, 11, bias=False)
    torch.nn.init.normal_(head.weight, generator=generator)
    return predicted, torch.randn(3, 7, 8, generator=generator), head.requires_grad_(False)


def test_value_is_smooth_l1_plus_weighted_soft_cross_entropy() -> None:
    predicted, hidden, head = states()
    loss = draft_loss(predicted, hidden, head, cross_entropy_weight=0.1)
    expected = F.cross_entropy(
        head(predicted).flatten(0, 1), head(hidden).softmax(-1).flatten(0, 1)
    )
    torch.testing.assert_close(loss.cross_entropy, expected)
    torch.testing.assert_close(loss.regression, F.smooth_l1_loss(predicted, hidden))
    torch.testing.assert_close(loss.total, loss.regression + 0.1 * expected)


def test_chunks_change_neither_value_nor_gradient() -> None:
    predicted, hidden, head = states()
    whole = draft_loss(predicted, hidden, head)
    (gradient,) = torch.autograd.grad(whole.total, predicted)
    parts = draft_loss(predicted, hidden, head, chunk=4)
    (chunked,) = torch.autograd.grad(parts.total, predicted)
    torch.testing.assert_close(parts.total, whole.total)
    torch.testing.assert_close(chunked, gradient)


def test_a_perfect_draft_has_no_regression_loss_and_no_gradient() -> None:
    _, hidden, head = states()
    predicted = hidden.clone().requires_grad_()
    loss = draft_loss(predicted, hidden, head)
    (gradient,) = torch.autograd.grad(loss.total, predicted)
    assert loss.regression == 0
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-7, rtol=0)
