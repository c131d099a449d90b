"""Planners: how many draft slots of each request are worth verifying.

Every planner here can be run as a *sequential reveal*: it starts from no slots, sees the survival of each request's
next slot, admits the best one or stops for good. So whether a slot is verified never depends on the token drawn at it
or after it, and the output keeps the target's distribution (docs/adr/0001-non-anticipation.md).

The order of the reveal is by survival, ties by (position, request). Survival does not increase along a request, so that
order lists each request's slots from first to last, and one sort does the work of a heap.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trimtab.policy.reveal import (
    Array,
    Counts,
    PlanInput,
    PlannerHistory,
    Reveal,
    VerificationPlan,
    admit,
    best_budget,
    cap_counts,
    fill_bucket,
    reveal,
    update_history,
)

__all__ = [
    "BUILTIN_PLANNERS",
    "DEFAULT_PLANNER",
    "ConvexFillPlanner",
    "EarlyStopPlanner",
    "FixedPlanner",
    "LookaheadPlanner",
    "PlanInput",
    "Planner",
    "PlannerHistory",
    "PricePlanner",
    "StalePlanner",
    "VerificationPlan",
    "make_planner",
    "planner_names",
    "reveal",
    "update_history",
]

ENTRY_POINT_GROUP = "trimtab.planners"
_MANY_BUCKETS = 8
_CAUTION = 4.0  # the finer the buckets, the nearer to the right place a convex stop is
_SCENARIO_ROWS = 64
_ROUNDING = 1e-6
_GOLDEN = 0.6180339887498949


@runtime_checkable
class Planner(Protocol):
    """Chooses admitted counts; pure: the same input gives the same plan."""

    @property
    def name(self) -> str:
        """What make_planner() knows it by."""
        ...

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Admitted counts ``[R]``, each at most the drafted count; may look at history and revealed slots only."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPlanner:
    """The first ``k`` drafts of every request, all that were drafted by default: no adaptive verification."""

    k: int | None = None
    name: str = field(default="fixed", init=False)

    def __post_init__(self) -> None:
        """Refuse a negative k."""
        if self.k is not None and self.k < 0:
            raise ValueError(f"k must not be negative, got {self.k}")

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Counts; the cap on verified tokens cuts deep positions first."""
        survival, drafted = inputs.survival, inputs.num_drafted
        wanted = drafted if self.k is None else np.maximum(inputs.floor, np.minimum(drafted, self.k))
        wanted = cap_counts(wanted, inputs.max_verified_tokens, survival.shape[1])
        positions = np.arange(survival.shape[1])
        budget = int(wanted.sum())
        tokens = len(wanted) + float(survival[positions < wanted[:, None]].sum())
        return VerificationPlan(wanted, budget, tokens, float(inputs.cost(inputs.base_tokens + budget)))


@dataclass(frozen=True, slots=True)
class StalePlanner:
    """Budget from the survival of one step ago, spent on the best slots of now."""

    name: str = field(default="stale", init=False)

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Top-B by live survival, B from history."""
        order = reveal(inputs)
        return admit(order, best_budget(_expected_tokens(inputs, order), order.ms))


@dataclass(frozen=True, slots=True)
class PricePlanner:
    """Every slot whose survival reaches the price that the last step's best budget would have paid."""

    name: str = field(default="price", init=False)

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Admit by a threshold from history."""
        order = reveal(inputs)
        expected = _expected_tokens(inputs, order)
        budget = best_budget(expected, order.ms)
        price = expected[budget] - expected[budget - 1] if budget else 1.0
        return admit(order, int(np.count_nonzero(order.gains >= price * (1 - _ROUNDING))))


@dataclass(frozen=True, slots=True)
class EarlyStopPlanner:
    """Admit until the first slot that does not improve tokens per millisecond. Stops short on staircases."""

    name: str = field(default="early_stop", init=False)

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Stop at the first non-improvement."""
        order = reveal(inputs)
        return admit(order, _first_stop(order.tokens, order.ms, None))


