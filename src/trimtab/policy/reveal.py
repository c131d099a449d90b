"""What planners see and give back: the step's input, the history of earlier steps, the order of the reveal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab.policy.cost import CostCurve

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

_PRIOR_CONTINUATION = 0.7
_PROFILE_DECAY = 0.98
_RATE_DECAY = 0.98
_RECENT_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class PlannerHistory:
    """What planners may know of earlier steps. Never changed; :func:`update_history` makes the next one."""

    num_steps: int
    recent: Array  # [M, K] survival of recent drafts, newest first, NaN past what was drafted; the last step's whole
    num_last: int  # rows of them that are of the last step
    survivors: Array  # [K] decayed sums of survival at each position
    at_risk: Array  # [K] decayed sums of survival just before it
    tokens: float  # decayed sum of expected tokens
    reference: float  # decayed sum of what reference_rate() promised in the same time

    @classmethod
    def start(cls, num_positions: int) -> PlannerHistory:
        """No history: every position continues with probability 0.7 until seen otherwise."""
        ones = np.ones(num_positions)
        return cls(0, np.zeros((0, num_positions)), 0, _PRIOR_CONTINUATION * ones, ones, 0.0, 0.0)

    @property
    def continuation(self) -> Array:
        """``[K]`` mean chance to survive each position, given survival up to it."""
        return np.asarray(self.survivors / self.at_risk)

    def recent_filled(self) -> Array:
        """``[M, K]`` recent survival, carried on by the mean continuation past what was drafted; M is at least 1."""
        mean = self.continuation
        if not len(self.recent):
            return np.asarray(mean.cumprod()[None])
        missing = np.isnan(self.recent)
        ratios = np.where(missing, mean, 1.0).cumprod(axis=1)
        return np.asarray(np.fmin.accumulate(self.recent, axis=1) * ratios)

    def reference_rate(self, num_requests: int, base_tokens: int, cost: CostCurve) -> float:
        """Tokens per millisecond if every request had the mean survival and the best common depth were verified."""
        depths = np.arange(len(self.survivors) + 1)
        expected = np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(self.continuation))))
        return float((num_requests * expected / cost(base_tokens + num_requests * depths)).max())


@dataclass(frozen=True, slots=True, eq=False)
class PlanInput:
    """All that a planner sees of the coming step: R decoding requests, K draft positions.

    Arrays are converted and checked once, here. ``base_tokens`` counts the tokens that the step has anyway: one per
    decoding request, and those of prefill. ``forced`` requests are verified untrimmed (exploration), chosen
    without a look at drafted tokens. ``committed`` slots are verified whatever their survival (a drafter that looked at
    them while it drafted, see RevealDepth); after construction it covers the forced ones too.
    """

    survival: Array  # [R, K] in [0, 1], non-increasing along a request
    num_drafted: Counts  # [R]
    base_tokens: int
    cost: CostCurve  # over all tokens of the step
    history: PlannerHistory
    max_verified_tokens: int | None = None  # cap on admitted slots in all
    forced: NDArray[np.bool_] | None = None  # [R]
    committed: Counts | None = None  # [R]

    def __post_init__(self) -> None:
        """Refuse what no drafter or confidence source can mean."""
        survival = np.asarray(self.survival, dtype=np.float64)
        drafted = np.asarray(self.num_drafted)
        if survival.ndim != 2 or drafted.shape != survival.shape[:1]:
            raise ValueError(
                f"need survival [R, K] and num_drafted [R], got {list(survival.shape)} and {list(drafted.shape)}"
            )
        num_requests, num_positions = survival.shape
        if drafted.size and (drafted.dtype.kind not in "iu" or drafted.min() < 0 or drafted.max() > num_positions):
            raise ValueError(f"num_drafted must be whole numbers in [0, {num_positions}], got {drafted.tolist()}")
        if not ((survival >= 0) & (survival <= 1)).all():
            raise ValueError(f"survival must lie in [0, 1], got {survival[~((survival >= 0) & (survival <= 1))][0]}")
        if (survival[:, 1:] > survival[:, :-1]).any():
            raise ValueError("survival must not increase along a request; make it with survival_probs()")
        forced = np.zeros(num_requests, dtype=bool) if self.forced is None else np.asarray(self.forced)
        if forced.dtype != np.bool_ or forced.shape != (num_requests,):
            raise ValueError(f"forced must be bool [R], got {forced.dtype} {list(forced.shape)}")
        committed = np.zeros(num_requests, dtype=np.int64) if self.committed is None else np.asarray(self.committed)
        if committed.shape != (num_requests,) or (committed < 0).any() or (committed > drafted).any():
            raise ValueError(f"committed must be [R] in [0, num_drafted], got {committed.tolist()}")
        committed = np.where(forced, drafted, committed).astype(np.int64)
        if self.base_tokens < num_requests:
            raise ValueError(f"base_tokens {self.base_tokens} is less than one per request ({num_requests})")
        if self.max_verified_tokens is not None and self.max_verified_tokens < 0:
            raise ValueError(f"max_verified_tokens must not be negative, got {self.max_verified_tokens}")
        if self.history.survivors.shape != (num_positions,):
            raise ValueError(f"history is of K = {len(self.history.survivors)}, survival of K = {num_positions}")
        object.__setattr__(self, "survival", survival)
        object.__setattr__(self, "num_drafted", drafted.astype(np.int64))
        object.__setattr__(self, "forced", forced)
        object.__setattr__(self, "committed", committed)

    @property
    def floor(self) -> Counts:
        """``[R]`` slots that are verified whatever their survival, up to the cap by (position, request)."""
        assert self.committed is not None
        return cap_counts(self.committed, self.max_verified_tokens, self.survival.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class VerificationPlan:
    """How many slots of each request go to the target, and what is expected of the step."""

    num_verified: Counts  # [R]
    budget: int  # their sum
    expected_tokens: float  # one per request, and the survival of every admitted slot
    expected_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Reveal:
    """The slots in reveal order, after the committed ones. ``n`` always counts slots admitted beyond those.

    ``limit`` and ``ms`` know how much was drafted, but not which of it has survival 0: that would be a look ahead.
    """

    slots: NDArray[np.int64]  # [N] position * R + request, only those with survival above 0
    gains: Array  # [N] their survival, rounded to float32; non-increasing
    tokens: Array  # [N + 1] expected tokens after n slots
    ms: Array  # [limit + 1] cost after n slots
    limit: int  # slots that may be admitted at most
    floor: Counts  # [R] committed slots


def cap_counts(counts: Counts, cap: int | None, num_positions: int) -> Counts:
    """``counts`` cut to ``cap`` in all, deep positions first."""
    if cap is None or counts.sum() <= cap:
        return counts
    slots = np.flatnonzero((np.arange(num_positions)[:, None] < counts).ravel())[:cap]
    return np.bincount(slots % len(counts), minlength=len(counts))


def reveal(inputs: PlanInput) -> Reveal:
    """Put the slots of a step into the one order in which planners may look at them."""
    survival, drafted, floor = inputs.survival, inputs.num_drafted, inputs.floor
    num_requests, num_positions = survival.shape
    positions = np.arange(num_positions)[:, None]  # slots are [K, R], so that a stable sort breaks ties as promised
    left = (positions >= floor) & (positions < drafted)
    num_floor = int(floor.sum())
    limit = int(drafted.sum())
    if inputs.max_verified_tokens is not None:
        limit = min(limit, inputs.max_verified_tokens)
    limit -= num_floor
    scores = np.where(left, survival.T, 0.0).ravel().astype(np.float32)
    # One sort of whole numbers, some four times as fast as a stable argsort of 2,048 floats: the bits of a float grow
    # with it unless it is negative (adding 0 turns -0 into 0), and below them the slot breaks ties.
    bits = (scores + 0).view(np.int32).astype(np.int64)
    slots = np.sort((-bits << 32) + np.arange(len(scores))) & 0xFFFFFFFF
    slots = slots[: min(limit, int(np.count_nonzero(bits)))]
    gains = scores[slots].astype(np.float64)
    start = num_requests + float(survival.T[positions < floor].sum()) if num_floor else num_requests
    tokens = start + np.concatenate(([0.0], np.cumsum(gains)))
    ms = inputs.cost(inputs.base_tokens + num_floor + np.arange(limit + 1))
    return Reveal(slots, gains, tokens, ms, limit, floor)


def admit(order: Reveal, num_admitted: int) -> VerificationPlan:
    """The plan that admits the first ``num_admitted`` slots of the reveal order, and the committed ones."""
    num_requests = len(order.floor)
    admitted = order.slots[:num_admitted]
    counts = order.floor
    if num_requests:
        counts = counts + np.bincount(admitted % num_requests, minlength=num_requests)
    num = len(admitted)
    return VerificationPlan(counts, int(counts.sum()), float(order.tokens[num]), float(order.ms[num]))


def best_budget(tokens: Array, ms: Array) -> int:
    """The n that maximises tokens / ms, the least one among equals. On *live* tokens this anticipates."""
    size = min(len(tokens), len(ms))
    return int(np.argmax(tokens[:size] / ms[:size]))


def fill_bucket(order: Reveal, num_admitted: int) -> int:
    """The most slots that cost no more than ``num_admitted`` of them."""
    paid = int(np.searchsorted(order.ms, order.ms[num_admitted], side="right")) - 1
    return min(paid, len(order.slots))


def update_history(history: PlannerHistory, inputs: PlanInput, plan: VerificationPlan) -> PlannerHistory:
    """History after a step: what was drafted and planned, whatever was verified. Pure.

    A step without drafts leaves no trace, so that a pause in drafting does not erase what was known.
    """
    drafted = inputs.num_drafted
    if not drafted.any():
        return history
    seen = np.arange(inputs.survival.shape[1]) < drafted[:, None]
    survival = np.where(seen, inputs.survival, 0.0)
    before = np.concatenate((np.ones((len(drafted), 1)), survival[:, :-1]), axis=1)
    rows = np.where(seen, survival, np.nan)[drafted > 0]
    # Positions that nobody drafted keep their sums: depth must not forget what lies deeper.
    decay = np.where(seen.any(0), _PROFILE_DECAY, 1.0)
    reference = history.reference_rate(len(drafted), inputs.base_tokens, inputs.cost)
    return replace(
        history,
        num_steps=history.num_steps + 1,
        recent=np.concatenate((rows, history.recent[: max(_RECENT_ROWS - len(rows), 0)])),
        num_last=len(rows),
        survivors=decay * history.survivors + survival.sum(0) + (1 - decay) * _PRIOR_CONTINUATION,
        at_risk=decay * history.at_risk + np.where(seen, before, 0.0).sum(0) + (1 - decay),
        tokens=_RATE_DECAY * history.tokens + plan.expected_tokens,
        reference=_RATE_DECAY * history.reference + reference * plan.expected_ms,
    )
