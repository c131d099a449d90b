"""From the target's logits to each request's new tokens: what was accepted, and one token more.

Greedy requests read nothing but the largest logit of each row. Sampled requests compute a distribution only for rows
that the rejection sampler reaches. A row whose largest logit is not finite fails its request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.drafting import RequestDraftLaw
from trimtab.engine.rejection import Verification, block_verify, rejection_sample
from trimtab.engine.request import Request, TokenLogprob
from trimtab.engine.sampling import RowSettings, adjust_logits, argmax, sampling_probs


@dataclass(frozen=True, slots=True)
class VerifiedRequest:
    """New tokens of one request: the accepted drafts and one more; or the reason why it failed."""

    token_ids: list[int]
    num_accepted: int = 0
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None


def verify(
    requests: Sequence[Request],
    num_verified: Sequence[int],
    logits: Tensor,
    block: bool = False,
) -> list[VerifiedRequest]:
    """Verify the drafts of R requests.

    Args:
        num_verified: ``[R]`` drafts of each that the target has seen.
        logits: ``[sum(num_verified + 1), V]`` float32, request after request; changed in place.
        block: block verification instead of the standard one.
    """
    starts, total = [], 0
    for count in num_verified:
        starts.append(total)
        total += count + 1
    raw = [
        logits[start : start + count + 1].log_softmax(-1) if request.params.logprobs is not None else None
        for request, start, count in zip(requests, starts, num_verified, strict=True)
    ]
    for request, start, count in zip(requests, starts, num_verified, strict=True):
        if request.params.alters_target:
            _adjust(logits[start : start + count + 1], request, count)
    best, healthy = _best_to_host(logits)
    results: list[VerifiedRequest | None] = [None] * len(requests)
    sampled: list[int] = []
    for index, (request, start, count) in enumerate(zip(requests, starts, num_verified, strict=True)):
        rows = slice(start, start + count + 1)
        if not all(healthy[rows]):
            results[index] = VerifiedRequest([], error="the model's output is not finite")
        elif request.params.is_greedy:
            results[index] = _verify_greedy(request, count, best[rows])
        else:
            sampled.append(index)
    if sampled:
        verified = _verify_sampled(
            [requests[i] for i in sampled],
            [starts[i] for i in sampled],
            [num_verified[i] for i in sampled],
            logits,
            block,
        )
        for index, result in zip(sampled, verified, strict=True):
            results[index] = result
    return [
        _with_logprobs(result, r.params.logprobs, own) for result, r, own in zip(results, requests, raw, strict=True)
    ]


def _best_to_host(logits: Tensor) -> tuple[list[int], list[bool]]:
    best = argmax(logits)
    healthy = torch.isfinite(logits.gather(1, best[:, None])).squeeze(1)
    return best.tolist(), healthy.tolist()


def _adjust(rows: Tensor, request: Request, count: int) -> None:
    tokens = list(request.tokens)
    for position in range(count + 1):
        rows[position] = adjust_logits(rows[position], request.params, tokens, request.prompt_len, request.stop_ids)
        if position < count:
            assert request.draft is not None
            tokens.append(request.draft.tokens[position])


def _verify_greedy(request: Request, count: int, best: list[int]) -> VerifiedRequest:
    drafts = request.draft.tokens if request.draft is not None else []
    accepted = 0
    while accepted < count and drafts[accepted] == best[accepted]:
        accepted += 1
    return VerifiedRequest(best[: accepted + 1], accepted)


def _verify_sampled(
    requests: Sequence[Request], starts: Sequence[int], num_verified: Sequence[int], logits: Tensor, block: bool
) -> list[VerifiedRequest]:
    counts = [count + 1 for count in num_verified]
    rows = torch.tensor([s + i for s, count in zip(starts, counts, strict=True) for i in range(count)])
    owners = torch.tensor([index for index, count in enumerate(counts) for _ in range(count)])
    settings = RowSettings.of([request.params for request in requests])
    drafts = [request.draft if count else None for request, count in zip(requests, num_verified, strict=True)]
    width = max(num_verified)
    tokens, uniforms = [], []
    drawn_probs = torch.ones(len(requests), width)
    for index, (request, draft, count) in enumerate(zip(requests, drafts, num_verified, strict=True)):
        draws, padding = request.draws.draw(count + 1), [0] * (width - count)
        uniforms.append([*draws[:count], *padding, draws[count]])
        tokens.append([*(draft.tokens[:count] if draft is not None else ()), *padding])
        if draft is not None:
            drawn_probs[index, :count] = draft.round.drawn_probs[draft.row, :count]
    draft_tokens = torch.tensor(tokens, dtype=torch.int64).view(len(requests), width)

    def target_law(wanted: Tensor) -> Tensor:
        return sampling_probs(logits[rows[wanted]], settings.select(owners[wanted]))

    law = RequestDraftLaw(drafts, logits.shape[1])
    method = block_verify if block else rejection_sample
    verification = method(
        target_law, num_verified, draft_tokens, drawn_probs, law, torch.tensor(uniforms, dtype=torch.float64)
    )
    return _tokens_to_host(verification, draft_tokens)


def _tokens_to_host(verification: Verification, draft_tokens: Tensor) -> list[VerifiedRequest]:
    columns = (draft_tokens.tolist(), verification.num_accepted.tolist(), verification.next_tokens.tolist())
    return [VerifiedRequest([*drafts[:count], extra], count) for drafts, count, extra in zip(*columns, strict=True)]


def _with_logprobs(result: VerifiedRequest | None, num_top: int | None, raw: Tensor | None) -> VerifiedRequest:
    assert result is not None
    if raw is None or num_top is None or result.error is not None:
        return result
    count = len(result.token_ids)
    chosen = raw[torch.arange(count), torch.tensor(result.token_ids)].tolist()
    top = raw[:count].topk(num_top, dim=-1) if num_top else None
    values, ids = (top.values.tolist(), top.indices.tolist()) if top else ([[]] * count, [[]] * count)
    logprobs = [
        TokenLogprob(token, logprob, tuple(zip(i, v, strict=True)))
        for token, logprob, v, i in zip(result.token_ids, chosen, values, ids, strict=True)
    ]
    return VerifiedRequest(result.token_ids, result.num_accepted, logprobs)
