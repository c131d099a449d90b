"""Counters of an engine since its start, and a frozen snapshot of them for metrics and benchmarks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PHASES = ("plan", "forward", "verify", "observe", "draft")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts are totals since the engine started.

    Attributes:
        accepted_by_position, verified_by_position, drafted_by_position: ``[K]``.
        budget_histogram: how many steps verified so many slots in total.
        phase_seconds: time spent in each of the five calls of a step.
        cost_points: ``(tokens, milliseconds)`` of the current cost curve.
        reliability: ``(mean confidence, observed acceptance, count)`` per bin, if an estimator runs.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    num_decode_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_drafts: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    drafted_by_position: tuple[int, ...]
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    confidence_by_position: tuple[float, ...]
    budget_histogram: dict[int, int]
    finished_by_reason: dict[str, int]
    fallbacks_by_reason: dict[str, int]
    num_preemptions: int
    phase_seconds: dict[str, float]
    cost_relative_error: float | None
    cost_points: tuple[tuple[int, float], ...]
    slopes: dict[str, float]
    intercepts: tuple[float, ...]
    num_refits: int
    num_refused_refits: int
    estimator_log_loss: float | None
    estimator_ece: float | None
    exploration_share: float

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
    """The mutable side of EngineStats. `num_decode_steps` counts a decoding request once per step."""

    num_positions: int = 0
    num_steps: int = 0
    num_decode_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_untrimmed: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    confidence_sums: list[float] = field(default_factory=list)
    budget_histogram: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @staticmethod
    def start(num_positions: int) -> Counters:
        zeros = [0] * num_positions
        return Counters(
            num_positions=num_positions,
            drafted_by_position=list(zeros),
            verified_by_position=list(zeros),
            accepted_by_position=list(zeros),
            confidence_sums=[0.0] * num_positions,
        )

    def count_slots(self, drafted: int, verified: int, accepted: int) -> None:
        """Count one request's draft of one step."""
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_verified += verified
        self.num_accepted += accepted
        for position in range(drafted):
            self.drafted_by_position[position] += 1
            self.verified_by_position[position] += position < verified
            self.accepted_by_position[position] += position < accepted
