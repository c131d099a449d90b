"""Counters of an engine since its start, and a frozen snapshot of them for metrics and benchmarks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PHASES = ("plan", "forward", "verify", "observe", "draft")


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """What the policy knows of itself.

    Attributes:
        slopes: of the estimator, by feature name.
        intercepts: ``[K]`` of the estimator.
        log_loss, ece: of the estimator's last round, each slot scored before it was learned.
        reliability: ``(mean confidence, share accepted, slots)`` of each non-empty tenth of the confidences, over about
            the last ten rounds, scored likewise.
        cost_points: ``(tokens, milliseconds)`` of the cost curve at the last step's requests and context.
        cost_measured: ``(tokens, milliseconds)`` of the last 256 steps.
        cost_relative_error: median of |measured / predicted - 1| over those steps.
        mean_survival: ``[K]`` mean predicted survival of recent drafts.
        num_untrimmed: drafts verified in full for exploration.
    """

    confidence: str | None = None
    planner: str | None = None
    slopes: dict[str, float] = field(default_factory=dict)
    intercepts: tuple[float, ...] = ()
    num_refits: int = 0
    num_refused_refits: int = 0
    log_loss: float | None = None
    ece: float | None = None
    reliability: tuple[tuple[float, float, float], ...] = ()
    cost_points: tuple[tuple[int, float], ...] = ()
    cost_measured: tuple[tuple[int, float], ...] = ()
    cost_relative_error: float | None = None
    mean_survival: tuple[float, ...] = ()
    num_untrimmed: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts are totals since the engine started.

    Attributes:
        kv_usage: share of cache blocks that requests own.
        num_decode_steps: a decoding request counts once per step.
        accepted_by_position, verified_by_position, drafted_by_position: ``[K]``.
        budget_histogram: how many steps verified so many slots in total.
        fallbacks_by_reason: steps without drafts because the drafter failed.
        phase_seconds: time spent in each of the five calls of a step.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    num_decode_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_drafts: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    drafted_by_position: tuple[int, ...]
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    budget_histogram: dict[int, int]
    finished_by_reason: dict[str, int]
    fallbacks_by_reason: dict[str, int]
    phase_seconds: dict[str, float]
    policy: PolicyStats

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step and request, the bonus or recovered token included."""
        return 1.0 + self.num_accepted / self.num_decode_steps if self.num_decode_steps else 1.0

    @property
    def trimmed_share(self) -> float:
        """Share of drafted tokens that were not verified."""
        return 1.0 - self.num_verified / self.num_drafted if self.num_drafted else 0.0


@dataclass(slots=True)
class Counters:
    """The mutable side of EngineStats."""

    drafted_by_position: list[int]
    verified_by_position: list[int]
    accepted_by_position: list[int]
    num_steps: int = 0
    num_decode_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    budget_histogram: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @staticmethod
    def start(num_positions: int) -> Counters:
        """All zero, for K draft positions."""
        return Counters([0] * num_positions, [0] * num_positions, [0] * num_positions)

    def count_slots(self, drafted: int, verified: int, accepted: int) -> None:
        """Count one request's draft of one step."""
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_verified += verified
        self.num_accepted += accepted
        for counts, count in (
            (self.drafted_by_position, drafted),
            (self.verified_by_position, verified),
            (self.accepted_by_position, accepted),
        ):
            for position in range(count):
                counts[position] += 1

    def snapshot(
        self,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_preemptions: int,
        num_cached_tokens: int,
        policy: PolicyStats,
    ) -> EngineStats:
        """A frozen copy, with what others count."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
            num_steps=self.num_steps,
            num_decode_steps=self.num_decode_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=num_cached_tokens,
            num_preemptions=num_preemptions,
            num_drafts=self.num_drafts,
            num_drafted=self.num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            drafted_by_position=tuple(self.drafted_by_position),
            verified_by_position=tuple(self.verified_by_position),
            accepted_by_position=tuple(self.accepted_by_position),
            budget_histogram=dict(self.budget_histogram),
            finished_by_reason=dict(self.finished),
            fallbacks_by_reason=dict(self.fallbacks),
            phase_seconds=dict(self.phase_seconds),
            policy=policy,
        )
