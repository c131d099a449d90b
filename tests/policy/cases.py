"""Every planner, and steps to plan: shared by the tests of this folder."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from trimtab.policy.cost import CostCurve
from trimtab.policy.planner import PlanInput, PlannerHistory, make_planner, planner_names, update_history

PLANNERS = {
    **{name: make_planner(name) for name in planner_names()},
    "fixed 1": make_planner("fixed", k=1),
    "convex_fill step": make_planner("convex_fill", rate="step"),
    "lookahead step": make_planner("lookahead", rate="step"),
}


@st.composite
def plan_inputs(draw, max_requests=4, max_positions=4):
    num_requests = draw(st.integers(1, max_requests))
    num_positions = draw(st.integers(1, max_positions))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0]) | st.floats(0, 1, width=32)
    rows = st.lists(value, min_size=num_positions, max_size=num_positions)
    survival = np.array(draw(st.lists(rows, min_size=num_requests, max_size=num_requests))).cumprod(1)
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 4.0]), min_size=2, max_size=30))
    cost = CostCurve(np.arange(1, len(steps) + 1), 1.0 + np.cumsum(steps), staircase=draw(st.booleans()))
    history = PlannerHistory.start(num_positions)
    num_drafted = np.array(draw(st.lists(st.integers(0, num_positions), min_size=num_requests, max_size=num_requests)))
    base = num_requests + draw(st.integers(0, 5))
    for seed in range(draw(st.integers(0, 3))):
        past = np.random.default_rng(seed).random((num_requests, num_positions)).cumprod(1)
        inputs = PlanInput(past, num_drafted, base, cost, history)
        history = update_history(history, inputs, make_planner("stale").plan(inputs))
    forced = np.array(draw(st.lists(st.booleans(), min_size=num_requests, max_size=num_requests)))
    committed = np.minimum(num_drafted, draw(st.integers(0, 1)))
    cap = draw(st.none() | st.integers(0, num_requests * num_positions))
    return PlanInput(survival, num_drafted, base, cost, history, cap, forced, committed)
