"""Draft depth: how many positions an autoregressive drafter should draft, when each costs another pass.

A depth decision is bound by the same rule as a planner's: it may read a live confidence only where every token that it
was computed from is already committed to verification. :class:`HistoryDepth` looks at no live value at all;
:class:`RevealDepth` commits slots while drafting and looks at those. An exit on the live mean of a batch changes the
output (the enumerator of ``trimtab.policy.testing`` has it as a failing case).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trimtab.policy.cost import CostCurve
from trimtab.policy.reveal import Array, Counts, PlannerHistory


@dataclass(frozen=True, slots=True, eq=False)
class DepthInput:
    """What is known before a round of drafting, K positions at most."""

    num_requests: int
    base_tokens: int  # tokens of the coming step without drafts
    cost: CostCurve  # of the coming step over all its tokens, without the time of drafting
    draft_ms: Array  # [K + 1] time of drafting 0..K positions
    history: PlannerHistory

    def __post_init__(self) -> None:
        """Refuse times that can not be."""
        draft_ms = np.asarray(self.draft_ms, dtype=np.float64)
        if draft_ms.shape != (len(self.history.survivors) + 1,):
            raise ValueError(f"draft_ms must be [K + 1] = [{len(self.history.survivors) + 1}], got {draft_ms.shape}")
        if not (np.isfinite(draft_ms) & (draft_ms >= 0)).all():
            raise ValueError(f"draft_ms must be finite and not negative, got {draft_ms.tolist()}")
        object.__setattr__(self, "draft_ms", draft_ms)


@runtime_checkable
class DepthRule(Protocol):
    """Chooses how many positions to draft before any of them is drawn."""

    @property
    def name(self) -> str:
        """What it is called in configuration and results."""
        ...

    def depth(self, inputs: DepthInput) -> int:
        """Depth in [0, K], the same for every request of the round."""
        ...


@dataclass(frozen=True, slots=True)
class FullDepth:
    """Always draft all K positions."""

    name: str = field(default="full", init=False)

    def depth(self, inputs: DepthInput) -> int:
        """K."""
        return len(inputs.draft_ms) - 1


@dataclass(frozen=True, slots=True)
class HistoryDepth:
    """The depth that would have served recent drafts best: tokens over milliseconds, drafting included.

    Args:
        probe_interval: every so many steps all K positions are drafted, or deep ones would never be seen again.
    """

    probe_interval: int = 64
    name: str = field(default="history", init=False)

    def __post_init__(self) -> None:
        """Refuse an interval that is no interval."""
        if self.probe_interval < 1:
            raise ValueError(f"probe_interval must be at least 1, got {self.probe_interval}")

    def depth(self, inputs: DepthInput) -> int:
        """The best depth by history; K while there is none and when it is time to probe."""
        history = inputs.history
        if history.num_steps % self.probe_interval == 0:
            return len(inputs.draft_ms) - 1
        return int(np.argmax(depth_rates(inputs)))


def depth_rates(inputs: DepthInput) -> Array:
    """``[K + 1]`` tokens per millisecond that each depth earns on recent drafts, trimmed by a common price.

    Survival past what a recent request drafted is filled in by the mean continuation.
    """
    rows = inputs.history.recent_filled()
    share = inputs.num_requests / len(rows)
    num_positions = rows.shape[1]
    admitted = np.arange(inputs.num_requests * num_positions + 1)
    ms = inputs.cost(inputs.base_tokens + admitted)
    rates = np.empty(num_positions + 1)
    for depth in range(num_positions + 1):
        gains = np.concatenate(([0.0], np.cumsum(-np.sort(-rows[:, :depth], axis=None))))
        size = inputs.num_requests * depth + 1
        tokens = inputs.num_requests + share * np.interp(admitted[:size] / share, np.arange(len(gains)), gains)
        rates[depth] = (tokens / (ms[:size] + inputs.draft_ms[depth])).max()
    return rates


@dataclass(frozen=True, slots=True, eq=False)
class DraftReveal:
    """A round of drafting in progress: what is committed to verification, for good."""

    committed: Counts  # [R] slots that will be verified; hand them to PlanInput.committed
    open: NDArray[np.bool_]  # [R] every slot drafted so far, but perhaps the last, is committed
    num_drafted: int
    another: bool  # whether the next position should be drafted


@dataclass(frozen=True, slots=True)
class RevealDepth:
    """Depth that follows the live drafts, by committing what it has looked at.

    Each request is committed slot by slot as long as its survival is worth ``price`` (from history); what follows a
    request's first refusal is not looked at any more. Another position is drafted if those still open are expected to
    gain more from it than it costs.
    """

    name: str = field(default="reveal", init=False)

    def start(self, inputs: DepthInput) -> DraftReveal:
        """Before anything is drawn: the first position is drafted if history says that any depth pays."""
        pays = inputs.history.num_steps == 0 or int(np.argmax(depth_rates(inputs))) > 0
        requests = inputs.num_requests
        return DraftReveal(np.zeros(requests, dtype=np.int64), np.ones(requests, dtype=bool), 0, pays)

    def advance(self, state: DraftReveal, inputs: DepthInput, survival: Array) -> DraftReveal:
        """After a position was drafted.

        Args:
            survival: ``[R]`` survival of the position just drafted; of requests that are not open it is not read.
        """
        rate, slot_ms = _rate_and_slot_ms(inputs)
        worth = state.open & (survival > rate * slot_ms)
        drafted = state.num_drafted + 1
        another = False
        if drafted < len(inputs.draft_ms) - 1:
            gains = survival[worth] * inputs.history.continuation[drafted]
            surplus = np.maximum(gains - rate * slot_ms, 0.0).sum()
            another = bool(surplus > rate * (inputs.draft_ms[drafted + 1] - inputs.draft_ms[drafted]))
        return replace(state, committed=state.committed + worth, open=worth, num_drafted=drafted, another=another)


def _rate_and_slot_ms(inputs: DepthInput) -> tuple[float, float]:
    """Tokens per millisecond of the best depth by history, and the mean cost of a slot up to full depth."""
    num_slots = inputs.num_requests * (len(inputs.draft_ms) - 1)
    first, last = inputs.cost([inputs.base_tokens, inputs.base_tokens + num_slots])
    return float(depth_rates(inputs).max()), float(last - first) / max(num_slots, 1)


@dataclass(frozen=True, slots=True)
class DraftGate:
    """Whether to draft at all, from how earlier steps went. A value; :meth:`after` makes the next one.

    After ``patience`` steps in a row that verified nothing, drafting pauses, each time twice as long up to
    ``longest`` steps, then one full draft is made as a probe.
    """

    patience: int = 4
    longest: int = 64
    idle: int = 0  # steps in a row whose drafts were not verified
    pause: int = 0  # length of the last pause
    left: int = 0  # steps of the present pause still to come

    @property
    def drafts(self) -> bool:
        """Draft in this step."""
        return self.left == 0

    @property
    def probing(self) -> bool:
        """This step's draft is to find out whether drafting pays again; draft all positions."""
        return self.left == 0 and self.pause > 0 and self.idle == self.patience - 1

    def after(self, budget: int) -> DraftGate:
        """The gate after a step that verified ``budget`` slots of its drafts (0 also if nothing was drafted)."""
        if self.left:
            return replace(self, left=self.left - 1)
        if budget > 0:
            return replace(self, idle=0, pause=0)
        if self.idle + 1 < self.patience:
            return replace(self, idle=self.idle + 1)
        pause = min(max(2 * self.pause, self.patience), self.longest)
        return replace(self, idle=self.patience - 1, pause=pause, left=pause)
