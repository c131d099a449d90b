"""What a draft distribution tells about a slot's chance, and whether a decision may look at it.

A feature is *lossless* when it is known before the slot's own token is drawn: a function of the accepted prefix, of
the draft distribution at the slot, or of earlier draws. The probability of the drawn token itself predicts better,
but a decision that reads it changes the distribution of the output (two tokens, target [.5, .5], draft [.2, .8],
trim when the drawn token's probability is under .5: the output becomes [.4, .6]).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FEATURE_LIMIT = 40.0
"""Every feature is clamped to this magnitude; sigmoid(40) is 1 - 4e-18, beyond what float64 can tell from 1."""

GREEDY_TEMPERATURE = 1e-5
"""At or under this temperature samplers take the argmax, and features read the unscaled logits."""

_CHUNK_ELEMENTS = 1 << 20  # bounds the probabilities held at once to 4 MiB on a CPU
_CANCELLING = 0.01
_ROW_FEATURES: dict[str, Callable[[float, float, float, float], float]] = {  # of top, others, second, entropy
    "logit_q_max": lambda top, others, second, entropy: math.log(top / others),
    "log_q_max": lambda top, others, second, entropy: -math.log1p(others / top),
    "neg_log_neg_log_q_max": lambda top, others, second, entropy: -math.log(math.log1p(others / top)),
    "top2_margin": lambda top, others, second, entropy: math.log(top / second),
    "entropy": lambda top, others, second, entropy: entropy,
}


class LossyFeatureError(ValueError):
    """A verification decision was asked to read a feature that would change the output distribution."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One number per draft slot, in log or log-odds units unless said otherwise."""

    name: str
    lossless: bool
    description: str
    source: Literal["distribution", "context"] = "distribution"


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("logit_q_max", True, "log-odds of the drafter's most likely token"),
        Feature("log_q_max", True, "log probability of the drafter's most likely token"),
        Feature("neg_log_neg_log_q_max", True, "-log(-log(probability of the most likely token))"),
        Feature("top2_margin", True, "logit of the most likely token minus that of the second"),
        Feature("entropy", True, "entropy of the draft distribution, in nats"),
        Feature("logit_q_sampled", False, "log-odds of the slot's own drawn token (study only)"),
        Feature("log_q_sampled", False, "log probability of the slot's own drawn token (study only)"),
        Feature("neg_log_neg_log_q_sampled", False, "-log(-log(probability of the drawn token)) (study only)"),
        Feature("log_q_previous", True, "log probability of the token drawn just before in the same draft", "context"),
        Feature("sum_log_q_previous", True, "log probability of all tokens drawn before in the same draft", "context"),
        Feature("request_acceptance", True, "smoothed log-odds of the request's recent acceptance", "context"),
        Feature("is_greedy", True, "1 for a request that samples at temperature 0, else 0 (no unit)", "context"),
    )
}


