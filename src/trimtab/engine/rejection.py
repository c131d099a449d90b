"""Rejection sampling: drafts in, tokens out, distributed exactly as the target.

*Accepted* tokens are drafts that passed the test; the *recovered* token is drawn from norm(max(0, p - q)) after a
rejection; the *bonus* token is drawn from p after a fully accepted prefix. Standard: Leviathan et al. 2023, Chen et
al. 2023. Block: Sun et al. 2024, which accepts at least as many tokens in expectation by judging the block jointly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.engine.sampling import draw


class DraftLaw(Protocol):
    """What the drafts of R requests were drawn from, in the vocabulary of the target."""

    def full(self, requests: Sequence[int], position: int) -> Tensor:
        """``[n, V]`` float32 draft distributions of some requests at one position."""
        ...


TargetLaw = Callable[[Tensor], Tensor]
"""``[n]`` int64 rows of the verified batch to ``[n, V]`` float32 probabilities; rows nobody asks for cost nothing."""


@dataclass(frozen=True, slots=True)
class Verification:
    """``num_accepted [R]`` and ``next_tokens [R]`` (bonus or recovered), int64."""

    num_accepted: Tensor
    next_tokens: Tensor


def rejection_sample(
    target_law: TargetLaw,
    num_verified: Sequence[int],
    draft_tokens: Tensor,
    drawn_probs: Tensor,
    law: DraftLaw,
    uniforms: Tensor,
) -> Verification:
    """Standard rejection sampling over a ragged batch, position by position, so that only needed rows are computed.

    Args:
        target_law: of the batch's rows, request after request: one row per verified draft and one more.
        num_verified: ``[R]`` verified drafts, 0 included.
        draft_tokens: ``[R, K]`` int64 target ids.
        drawn_probs: ``[R, K]`` probability with which each was drawn.
        law: what they were drawn from; asked only where a draft was rejected.
        uniforms: ``[R, K + 1]`` float64 in [0, 1); the last column draws the extra token.
    """
    counts = torch.tensor(num_verified, dtype=torch.int64)
    starts = torch.cumsum(counts + 1, 0) - (counts + 1)
    num_accepted = torch.zeros_like(counts)
    next_tokens = torch.zeros_like(counts)
    alive = torch.arange(len(counts))
    for position in range(draft_tokens.shape[1] + 1):
        if not len(alive):
            break
        probs = target_law(starts[alive] + position)
        judged = counts[alive] > position
        passed = torch.zeros_like(judged)
        if bool(judged.any()):
            rows = alive[judged]
            target = probs[judged, draft_tokens[rows, position]].double()
            passed[judged] = uniforms[rows, position] * drawn_probs[rows, position].double() < target
        ends = ~passed
        if bool(ends.any()):
            rejected = (judged & ends).nonzero().squeeze(1)
            if len(rejected):
                drafts = law.full(alive[rejected].tolist(), position)
                probs[rejected] = residual(probs[rejected], drafts)
            rows = alive[ends]
            num_accepted[rows] = position
            next_tokens[rows] = draw(probs if len(rows) == len(probs) else probs[ends], uniforms[rows, -1])
        alive = alive[passed]
    return Verification(num_accepted, next_tokens)


def residual(target_probs: Tensor, draft_probs: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """``max(0, factor * p - q)`` row by row; p itself where rounding left nothing (then p and q agree)."""
    left = (factor * target_probs - draft_probs).clamp_(min=0)
    empty = left.sum(-1, keepdim=True) <= 1e-12
    return torch.where(empty, target_probs, left)


def rejection_sample_reference(
    target_probs: Tensor, num_verified: Sequence[int], draft_tokens: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> Verification:
    """The same in plain loops, with ``draft_probs [R, K, V]`` over the target's vocabulary: the definition to read."""
    accepted_counts, next_tokens = [], []
    start = 0
    for request, count in enumerate(num_verified):
        num_accepted = 0
        weights = target_probs[start]
        while num_accepted < count:
            token = int(draft_tokens[request, num_accepted])
            p = float(target_probs[start + num_accepted, token])
            q = float(draft_probs[request, num_accepted, token])
            if float(uniforms[request, num_accepted]) * q < p:
                num_accepted += 1
                weights = target_probs[start + num_accepted]
            else:
                weights = residual(weights[None], draft_probs[request, num_accepted][None])[0]
                break
        accepted_counts.append(num_accepted)
        next_tokens.append(int(draw(weights[None], uniforms[request, -1:])[0]))
        start += count + 1
    return Verification(torch.tensor(accepted_counts), torch.tensor(next_tokens))


def block_verify(
    target_law: TargetLaw,
    num_verified: Sequence[int],
    draft_tokens: Tensor,
    drawn_probs: Tensor,
    law: DraftLaw,
    uniforms: Tensor,
) -> Verification:
    """Block verification (Sun et al. 2024, Algorithm 2); arguments as in :func:`rejection_sample`.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the prefix of length i stands with probability
    h_i = s_i / (s_i + 1 - w_i), s_i = sum(max(0, w_i p_{i+1} - q_{i+1})), and h_n = w_n; the longest standing prefix
    is accepted. P(at least i accepted | x_1..x_i) = w_i for every block length, so trimming stays lossless.
    """
    num_accepted, next_tokens = [], []
    start = 0
    for request, count in enumerate(num_verified):
        target = target_law(torch.arange(start, start + count + 1))
        weight, accepted = 1.0, 0
        weights = target[0]
        for length in range(count + 1):
            if length:
                ratio = float(target[length - 1, draft_tokens[request, length - 1]]) / float(
                    drawn_probs[request, length - 1]
                )
                weight = min(1.0, weight * ratio)
            left = target[length]
            stands = weight
            if length < count:
                drafts = law.full([request], length)
                mass = float((weight * target[length] - drafts[0]).clamp_(min=0).sum(dtype=torch.float64))
                stands = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
                left = residual(target[length : length + 1], drafts, weight)[0]
            if length == 0 or float(uniforms[request, length - 1]) < stands:
                accepted, weights = length, left
        num_accepted.append(accepted)
        next_tokens.append(draw(weights[None], uniforms[request, -1:]))
        start += count + 1
    return Verification(torch.tensor(num_accepted, dtype=torch.int64), torch.cat(next_tokens))