@dataclass(frozen=True, slots=True)
class ConvexFillPlanner:
    """Early stop on the convex minorant of the cost, then fill the bucket that is paid for."""

    rate: str = "history"
    name: str = field(default="convex_fill", init=False)

    def __post_init__(self) -> None:
        """Refuse an unknown rate."""
        _check_rate(self.rate)

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Stop on the minorant and fill."""
        order = reveal(inputs)
        return admit(order, fill_bucket(order, _convex_stop(inputs, order, _rate(inputs, self.rate))))


@dataclass(frozen=True, slots=True)
class LookaheadPlanner:
    """At the end of each bucket of the cost, enter the next one if the tail predicted from history pays for it.

    Within a bucket slots are free. Where there are many buckets, a convex stop at a higher rate crosses the first ones,
    whose slots pay in any case; that too stops for good and takes nothing back.
    """

    rate: str = "history"
    name: str = field(default="lookahead", init=False)

    def __post_init__(self) -> None:
        """Refuse an unknown rate."""
        _check_rate(self.rate)

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Commit bucket by bucket."""
        order = reveal(inputs)
        rate = _rate(inputs, self.rate)
        num_buckets = int(np.count_nonzero(np.diff(order.ms)))
        many = num_buckets > _MANY_BUCKETS
        num = _convex_stop(inputs, order, rate, 1.0 + _CAUTION / num_buckets) if many else 0
        while True:
            num = fill_bucket(order, num + _first_stop(order.tokens[num:], order.ms[num:], rate))
            if num == len(order.slots) or not _next_bucket_pays(inputs, order, num, rate):
                return admit(order, num)
            num = fill_bucket(order, num + 1)


def _next_bucket_pays(inputs: PlanInput, order: Reveal, num: int, rate: float | None) -> bool:
    """Whether some number of further slots is expected to pay, given what ``num`` slots have revealed."""
    worth = order.tokens[num] / order.ms[num] if rate is None else rate
    price = worth * (order.ms[num + 1 :] - order.ms[num])
    # The next slot is the best of all that are left, so that many like it are the most that can be gained.
    next_gain = order.tokens[num + 1] - order.tokens[num]
    if not (next_gain * np.arange(1, len(price) + 1) > price).any():
        return False
    num_requests, num_positions = inputs.survival.shape
    reached = order.floor + np.bincount(order.slots[:num] % num_requests, minlength=num_requests)
    next_position = np.minimum(reached, num_positions - 1)
    frontier = inputs.survival[np.arange(num_requests), next_position]
    left = np.arange(num_positions) < inputs.num_drafted[:, None]
    left &= np.arange(num_positions) >= reached[:, None]
    # The next slots of all requests are known and the least that can be gained.
    known = -np.sort(-frontier[reached < inputs.num_drafted])[: len(price)]
    if (np.cumsum(known) > price[: len(known)]).any():
        return True
    gains = _predicted_gains(inputs.history, frontier, next_position, left)[: len(price)]
    return bool((gains > price[: len(gains)]).any())


