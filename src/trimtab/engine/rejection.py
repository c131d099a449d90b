"""Rejection sampling: drafts in, tokens out, distributed exactly as the target.

*Accepted* tokens are drafts that passed the test; the *recovered* token is drawn from norm(max(0, p - q)) after a
rejection; the *bonus* token is drawn from p after a fully accepted prefix. Standard: Leviathan et al. 2023, Chen et
al. 2023. Block: Sun et al. 2024, which accepts at least as many tokens in expectation by judging the block jointly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.sampling import draw


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """What the drafts of R requests were drawn from.

    Attributes:
        probs: ``[R, K, draft_vocab_size]`` float32, or None: each draft was certain (one-hot).
        vocab_map: ``[draft_vocab_size]`` int64 target id of each draft id; None: same vocabulary.
        draft_ids: ``[R, K]`` int64 drawn tokens as ids of the draft vocabulary (ignored if one-hot).
    """

    probs: Tensor | None
    vocab_map: Tensor | None = None
    draft_ids: Tensor | None = None

    def probs_of_drafts(self, rows: Tensor, positions: Tensor) -> Tensor:
        """``[n]`` probability with which each (request, position) was drawn."""
        if self.probs is None or self.draft_ids is None:
            return torch.ones(len(rows))
        return self.probs[rows, positions, self.draft_ids[rows, positions]]

    def full(self, rows: Tensor, positions: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
        """``[n, vocab_size]`` draft distributions over the target's vocabulary."""
        full = torch.zeros(len(rows), vocab_size, device=tokens.device)
        if self.probs is None:
            return full.scatter_(1, tokens[:, None], 1.0)
        probs = self.probs[rows, positions]
        if self.vocab_map is None:
            full[:, : probs.shape[1]] = probs[:, :vocab_size]
            return full
        return full.index_copy_(1, self.vocab_map, probs)


@dataclass(frozen=True, slots=True)
class Verification:
    """``num_accepted [R]`` and ``next_tokens [R]`` (bonus or recovered), int64."""

    num_accepted: Tensor
    next_tokens: Tensor


def rejection_sample(
    target_probs: Tensor, num_verified: Sequence[int], draft_tokens: Tensor, law: DraftLaw, uniforms: Tensor
) -> Verification:
    """Standard rejection sampling over a ragged batch.

    Args:
        target_probs: ``[sum(num_verified + 1), V]``, request after request: one row per verified draft and one more.
        num_verified: ``[R]`` verified drafts, 0 included.
        draft_tokens: ``[R, K]`` int64 target ids.
        law: what they were drawn from.
        uniforms: ``[R, K + 1]`` float64 in [0, 1); the last column draws the extra token.
    """
    counts = torch.tensor(num_verified, dtype=torch.int64)
    num_requests, num_positions = draft_tokens.shape
    starts = torch.cumsum(counts + 1, 0) - (counts + 1)
    positions = torch.arange(num_positions)
    verified = positions[None, :] < counts[:, None]
    rows, columns = verified.nonzero(as_tuple=True)
    tokens = draft_tokens[rows, columns]
    target = target_probs[starts[rows] + columns, tokens].double()
    draft = law.probs_of_drafts(rows, columns).double()
    passed = torch.zeros(num_requests, num_positions, dtype=torch.bool)
    passed[rows, columns] = uniforms[rows, columns] * draft < target
    num_accepted = passed.cumprod(-1).sum(-1)
    weights = target_probs[starts + num_accepted]
    rejected = (num_accepted < counts).nonzero().squeeze(1)
    if len(rejected):
        at = num_accepted[rejected]
        draft_full = law.full(rejected, at, draft_tokens[rejected, at], target_probs.shape[1])
        weights[rejected] = residual(weights[rejected], draft_full)
    return Verification(num_accepted, draw(weights, uniforms[:, num_positions]))


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
    target_probs: Tensor, num_verified: Sequence[int], draft_tokens: Tensor, law: DraftLaw, uniforms: Tensor
) -> Verification:
    """Block verification (Sun et al. 2024, Algorithm 2); arguments as in :func:`rejection_sample`.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the prefix of length i stands with probability
    h_i = s_i / (s_i + 1 - w_i), s_i = sum(max(0, w_i p_{i+1} - q_{i+1})), and h_n = w_n; the longest standing prefix
    is accepted. P(at least i accepted | x_1..x_i) = w_i for every block length, so trimming stays lossless.
    """
    num_requests, num_positions = draft_tokens.shape
    vocab_size = target_probs.shape[1]
    num_accepted = torch.zeros(num_requests, dtype=torch.int64)
    weights = torch.empty(num_requests, vocab_size, device=target_probs.device)
    start = 0
    for request, count in enumerate(num_verified):
        rows, columns = torch.full((count,), request), torch.arange(count)
        tokens = draft_tokens[request, :count]
        target = target_probs[start : start + count + 1]
        drafts = law.full(rows, columns, tokens, vocab_size)
        ratios = target[columns, tokens].double() / law.probs_of_drafts(rows, columns).double()
        prefix = [1.0]
        for ratio in ratios.tolist():
            prefix.append(min(1.0, prefix[-1] * ratio))
        factors = torch.tensor(prefix[:count])[:, None]
        leftovers = (factors * target[:count] - drafts).clamp_(min=0)
        sums = leftovers.sum(-1).double().tolist()
        accepted = 0
        for length in range(1, count + 1):
            mass, weight = (sums[length], prefix[length]) if length < count else (0.0, prefix[count])
            stands = weight if length == count else (mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0)
            if float(uniforms[request, length - 1]) < stands:
                accepted = length
        num_accepted[request] = accepted
        weights[request] = target[accepted]
        if accepted < count:
            weights[request] = residual(target[accepted][None], drafts[accepted][None], prefix[accepted])[0]
        start += count + 1
    return Verification(num_accepted, draw(weights, uniforms[:, num_positions]))