def get_feature(name: str) -> Feature:
    """Look a feature up by name; ValueError with the nearest known name if there is none."""
    if name not in FEATURES:
        close = difflib.get_close_matches(name, FEATURES, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"known features: {', '.join(FEATURES)}"
        raise ValueError(f'unknown feature "{name}"; {hint}')
    return FEATURES[name]


def require_lossless(names: Sequence[str]) -> None:
    """Raise LossyFeatureError, naming the feature, unless a decision may look at every one of ``names``."""
    for name in names:
        if not get_feature(name).lossless:
            raise LossyFeatureError(
                f'feature "{name}" depends on the slot\'s own drawn token: a decision that reads it changes the output '
                f"distribution; use {', '.join(f.name for f in FEATURES.values() if f.lossless)}"
            )


def split_features(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Part ``names`` into those read off the draft distribution and those read off what came before the slot."""
    kinds = [(name, get_feature(name).source) for name in names]
    return (
        tuple(name for name, source in kinds if source == "distribution"),
        tuple(name for name, source in kinds if source == "context"),
    )


def draft_features(
    logits: Tensor,
    temperatures: Tensor,
    names: Sequence[str],
    drafted_tokens: Tensor | None = None,
    probs_out: Tensor | None = None,
) -> Tensor:
    """Features of draft distributions from their logits, sharing one softmax over the vocabulary.

    Args:
        logits: ``[N, V]`` draft logits of any float dtype; -inf marks a token that can not be drawn.
        temperatures: ``[N]`` sampling temperatures; up to 1e-5 counts as greedy and reads the unscaled logits.
        names: which features, in order; distribution features only.
        drafted_tokens: ``[N]`` drawn token ids, needed by the lossy ``*_sampled`` features alone.
        probs_out: ``[N, V]`` float32 that receives the softmax, for a sampler to go on with.

    Returns:
        ``[N, p]`` float32 within ±40. A row without a finite logit, or with NaN or +inf, gives NaN.

    Raises:
        ValueError: shapes that do not fit, a negative temperature, an unknown or context feature.
    """
    _check_rows(logits, names, drafted_tokens)
    if temperatures.shape != logits.shape[:1]:
        raise ValueError(f"temperatures must be [{logits.shape[0]}], got {list(temperatures.shape)}")
    if probs_out is not None and (probs_out.shape != logits.shape or probs_out.dtype != torch.float32):
        raise ValueError(
            f"probs_out must be float32 {list(logits.shape)}, got {probs_out.dtype} {list(probs_out.shape)}"
        )
    scales = _inverse_temperatures_to_host(temperatures)
    num_rows, size = logits.shape
    chunk = max(1, _CHUNK_ELEMENTS * (64 if logits.is_cuda else 1) // size)
    if probs_out is None:
        buffer = torch.empty(min(chunk, num_rows), size, device=logits.device)
    parts = []
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        scaled = logits[rows].detach().float()
        if scales is not None:
            scaled = scaled * scales[rows, None]
        target = buffer[: scaled.shape[0]] if probs_out is None else probs_out[rows]
        probs = torch.softmax(scaled, dim=-1, out=target)
        tokens = None if drafted_tokens is None else drafted_tokens[rows]
        parts.append(_features_of(probs, scaled, names, tokens))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else logits.new_empty(0, len(names), dtype=torch.float32)


def draft_features_from_probs(probs: Tensor, names: Sequence[str], drafted_tokens: Tensor | None = None) -> Tensor:
    """Features from probabilities that a sampler has computed already: no exponential is taken again.

    Args:
        probs: ``[N, V]`` float32 softmax of the logits after temperature (of the unscaled logits for greedy rows).
            Probabilities after top-k, top-p or min-p are a lossless choice too, but say less: a nucleus of one
            token reads as certainty.
        names: which features, in order; distribution features only.
        drafted_tokens: ``[N]`` drawn token ids, needed by the lossy ``*_sampled`` features alone.

    Returns:
        ``[N, p]`` float32 as from :func:`draft_features`.
    """
    _check_rows(probs, names, drafted_tokens)
    return _features_of(probs.float(), None, names, drafted_tokens)


def assemble_features(
    names: Sequence[str],
    distribution: Tensor,
    log_q_drawn: Tensor | None = None,
    request_acceptance: Tensor | None = None,
    is_greedy: Tensor | None = None,
) -> Tensor:
    """Put distribution and context features together in the order of ``names``.

    Position i reads the draws of positions before i only, so the result is lossless as long as survival is formed
    as a running product of confidences.

    Args:
        names: all features of the model, in order.
        distribution: ``[R, K, d]`` distribution features, in the order they have within ``names``.
        log_q_drawn: ``[R, K]`` log probability of each drawn token under its own draft distribution.
        request_acceptance: ``[R]`` from :class:`RecentAcceptance`.
        is_greedy: ``[R]`` bool, request samples at temperature 0.

    Returns:
        ``[R, K, p]`` float32.
    """
    distribution_names, context_names = split_features(names)
    if distribution.dim() != 3 or distribution.shape[2] != len(distribution_names):
        raise ValueError(f"distribution must be [R, K, {len(distribution_names)}], got {list(distribution.shape)}")
    if not context_names:
        return distribution
    num_requests, num_positions, _ = distribution.shape
    columns = dict(zip(distribution_names, distribution.unbind(-1), strict=True))
    if log_q_drawn is not None:
        before = torch.nn.functional.pad(log_q_drawn.float()[:, :-1], (1, 0))
        columns["log_q_previous"] = before
        columns["sum_log_q_previous"] = before.cumsum(-1)
    if request_acceptance is not None:
        columns["request_acceptance"] = request_acceptance.float()[:, None].expand(num_requests, num_positions)
    if is_greedy is not None:
        columns["is_greedy"] = is_greedy.float()[:, None].expand(num_requests, num_positions)
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"features {missing} need an input that was not given (log_q_drawn, request_acceptance, ...)")
    return torch.stack([columns[name] for name in names], dim=-1).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)


class RecentAcceptance:
    """Recent acceptance of one request, as log-odds smoothed towards a prior: new requests start at the prior."""

    __slots__ = ("_accepted", "_observed")
    DECAY = 0.9  # per step: the last ten steps count
    PRIOR_SLOTS = 4.0

    def __init__(self) -> None:
        self._accepted = self._observed = 0.0

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """Record one step: the judged slots are the accepted ones and the first rejected one."""
        self._accepted = self._accepted * self.DECAY + num_accepted
        self._observed = self._observed * self.DECAY + min(num_verified, num_accepted + 1)

    def logit(self, prior: float = 0.5) -> float:
        """Log-odds of acceptance given ``prior``, the acceptance of all requests, weighing as four slots."""
        prior = min(max(prior, 0.01), 0.99)
        accepted = self._accepted + prior * self.PRIOR_SLOTS
        rejected = self._observed - self._accepted + (1 - prior) * self.PRIOR_SLOTS
        return math.log(accepted / rejected)


def _check_rows(rows: Tensor, names: Sequence[str], drafted_tokens: Tensor | None) -> None:
    if rows.dim() != 2 or rows.shape[1] == 0:
        raise ValueError(f"expected [N, V] with V > 0, got {list(rows.shape)}")
    for name in names:
        if get_feature(name).source == "context":
            raise ValueError(f'"{name}" is not read off a draft distribution; add it with assemble_features')
        if drafted_tokens is None and not FEATURES[name].lossless:
            raise ValueError(f'feature "{name}" needs drafted_tokens')
    if drafted_tokens is not None and drafted_tokens.shape != rows.shape[:1]:
        raise ValueError(f"drafted_tokens must be [{rows.shape[0]}], got {list(drafted_tokens.shape)}")


def _inverse_temperatures_to_host(temperatures: Tensor) -> Tensor | None:
    """``[N]`` factors for the logits, 1 for greedy rows; None if every factor is known to be 1."""
    if temperatures.is_cuda:
        return torch.where(temperatures > GREEDY_TEMPERATURE, 1 / temperatures.clamp_min(GREEDY_TEMPERATURE), 1.0)
    values = temperatures.tolist()
    for value in values:
        if not value >= 0:
            raise ValueError(f"temperatures must not be negative, got {value:g}")
    scales = [1 / value if value > GREEDY_TEMPERATURE else 1.0 for value in values]
    return None if all(scale == 1 for scale in scales) else torch.tensor(scales)


def _features_of(probs: Tensor, logits: Tensor | None, names: Sequence[str], drafted_tokens: Tensor | None) -> Tensor:
    if not probs.is_cuda and all(name in _ROW_FEATURES for name in names):
        return _row_features_to_host(probs, logits, names)
    return features_reference(probs, logits, names, drafted_tokens)


def features_reference(
    probs: Tensor, logits: Tensor | None, names: Sequence[str], drafted_tokens: Tensor | None
) -> Tensor:
    """Every distribution feature in plain tensor operations; the twin that the fast path is tested against."""
    # torch's CPU argmax takes five times as long as numpy's.
    index = probs.argmax(1) if probs.is_cuda else torch.from_numpy(probs.detach().numpy().argmax(1))
    without_top = probs.scatter(1, index[:, None], 0.0)
    top, others = probs.gather(1, index[:, None])[:, 0], without_top.sum(1)
    columns = _odds_features("max", top, others)
    if "top2_margin" in names:
        columns["top2_margin"] = torch.log(top / without_top.amax(1))
    if "entropy" in names:
        columns["entropy"] = _entropy(probs, logits)
    if drafted_tokens is not None:
        drawn = probs.gather(1, drafted_tokens[:, None]).squeeze(1)
        # The top stays inside the rest unless it was drawn itself, so the subtraction can not cancel.
        rest = torch.where(drafted_tokens == index, others, top + (others - drawn).clamp_min(0))
        columns |= _odds_features("sampled", drawn.clamp_min(1e-37), rest)
    features = torch.stack([columns[name] for name in names], dim=-1)
    return features.clamp_(-FEATURE_LIMIT, FEATURE_LIMIT)


def _odds_features(suffix: str, prob: Tensor, others: Tensor) -> dict[str, Tensor]:
    negative_log = torch.log1p(others / prob)
    return {
        f"logit_q_{suffix}": torch.log(prob / others),
        f"log_q_{suffix}": -negative_log,
        f"neg_log_neg_log_q_{suffix}": -torch.log(negative_log),
    }


def _row_features_to_host(probs: Tensor, logits: Tensor | None, names: Sequence[str]) -> Tensor:
    """Lossless features on a CPU, row by row.

    After a pass over the vocabulary has flushed the caches each further tensor operation costs 15 to 30 µs against
    1 ms of the softmax itself, so what is left of a row is done on Python floats. An argmax would cost a fifth of a
    softmax: for the features of the top alone only rows where one minus the top would cancel pay for it (5 digits
    remain up to 0.99).
    """
    functions = [_ROW_FEATURES[name] for name in names]
    need_second, need_entropy = "top2_margin" in names, "entropy" in names
    rows = []
    for row, top in enumerate(probs.amax(1).tolist()):
        others, second, entropy = 1 - top, 0.0, 0.0
        if others < _CANCELLING or need_second:
            values = probs[row].detach().numpy()
            at = int(values.argmax())
            before, after = values[:at], values[at + 1 :]
            others = float(before.sum()) + float(after.sum())
            second = max(float(before.max(initial=0.0)), float(after.max(initial=0.0)))
        if need_entropy:
            entropy = _entropy_to_host(top, probs[row], None if logits is None else logits[row])
        others, second = max(others, 1e-300), max(second, 1e-300)  # nan stays nan
        rows.append([function(top, others, second, entropy) for function in functions])
    return torch.tensor(rows, dtype=torch.float32).view(-1, len(names)).clamp_(-FEATURE_LIMIT, FEATURE_LIMIT)


def _entropy_to_host(top: float, probs: Tensor, logits: Tensor | None) -> float:
    """One row; from logits it needs no logarithm: lse - q·logits, with lse from the top."""
    if logits is not None:
        entropy = float(logits.max()) - math.log(top) - float(torch.dot(probs, logits))
        if math.isfinite(entropy):
            return max(entropy, 0.0)
    drawable = probs[probs > 0]  # 0 * -inf is left out here
    return -float(torch.dot(drawable, drawable.log())) if top == top else math.nan


def _entropy(probs: Tensor, logits: Tensor | None) -> Tensor:
    if logits is None:
        return -torch.sum(probs * probs.clamp_min(1e-38).log(), dim=-1)
    # exp(-104) is 0 in float32: the limit only keeps 0 * inf out.
    below_peak = torch.clamp_max(logits.amax(-1, keepdim=True) - logits, 104.0)
    return torch.sum(below_peak * probs, dim=-1) - probs.amax(-1).log()
