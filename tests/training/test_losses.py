"""The chunked loss and its hand-written gradient against autograd on the whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.training import losses
from trimtab.training.losses import overlap_loss


def plain_loss(
    hidden: Tensor, latent: Tensor, head: Tensor, markov: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, ce: float
) -> Tensor:
    draft = (hidden @ head.T + latent @ markov.T).softmax(-1)
    total = torch.zeros((), dtype=hidden.dtype)
    for row in range(len(hidden)):
        target = torch.zeros_like(draft[row])
        for token, prob in zip(ids[row].tolist(), probs[row], strict=True):
            if token >= 0:
                target[token] = prob
        cross_entropy = -(target * draft[row].log()).sum()
        variation = 1 - torch.minimum(target, draft[row]).sum()
        total = total + weights[row] * (ce * cross_entropy + (1 - ce) * variation)
    return total


@pytest.mark.parametrize("ce", [0.0, 0.3, 1.0])
def test_loss_and_gradients_equal_autograd(ce: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 3)
    torch.manual_seed(0)
    rows, vocab, size, rank, kept = 7, 11, 5, 3, 4
    made = [torch.randn(*shape, dtype=torch.float64) for shape in ((rows, size), (rows, rank), (vocab, size))]
    markov = torch.randn(vocab, rank, dtype=torch.float64)
    ids = torch.stack([torch.randperm(vocab)[:kept] for _ in range(rows)])
    ids[torch.rand(ids.shape) < 0.3] = -1
    probs = torch.rand(rows, kept, dtype=torch.float64).softmax(-1) * 0.9
    weights = torch.rand(rows, dtype=torch.float64)
    gradients = []
    for function in (lambda *a: overlap_loss(*a)[0], plain_loss):
        hidden, latent, head = (tensor.clone() for tensor in made)
        leaves = [hidden.requires_grad_(), latent.requires_grad_(), markov.clone().requires_grad_()]
        loss = function(leaves[0], leaves[1], head, leaves[2], ids, probs, weights, ce)
        loss.backward()
        gradients.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_overlap_is_the_acceptance_probability() -> None:
    hidden = torch.eye(3)
    law = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]])
    ids = torch.tensor([[0, 1], [2, -1], [1, 0]])
    probs = torch.tensor([[0.5, 0.4], [0.6, 0.3], [0.9, 0.05]])
    _, overlap, agree = overlap_loss(hidden, None, law.log().T.contiguous(), None, ids, probs, torch.ones(3), 1.0)
    torch.testing.assert_close(overlap, torch.tensor([0.5 + 0.2, 0.6, 1 / 3 + 0.05]))
    assert agree.tolist()[:2] == [1.0, 1.0]
