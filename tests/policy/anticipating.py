"""Planners and depth rules that look ahead, each in another way: cases that every losslessness check must refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.policy.depth import DepthInput
from trimtab.policy.planner import PlanInput, VerificationPlan
from trimtab.policy.reveal import Array, Counts, admit, best_budget, reveal


class LiveArgmax:
    """The budget that maximises tokens per millisecond over all live scores."""

    name = "live_argmax"

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        order = reveal(inputs)
        return admit(order, best_budget(order.tokens, order.ms))


class UnAdmitting:
    """Walks the reveal order, and takes the last slot back if what it then sees is poor."""

    name = "un_admitting"

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        order = reveal(inputs)
        num = len(order.slots) // 2
        if 0 < num < len(order.slots) and order.gains[num] < 0.4:
            num -= 1
        return admit(order, num)


class LowestBucket:
    """Sizes the step by the number of drafts that can survive at all, known only when all is revealed."""

    name = "live_count"

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        order = reveal(inputs)
        return admit(order, len(order.slots) if len(order.slots) > order.limit // 2 else 0)


@dataclass(frozen=True)
class RandomTies:
    """A fixed budget whose ties are broken by chance, among the slots rather than the requests."""

    order: tuple[int, ...]  # rank of every slot [R * K]
    name = "random_ties"

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        ranks = np.array(self.order).reshape(inputs.survival.shape)
        by_value = np.lexsort((ranks.ravel(), -inputs.survival.ravel()))
        chosen = by_value[: inputs.survival.size // 4] // inputs.survival.shape[1]
        counts = np.bincount(chosen, minlength=len(inputs.survival))
        budget = int(counts.sum())
        return VerificationPlan(counts, budget, 0.0, float(inputs.cost(inputs.base_tokens + budget)))


def random_ties(num_slots: int) -> list[RandomTies]:
    """One planner for every order of the slots; fresh noise chooses among them."""
    return [RandomTies(order) for order in itertools.permutations(range(num_slots))]


def live_depth(inputs: DepthInput, survival: Callable[[int], Array]) -> tuple[int, Counts | None]:
    """Draft on for the whole batch while the live mean of survival is at least a fifth, with nothing committed."""
    depth = 1
    while depth < len(inputs.draft_ms) - 1 and survival(depth - 1).mean() >= 0.2:
        depth += 1
    return depth, None