def _predicted_gains(history: PlannerHistory, frontier: Array, next_position: Counts, left: NDArray[np.bool_]) -> Array:
    """Tokens expected from the best 1, 2, ... slots that are left.

    What follows each request's next slot is taken from recent drafts whose survival at that position ranked near, so
    that both the mean and the spread of tails count. With few requests this is averaged over several such scenarios,
    which are assigned by a fixed low-discrepancy sequence, without noise.

    Args:
        history: recent drafts.
        frontier: ``[R]`` survival of each request's next slot.
        next_position: ``[R]`` its position.
        left: ``[R, K]`` slots that were drafted and are not admitted.

    Returns:
        ``[R K]``.
    """
    requests = np.arange(len(frontier))
    rows = history.recent_filled()
    recent = rows[:: -(-len(rows) // _SCENARIO_ROWS)]  # [M, K]
    by_rank = np.argsort(recent, axis=0)
    rank = (recent[:, next_position] < frontier).sum(0)
    window = -(-len(recent) // 4)
    num_scenarios = -(-_SCENARIO_ROWS // len(frontier))
    shift = ((np.arange(num_scenarios)[:, None] + 0.5) / num_scenarios + requests * _GOLDEN) % 1.0
    place = np.clip(rank - window // 2, 0, len(recent) - window) + (shift * window).astype(np.int64)
    tails = recent[by_rank[place, next_position]]  # [scenarios, R, K]
    at_frontier = np.maximum(tails[:, requests, next_position], 1e-12)
    slots = np.where(left, (frontier / at_frontier)[..., None] * tails, 0.0).reshape(num_scenarios, -1)
    return np.asarray(np.cumsum(-np.sort(-slots, axis=1), axis=1).mean(0))


def _check_rate(rate: str) -> None:
    if rate not in ("history", "step"):
        raise ValueError(f'rate must be "history" or "step", got "{rate}"')


def _rate(inputs: PlanInput, kind: str) -> float | None:
    """Tokens that a millisecond is worth: what serving earns in the long run. None: what this step earns so far."""
    history = inputs.history
    if kind == "step" or history.reference == 0.0:
        return None
    reference = history.reference_rate(len(inputs.num_drafted), inputs.base_tokens, inputs.cost)
    return reference * history.tokens / history.reference


def _first_stop(tokens: Array, ms: Array, rate: float | None, caution: float = 1.0) -> int:
    """The first n whose next slot does not pay: its gain is less than the time it takes, at ``caution * rate``."""
    num = len(tokens) - 1
    worth = tokens[:-1] / ms[:num] if rate is None else rate
    stops = np.diff(tokens) <= caution * worth * np.diff(ms[: num + 1])
    first = int(np.argmax(stops)) if num else 0
    return first if num and stops[first] else num


def _convex_stop(inputs: PlanInput, order: Reveal, rate: float | None, caution: float = 1.0) -> int:
    base = inputs.base_tokens + int(order.floor.sum())
    minorant = inputs.cost.convex_minorant(base, base + order.limit)
    return _first_stop(order.tokens, minorant(base + np.arange(len(order.tokens))), rate, caution)


def _expected_tokens(inputs: PlanInput, order: Reveal) -> Array:
    """``[limit + 1]`` tokens expected after n slots, from the last step's survival scaled to as many requests."""
    num_requests = len(inputs.survival)
    history = inputs.history
    rows = history.recent_filled()[: max(history.num_last, 1)]
    totals = np.concatenate(([0.0], np.cumsum(-np.sort(-rows, axis=None))))
    share = num_requests / len(rows)
    wanted = np.arange(order.limit + 1) / max(share, 1e-9)
    return np.asarray(order.tokens[0] + share * np.interp(wanted, np.arange(len(totals)), totals))


BUILTIN_PLANNERS: dict[str, Callable[..., Planner]] = {
    "fixed": FixedPlanner,
    "stale": StalePlanner,
    "price": PricePlanner,
    "early_stop": EarlyStopPlanner,
    "convex_fill": ConvexFillPlanner,
    "lookahead": LookaheadPlanner,
}
DEFAULT_PLANNER = "lookahead"


def planner_names() -> list[str]:
    """Every name that :func:`make_planner` knows, registered ones included."""
    return [*BUILTIN_PLANNERS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def make_planner(name: str = DEFAULT_PLANNER, **options: Any) -> Planner:
    """Make a planner by name.

    Args:
        name: a key of BUILTIN_PLANNERS, or an entry point of ``trimtab.planners``: a callable that takes the options
            and returns a Planner.
        options: handed to the planner; ``k`` for fixed, ``rate`` for convex_fill and lookahead.

    Raises:
        ValueError: no such planner, with the nearest known name.
        TypeError: an option that the planner does not take, or what an entry point made is no Planner.
    """
    factory = BUILTIN_PLANNERS.get(name)
    if factory is None:
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            close = difflib.get_close_matches(name, planner_names(), n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(planner_names())}"
            raise ValueError(f'unknown planner "{name}"; {hint}')
        factory = points[0].load()
    planner = factory(**options)
    if inspect.isclass(planner) or not isinstance(planner, Planner):
        raise TypeError(f'"{name}" made {planner!r}, which lacks name or plan()')
    return planner
