"""Requests of a batch must not decide for each other by what neither has revealed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.policy.cases import PLANNERS, plan_inputs
from trimtab.policy.cost import CostCurve
from trimtab.policy.planner import PlanInput, PlannerHistory, VerificationPlan
from trimtab.policy.testing import check_non_anticipation, check_planner


class MutualPlanner:
    """Verifies each request by the last slot of the next one: exact for any request alone, biased for the pair."""

    name = "mutual"

    def plan(self, inputs: PlanInput) -> VerificationPlan:
        shows = np.roll(inputs.survival[:, -1], -1) > 0.2
        counts = np.where(shows, inputs.num_drafted, 0)
        budget = int(counts.sum())
        return VerificationPlan(counts, budget, 0.0, float(inputs.cost(inputs.base_tokens + budget)))


def two_requests(survival):
    survival = np.array(survival)
    return PlanInput(survival, np.full(2, survival.shape[1]), 2, CostCurve.linear(1.0, 0.1), PlannerHistory.start(2))


def test_a_request_alone_can_not_tell_that_the_pair_anticipates():
    first = two_requests([[0.9, 0.1], [0.9, 0.8]])
    counts = MutualPlanner().plan(first).num_verified
    for request in range(2):
        survival = first.survival.copy()
        survival[request, 1] = 0.5
        changed = MutualPlanner().plan(replace(first, survival=survival)).num_verified
        assert changed[request] == counts[request]


def test_requests_that_decide_for_each_other_are_refused():
    with pytest.raises(AssertionError, match="past the first refused slot of every request"):
        check_non_anticipation(MutualPlanner(), two_requests([[0.9, 0.1], [0.9, 0.1]]))
    with pytest.raises(AssertionError, match=r"changes the output: total variation 0\.\d+"):
        check_planner(MutualPlanner(), sizes=((2, 2, 2, 1),))


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_what_is_not_revealed_moves_nothing(planner):
    @settings(max_examples=12, deadline=None)
    @given(inputs=plan_inputs(max_requests=6, max_positions=5))
    def check(inputs):
        check_non_anticipation(planner, inputs, trials=3)

    check()
