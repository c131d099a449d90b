"""From logits to the law a token is drawn from, and the draw itself. Rows are independent; nothing here knows requests.

The same functions make the target's law and the draft's law, so the acceptance test compares like with like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.sampling_params import SamplingParams

# Nucleus search looks at so many of the most likely tokens first: sorting 49,152 takes 40 times as long as finding 128.
CANDIDATE_TIERS = (128, 2048)
DRAW_BLOCK = 128


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Truncation settings of L rows, each ``[L]``; temperature 0 makes a row one-hot at its largest logit."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64, 0: off
    top_p: Tensor  # float32
    min_p: Tensor  # float32

    @staticmethod
    def of(params: Sequence[SamplingParams], repeats: Sequence[int] | None = None) -> RowSettings:
        """Settings of each request, repeated for its rows."""
        counts = repeats if repeats is not None else [1] * len(params)
        columns = [
            [value for one, count in zip(values, counts, strict=True) for value in [one] * count]
            for values in (
                [0.0 if p.is_greedy else p.temperature for p in params],
                [max(p.top_k, 0) for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
            )
        ]
        return RowSettings(
            torch.tensor(columns[0], dtype=torch.float32),
            torch.tensor(columns[1], dtype=torch.int64),
            torch.tensor(columns[2], dtype=torch.float32),
            torch.tensor(columns[3], dtype=torch.float32),
        )

    @property
    def softmax_temperature(self) -> Tensor:
        """``[L]`` temperatures to divide by; greedy rows are not scaled."""
        return self.temperature.masked_fill(self.temperature == 0, 1.0)

    def truncating(self) -> list[int]:
        """Sampled rows that keep less than the whole vocabulary."""
        cut = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return (cut & (self.temperature > 0)).nonzero().squeeze(1).tolist()

    def select(self, rows: Sequence[int] | Tensor) -> RowSettings:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return RowSettings(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def sampling_probs(logits: Tensor, settings: RowSettings) -> Tensor:
    """The law each row is drawn from: temperature, then top-k, top-p and min-p, as transformers orders them.

    Args:
        logits: ``[L, V]`` float; -inf means impossible. At least one finite entry a row.
        settings: of the L rows.

    Returns:
        ``[L, V]`` float32 probabilities; rows sum to 1.
    """
    temperature = settings.softmax_temperature
    logits = logits.float()
    plain = bool((temperature == 1).all())
    probs = torch.softmax(logits if plain else logits / temperature.to(logits.device)[:, None], dim=-1)
    restrict_probs(probs, settings)
    return probs


def restrict_probs(probs: Tensor, settings: RowSettings) -> None:
    """Apply top-k, top-p and min-p, in place; greedy rows become certain of their most likely token.

    Args:
        probs: ``[L, V]`` softmax after temperature (of the unscaled logits for greedy rows).
    """
    rows = settings.truncating()
    if len(rows) == len(probs):
        _truncate(probs, settings)
    elif rows:
        part = probs[rows]
        _truncate(part, settings.select(rows))
        probs[rows] = part
    greedy = settings.temperature == 0
    if bool(greedy.any()):
        greedy_rows = greedy.nonzero().squeeze(1).to(probs.device)
        best = argmax(probs[greedy_rows])
        probs[greedy_rows] = 0
        probs[greedy_rows, best] = 1


def argmax(rows: Tensor) -> Tensor:
    """``[L, V]`` to ``[L]`` int64; the first NaN of a row wins. numpy's is five times as fast as torch's on a CPU."""
    return rows.argmax(-1) if rows.is_cuda else torch.from_numpy(rows.numpy().argmax(-1))


def _truncate(probs: Tensor, settings: RowSettings) -> None:
    """Zero what top-k, top-p and min-p drop and renormalise, in place."""
    thresholds = _thresholds(probs, settings)
    probs.masked_fill_(probs < thresholds[:, None], 0.0)
    probs.div_(probs.sum(-1, keepdim=True))


def _thresholds(probs: Tensor, settings: RowSettings) -> Tensor:
    """``[L]`` smallest probability that each row keeps; looks at few candidates unless a row needs more."""
    num_rows, vocab_size = probs.shape
    thresholds = torch.zeros(num_rows, dtype=probs.dtype, device=probs.device)
    left = torch.arange(num_rows, device=probs.device)
    for tier in (*CANDIDATE_TIERS, vocab_size):
        count = min(tier, vocab_size)
        part = probs if len(left) == num_rows else probs[left]
        candidates = part.topk(count, dim=-1).values
        found, enough = _cut(candidates, settings.select(left.tolist()), complete=count == vocab_size)
        thresholds[left[enough]] = found[enough]
        left = left[~enough]
        if len(left) == 0:
            break
    return thresholds


def _cut(candidates: Tensor, settings: RowSettings, complete: bool) -> tuple[Tensor, Tensor]:
    """Thresholds from the C most likely tokens ``[L, C]`` (descending), and whether C was enough for each row."""
    count = candidates.shape[1]
    device = candidates.device
    top_k, top_p = settings.top_k.to(device), settings.top_p.to(device)
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, 1 << 60))
    inside = torch.arange(count, device=device)[None, :] < limit[:, None]
    kept = candidates * inside
    # Top-p counts the mass of what top-k left; without top-k that is the whole row, 1.
    total = torch.where(top_k > 0, kept.sum(-1), torch.ones_like(kept[:, 0]))
    mass_before = kept.cumsum(-1) - kept
    keep = inside & (mass_before < (top_p * total)[:, None])
    keep[:, 0] = True
    num_kept = keep.sum(-1)
    smallest = candidates.gather(1, (num_kept - 1)[:, None]).squeeze(1)
    threshold = torch.where((top_k > 0) | (top_p < 1), smallest, torch.zeros_like(smallest))
    threshold = torch.maximum(threshold, settings.min_p.to(device) * candidates[:, 0])
    if complete:
        return threshold, torch.ones_like(num_kept, dtype=torch.bool)
    k_known = (top_k == 0) | (top_k <= count)
    p_known = (top_p >= 1) | (num_kept < torch.minimum(limit, torch.full_like(limit, count))) | (limit <= count)
    return threshold, k_known & p_known


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row by inverting its distribution function.

    Args:
        probs: ``[N, V]`` non-negative weights, not necessarily normalised; each row has a positive entry.
        uniforms: ``[N]`` in [0, 1).

    Returns:
        ``[N]`` int64 tokens, each of positive weight.
    """
    num_rows, vocab_size = probs.shape
    padding = -vocab_size % DRAW_BLOCK
    padded = torch.nn.functional.pad(probs, (0, padding)) if padding else probs
    blocks = padded.view(num_rows, -1, DRAW_BLOCK)
    block_sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = uniforms.to(probs.device, torch.float64) * block_sums[:, -1]
    block = torch.searchsorted(block_sums, goal[:, None], right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, block_sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, DRAW_BLOCK)).squeeze(1).double().cumsum(-1)
    offset = torch.searchsorted(inner, goal[:, None] - before, right=True).clamp_(max=DRAW_BLOCK - 1)
    token = (block * DRAW_BLOCK + offset).squeeze(1).clamp_(max=vocab_size - 1)
    # Rounding at the edge of a block can point at a token of weight 0; then the most likely one stands in.
    impossible = probs.gather(1, token[:, None]).squeeze(1) <= 0
    return torch.where(impossible, probs.argmax(-1), token) if bool(impossible.any()) else token


def adjust_logits(
    logits: Tensor, params: SamplingParams, tokens: Sequence[int], prompt_len: int, stop_ids: Sequence[int] = ()
) -> Tensor:
    """Penalties, bias and the ban of stop tokens before `min_tokens`, for one row.

    Args:
        logits: ``[V]`` float32; not changed.
        tokens: prompt and output before this row's token, drafted ones included.
        stop_ids: tokens that end the output.

    Returns:
        ``[V]`` float32.
    """
    logits = logits.clone()
    vocab_size = len(logits)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({t for t in tokens if t < vocab_size}), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    output = torch.tensor(tokens[prompt_len:], dtype=torch.int64, device=logits.device)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        counts = torch.bincount(output, minlength=vocab_size)[:vocab_size].float()
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.logit_bias:
        add_bias(logits, params.logit_bias)
    if len(tokens) - prompt_len < params.min_tokens and stop_ids:
        logits[list(stop_ids)] = float("-inf")
    return logits


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    """Add a bias to some tokens of ``[V]`` logits, in place."""
    index = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    logits[index] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
