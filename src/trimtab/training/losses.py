"""The training loss, on what acceptance is made of: the overlap of the draft's law with the target's.

For a slot with target law p and draft law q, rejection sampling accepts with probability ``sum min(p, q)``, which is
one minus their total variation distance. The loss mixes cross entropy (steady gradients early) with that distance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ROWS = 256


class _OverlapLoss(torch.autograd.Function):
    """Sum over rows of ``weight * (ce_weight * cross entropy + (1 - ce_weight) * total variation)``.

    Logits are ``hidden @ head.T + latent @ markov.T``. They and their gradients live for one chunk of rows at a time:
    forward computes both, since every row's upstream gradient is its weight. The head is constant.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        latent: Tensor | None,
        head: Tensor,
        markov: Tensor | None,
        teacher_ids: Tensor,
        teacher_probs: Tensor,
        weights: Tensor,
        ce_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_grad = torch.empty_like(hidden)
        latent_grad = None if latent is None else torch.empty_like(latent)
        markov_grad = None if markov is None else torch.zeros_like(markov)
        loss = hidden.new_zeros(())
        overlap, agree = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = hidden[rows] @ head.T
            if latent is not None and markov is not None:
                logits.addmm_(latent[rows], markov.T)
            row_loss, grad, overlap[rows], agree[rows] = slot_losses(
                logits, teacher_ids[rows], teacher_probs[rows], ce_weight
            )
            grad *= weights[rows, None]
            loss += (row_loss * weights[rows]).sum()
            hidden_grad[rows] = grad @ head
            if latent is not None and markov is not None and latent_grad is not None and markov_grad is not None:
                latent_grad[rows] = grad @ markov
                markov_grad.addmm_(grad.T, latent[rows])
        context.save_for_backward(hidden_grad, latent_grad, markov_grad)
        context.mark_non_differentiable(overlap, agree)
        return loss, overlap, agree

    @staticmethod
    def backward(context: Any, loss_grad: Tensor, *_: Any) -> Any:
        hidden_grad, latent_grad, markov_grad = context.saved_tensors
        scaled = [None if grad is None else grad * loss_grad for grad in (hidden_grad, latent_grad, markov_grad)]
        return scaled[0], scaled[1], None, scaled[2], None, None, None, None


def overlap_loss(
    hidden: Tensor,
    latent: Tensor | None,
    head: Tensor,
    markov: Tensor | None,
    teacher_ids: Tensor,
    teacher_probs: Tensor,
    weights: Tensor,
    ce_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss over N slots without keeping their logits.

    Args:
        hidden: ``[N, hidden_size]``; ``latent``: ``[N, rank]`` or None.
        head: ``[draft_vocab_size, hidden_size]``, not trained; ``markov``: ``[draft_vocab_size, rank]`` or None.
        teacher_ids: ``[N, K]`` draft ids of the target's likely tokens, -1 where the draft vocabulary lacks one.
        teacher_probs: ``[N, K]`` their probabilities under the target.
        weights: ``[N]``.
        ce_weight: share of cross entropy, in [0, 1].

    Returns:
        The loss (scalar), and per slot the acceptance probability and whether both laws agree on the best token.
    """
    return _OverlapLoss.apply(hidden, latent, head, markov, teacher_ids, teacher_probs, weights, ce_weight)  # type: ignore[no-any-return,no-untyped-call]


def slot_losses(
    logits: Tensor, teacher_ids: Tensor, teacher_probs: Tensor, ce_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, its gradient on the logits, overlap and agreement of ``[n, draft_vocab_size]`` logits.

    With known target mass ``p`` on the kept tokens, cross entropy has gradient ``mass * q - p``; the overlap
    ``sum min(p, q)`` has gradient ``q_i (s_i - sum s q)`` where ``s`` marks the tokens with ``q < p``.
    """
    best = logits.argmax(-1)
    draft_probs = logits.softmax(-1)
    known = teacher_ids >= 0
    ids = teacher_ids.clamp(min=0)
    target_probs = teacher_probs * known
    drafted = draft_probs.gather(1, ids)
    overlap = torch.minimum(drafted, target_probs).sum(-1)
    cross_entropy = -(target_probs * drafted.clamp_min(1e-12).log()).sum(-1)
    below = ((drafted < target_probs) & known).to(logits.dtype)
    gained = (below * drafted).sum(-1, keepdim=True)
    tv_weight = 1 - ce_weight
    # d(loss) = ce (mass q - p) - tv q (s - sum s q)
    grad = draft_probs * (ce_weight * target_probs.sum(-1, keepdim=True) + tv_weight * gained)
    grad.scatter_add_(1, ids, -(ce_weight * target_probs + tv_weight * below * drafted))
    agree = (best == torch.where(known[:, 0], ids[:, 0], -1)).to(logits.dtype)
    return ce_weight * cross_entropy + tv_weight * (1 - overlap), grad, overlap, agree


def confidence_loss(confidence_logits: Tensor, overlap: Tensor, weights: Tensor) -> Tensor:
    """Binary cross entropy of the confidence head against the acceptance probability (DSpark)."""
    losses = functional.binary_cross_entropy_with_logits(confidence_logits, overlap, reduction="none")
    return (losses * weights).sum()
