"""The losses against their plain reference, and what gradients they give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import losses
from wager.train.trainer import LOSSES, divergence, rows_loss


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_loss_is_its_reference(loss: str) -> None:
    noise = np.random.default_rng(1)
    draft, target = noise.normal(size=(40, 9)) * 3, noise.normal(size=(40, 9)) * 3
    draft[0] = target[0]
    found = divergence(loss, torch.from_numpy(draft), torch.from_numpy(target)).numpy()
    plain = getattr(losses, loss)
    expected = [plain(losses.distribution(q), losses.distribution(p)) for q, p in zip(draft, target, strict=True)]
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
def test_equal_distributions_cost_nothing_and_others_do(loss: str) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    assert divergence(loss, logits, logits).item() == pytest.approx(0, abs=1e-6)
    assert divergence(loss, logits.flip(-1), logits).item() > 0.1


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_step_against_the_gradient_lowers_the_loss(loss: str) -> None:
    target = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    draft = torch.tensor([[0.5, 0.4, 0.3, 0.2]], requires_grad=True)
    before = divergence(loss, draft, target).sum()
    before.backward()
    after = divergence(loss, draft.detach() - 0.1 * draft.grad, target).sum()
    assert after < before


def test_the_targets_logits_get_no_gradient() -> None:
    target = torch.randn(2, 5, requires_grad=True)
    divergence("kl", torch.randn(2, 5, requires_grad=True), target).sum().backward()
    assert target.grad is None


@pytest.mark.parametrize("count", [1, 512, 1300])
def test_losses_of_some_rows_at_a_time_have_the_gradients_of_all_at_once(count: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11)
    states = torch.randn(count, 6, requires_grad=True)
    weights, labels = torch.rand(count), torch.randn(count, 11)

    def compute(part: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(part)
        return divergence("kl", logits, labels[rows]), logits.argmax(-1) == labels[rows].argmax(-1)

    found = rows_loss(states, weights, list(head.parameters()), compute)
    (3 * found.total).backward()
    chunked = [states.grad, head.weight.grad, head.bias.grad]
    states.grad = None
    head.zero_grad()
    losses, right = compute(states, slice(None))
    (3 * (losses * weights).sum()).backward()
    torch.testing.assert_close(found.total, (losses * weights).sum())
    assert found.right == pytest.approx(float((right * weights).sum()), rel=1e-5)
    for one, other in zip(chunked, [states.grad, head.weight.grad, head.bias.grad], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
