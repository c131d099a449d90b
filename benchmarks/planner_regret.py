"""What each planner loses against planners that are not allowed, or not affordable.

1. Live optimum: tokens per millisecond relative to the budget that maximises it over all live scores of each step. That
   one anticipates (it changes the output); a planner may exceed 1, because maximising every step's own ratio is not the
   way to the best long-run throughput.
2. Optimal stopping: relative to the best rule that does not anticipate, by dynamic programming, for small R and K.

Drafts: every request has a difficulty that follows an AR(1) process from token to token; confidences are calibrated,
with noise from slot to slot. All planners see the same drafts; requests advance by what the live optimum got accepted.

Run: python benchmarks/planner_regret.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from provenance import write_result

from trimtab.policy.cost import CostCurve
from trimtab.policy.planner import DEFAULT_PLANNER, PlanInput, Planner, PlannerHistory, make_planner, update_history
from trimtab.policy.reveal import VerificationPlan, admit, best_budget, reveal

Array = NDArray[np.float64]

NUM_POSITIONS = 7
SMOOTH = ("memory-bound", "linear", "knee")


def cost_curves() -> dict[str, CostCurve]:
    """Three smooth costs and four staircases, from fine to coarse."""
    sizes = np.unique(np.geomspace(1, 4096, 40).astype(int))
    graph_sizes = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)])
    return {
        "memory-bound": CostCurve(sizes, np.sqrt(20.0**2 + (0.25 * sizes) ** 2)),
        "linear": CostCurve.linear(10.0, 0.5),
        "knee": CostCurve([1, 32, 4096], [12.0, 13.0, 13.0 + 0.3 * 4064]),
        "graph buckets": CostCurve(graph_sizes, np.sqrt(20.0**2 + (0.25 * graph_sizes) ** 2), staircase=True),
        "tiles of 16": CostCurve(np.arange(16, 4097, 16), 10 + 0.3 * np.arange(16, 4097, 16), staircase=True),
        "tiles of 64": CostCurve(np.arange(64, 4097, 64), 15 + 0.2 * np.arange(64, 4097, 64), staircase=True),
        "powers of 2": CostCurve(2 ** np.arange(13), 8 + 0.4 * 2 ** np.arange(13), staircase=True),
    }


def planners() -> dict[str, Planner]:
    """Every planner that trims; the lookahead twice, with the rate of the step for comparison."""
    return {
        **{name: make_planner(name) for name in ("stale", "price", "early_stop", "convex_fill", "lookahead")},
        "lookahead, rate of the step": make_planner("lookahead", rate="step"),
    }


class DraftStream:
    """Drafts of R requests whose difficulty drifts from token to token."""

    def __init__(self, num_requests: int, seed: int, correlation: float = 0.9, spread: float = 1.2) -> None:
        self.rng = np.random.default_rng(seed)
        self.correlation, self.spread = correlation, spread
        self.difficulty = self.rng.normal(0, spread, (num_requests, 1))
        self._extend(NUM_POSITIONS)

    def _extend(self, count: int) -> None:
        noise = self.rng.normal(0, self.spread * np.sqrt(1 - self.correlation**2), (len(self.difficulty), count))
        columns = [self.difficulty[:, -1]]
        for column in noise.T:
            columns.append(self.correlation * columns[-1] + column)
        self.difficulty = np.concatenate((self.difficulty, np.stack(columns[1:], 1)), axis=1)

    def draft(self) -> Array:
        """``[R, K]`` survival of the next draft."""
        noise = 0.6 * self.rng.normal(size=(len(self.difficulty), NUM_POSITIONS))
        log_odds = 1.0 + self.difficulty[:, :NUM_POSITIONS] - 0.08 * np.arange(NUM_POSITIONS) + noise
        self.confidences = 1 / (1 + np.exp(-log_odds))
        return self.confidences.cumprod(1)

    def advance(self, num_verified: NDArray[np.int64]) -> None:
        """Verify so many slots and move every request on by what was accepted, plus one."""
        accepted = self.rng.random(self.confidences.shape) < self.confidences
        accepted &= np.arange(NUM_POSITIONS) < num_verified[:, None]
        moves = accepted.cumprod(1).sum(1) + 1
        self._extend(NUM_POSITIONS + 1)
        columns = moves[:, None] + np.arange(NUM_POSITIONS + 1)
        self.difficulty = np.take_along_axis(self.difficulty, columns, axis=1)


@dataclass
class Tally:
    """Tokens and milliseconds of one planner."""

    tokens: float = 0.0
    ms: float = 0.0

    def add(self, plan: VerificationPlan) -> None:
        """Count a step."""
        self.tokens += plan.expected_tokens
        self.ms += plan.expected_ms

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def live_optimum(inputs: PlanInput) -> VerificationPlan:
    """The best budget by all live scores; anticipates."""
    order = reveal(inputs)
    return admit(order, best_budget(order.tokens, order.ms))


def compare(
    drafts: Callable[[], Array],
    advance: Callable[[NDArray[np.int64]], None],
    reference: Callable[[PlanInput], VerificationPlan],
    cost: CostCurve,
    num_steps: int,
) -> dict[str, float]:
    """Throughput of every planner relative to ``reference`` on the same drafts, after a tenth of warming up."""
    candidates = planners()
    histories: dict[str, PlannerHistory] = {}
    tallies = {name: Tally() for name in (*candidates, "reference")}
    for step in range(-(num_steps // 10), num_steps):
        survival = drafts()
        drafted = np.full(len(survival), survival.shape[1])
        start = PlannerHistory.start(survival.shape[1])
        inputs = PlanInput(survival, drafted, len(survival), cost, start)
        plans = {"reference": reference(inputs)}
        for name, planner in candidates.items():
            inputs = PlanInput(survival, drafted, len(survival), cost, histories.get(name, start))
            plans[name] = planner.plan(inputs)
            histories[name] = update_history(inputs.history, inputs, plans[name])
        if step >= 0:
            for name, plan in plans.items():
                tallies[name].add(plan)
        advance(plans["reference"].num_verified)
    return {name: round(tallies[name].rate / tallies["reference"].rate, 4) for name in candidates}


LEVELS = (0.25, 0.6, 0.92)
STAY = 0.6


class LevelDrafts:
    """Confidences that walk among three levels along a draft: few enough states for dynamic programming."""

    def __init__(self, num_requests: int, num_positions: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = (num_requests, num_positions)

    def draft(self) -> Array:
        """``[R, K]`` survival; every draft starts afresh."""
        levels = self.rng.integers(0, len(LEVELS), self.shape)
        stay = self.rng.random(self.shape) < STAY
        for position in range(1, self.shape[1]):
            levels[:, position] = np.where(stay[:, position], levels[:, position - 1], levels[:, position])
        return np.array(LEVELS)[levels].cumprod(1)


class OptimalStopping:
    """The best rule that reveals slots in turn: it maximises tokens - rate x milliseconds at the rate it earns."""

    def __init__(self, num_requests: int, num_positions: int, cost: CostCurve) -> None:
        self.num_positions = num_positions
        self.ms = cost(num_requests + np.arange(num_requests * num_positions + 1)).tolist()
        self.num_requests = num_requests
        self.rate = num_requests / self.ms[0]
        for _ in range(30):
            tokens, ms = self._earnings()
            if tokens / ms <= self.rate * (1 + 1e-12):
                break
            self.rate = tokens / ms

    def _earnings(self) -> tuple[float, float]:
        """Expected tokens and milliseconds of a step under the best rule for the present rate."""
        self.best: dict[tuple[tuple[int, ...], ...], int] = {}

        @functools.cache
        def value(paths: tuple[tuple[int, ...], ...]) -> tuple[float, float, float]:
            """Of a state: levels revealed per request, the last of which is not admitted yet unless all are."""
            num = sum(self._admitted(path) for path in paths)
            best = (-self.rate * self.ms[num], 0.0, self.ms[num])
            choice = -1
            for request, path in enumerate(paths):
                if path[-1:] == (-1,):
                    continue
                gain = float(np.prod([LEVELS[level] for level in path]))
                total, tokens, ms = 0.0, 0.0, 0.0
                for chance, extended in self._next(path):
                    part = value((*paths[:request], extended, *paths[request + 1 :]))
                    total, tokens, ms = (
                        total + chance * part[0],
                        tokens + chance * part[1],
                        ms + chance * part[2],
                    )
                if gain + total > best[0] + 1e-12:
                    best, choice = (gain + total, gain + tokens, ms), request
            self.best[paths] = choice
            return best

        starts = itertools.product([(level,) for level in range(len(LEVELS))], repeat=self.num_requests)
        values = np.array([value(paths) for paths in starts]).mean(0)
        return self.num_requests + float(values[1]), float(values[2])

    def _admitted(self, path: tuple[int, ...]) -> int:
        return len(path) - 1

    def _next(self, path: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """What is revealed once the last slot of ``path`` is admitted; -1 marks the end of the draft."""
        if len(path) == self.num_positions:
            return [(1.0, (*path, -1))]
        other = (1 - STAY) / len(LEVELS)
        return [(other + STAY * (level == path[-1]), (*path, level)) for level in range(len(LEVELS))]

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        """Follow the best rule through a draft."""
        confidences = inputs.survival / np.concatenate(
            (np.ones((self.num_requests, 1)), inputs.survival[:, :-1]), axis=1
        )
        levels = np.abs(confidences[..., None] - np.array(LEVELS)).argmin(-1)
        ends = np.concatenate((levels, np.full((self.num_requests, 1), -1)), axis=1)
        counts = np.zeros(self.num_requests, dtype=np.int64)
        while True:
            paths = tuple(tuple(row[: count + 1].tolist()) for row, count in zip(ends, counts, strict=True))
            choice = self.best[paths]
            if choice < 0:
                break
            counts[choice] += 1
        num = int(counts.sum())
        admitted = np.arange(self.num_positions) < counts[:, None]
        return VerificationPlan(
            counts, num, self.num_requests + float(inputs.survival[admitted].sum()), float(self.ms[num])
        )


def against_live_optimum(slots: int) -> list[dict[str, object]]:
    """Every cost at 1 to 256 requests."""
    rows: list[dict[str, object]] = []
    for name, cost in cost_curves().items():
        for num_requests in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            started = time.perf_counter()
            stream = DraftStream(num_requests, seed=num_requests)
            num_steps = max(150, slots // num_requests)
            relative = compare(stream.draft, stream.advance, live_optimum, cost, num_steps)
            rows.append({"cost": name, "requests": num_requests, "steps": num_steps, "relative": relative})
            print(f"{name:14s} {num_requests:4d} {relative} {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def against_optimal_stopping(num_steps: int) -> list[dict[str, object]]:
    """Small steps, where dynamic programming can walk every reveal."""
    costs = {
        "linear": CostCurve.linear(1.0, 0.15),
        "staircase of 2": CostCurve(np.arange(1, 12, 2), 1 + 0.35 * np.arange(6), staircase=True),
        "staircase of 4": CostCurve([2, 6, 10], [1.0, 1.8, 2.6], staircase=True),
    }
    rows: list[dict[str, object]] = []
    for (name, cost), (num_requests, num_positions) in itertools.product(
        costs.items(), ((1, 3), (1, 5), (2, 2), (2, 3))
    ):
        optimum = OptimalStopping(num_requests, num_positions, cost)
        drafts = LevelDrafts(num_requests, num_positions, seed=1)
        relative = compare(drafts.draft, lambda _: None, optimum.plan, cost, num_steps)
        rows.append({"cost": name, "requests": num_requests, "positions": num_positions, "relative": relative})
        print(f"{name:14s} R {num_requests} K {num_positions} rate {optimum.rate:.4f} {relative}", flush=True)
    return rows


def summary(rows: list[dict[str, object]]) -> dict[str, float]:
    """The figures that the default planner is held to."""
    default = [(row, row["relative"][DEFAULT_PLANNER], row["relative"]["stale"]) for row in rows]  # type: ignore[index]
    few = [value for row, value, _ in default if row["cost"] in SMOOTH and row["requests"] <= 4]  # type: ignore[operator]
    return {
        "least": min(value for _, value, _ in default),
        "least on smooth costs up to 4 requests": min(few),
        "least advantage over stale": round(min(value - stale for _, value, stale in default), 4),
    }


def main() -> None:
    """Simulate and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=3000, help="request-steps per case")
    parser.add_argument("--stopping-steps", type=int, default=3000)
    parser.add_argument("--output", default="planner_regret.json")
    arguments = parser.parse_args()
    stopping = against_optimal_stopping(arguments.stopping_steps)
    live = against_live_optimum(arguments.slots)
    default = summary(live)
    print(DEFAULT_PLANNER, default)
    write_result(
        arguments.output,
        {
            "positions": NUM_POSITIONS,
            "default": DEFAULT_PLANNER,
            "default_summary": default,
            "against_live_optimum": live,
            "against_optimal_stopping": stopping,
        },
    )


if __name__ == "__main__":
    main()
