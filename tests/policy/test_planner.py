"""Planners: the objective against brute force, invariants on any input, history, and what they refuse."""

from __future__ import annotations

import heapq
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.cases import PLANNERS, plan_inputs
from trimtab.policy import planner as planner_module
from trimtab.policy.confidence import survival_probs
from trimtab.policy.cost import CostCurve
from trimtab.policy.planner import (
    DEFAULT_PLANNER,
    PlanInput,
    Planner,
    PlannerHistory,
    make_planner,
    planner_names,
    reveal,
    update_history,
)

CONVEX = CostCurve([1, 4, 8, 20], [1.0, 1.1, 2.0, 6.0])
STAIRS = CostCurve([2, 3, 6, 9, 20], [1.0, 1.3, 1.5, 2.4, 5.0], staircase=True)


def make_input(survival, cost=CONVEX, history=None, **options):
    survival = np.array(survival, dtype=float)
    options = {"base_tokens": len(survival), "num_drafted": np.full(len(survival), survival.shape[1]), **options}
    return PlanInput(survival, cost=cost, history=history or PlannerHistory.start(survival.shape[1]), **options)


def random_survival(seed, num_requests=2, num_positions=3):
    return np.random.default_rng(seed).random((num_requests, num_positions)).cumprod(1)


def brute_force(inputs, objective):
    """Best value of ``objective(tokens, ms)`` over every choice of counts."""
    best = -np.inf
    for counts in itertools.product(*(range(drafted + 1) for drafted in inputs.num_drafted)):
        admitted = np.arange(inputs.survival.shape[1]) < np.array(counts)[:, None]
        tokens = len(counts) + inputs.survival[admitted].sum()
        best = max(best, objective(tokens, float(inputs.cost(inputs.base_tokens + sum(counts)))))
    return best


@pytest.mark.parametrize("name", ["early_stop", "convex_fill step", "lookahead step"])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_per_ms_is_the_best_there_is_on_convex_costs(name, seed):
    inputs = make_input(random_survival(seed))
    plan = PLANNERS[name].plan(inputs)
    assert plan.expected_tokens / plan.expected_ms == pytest.approx(brute_force(inputs, lambda tokens, ms: tokens / ms))


@pytest.mark.parametrize("seed", range(8))
def test_stale_is_the_best_there_is_when_nothing_changed(seed):
    inputs = make_input(random_survival(seed), STAIRS)
    history = update_history(inputs.history, inputs, make_planner("fixed").plan(inputs))
    plan = make_planner("stale").plan(make_input(inputs.survival, STAIRS, history))
    assert plan.expected_tokens / plan.expected_ms == pytest.approx(brute_force(inputs, lambda tokens, ms: tokens / ms))


@pytest.mark.parametrize("name", ["convex_fill", "lookahead"])
@pytest.mark.parametrize("seed", range(8))
def test_with_history_time_is_priced_at_the_rate_that_was_earned(name, seed):
    history = PlannerHistory.start(3)
    for step in range(5):
        past = make_input(random_survival(100 + step), CONVEX, history)
        history = update_history(history, past, make_planner(name).plan(past))
    inputs = make_input(random_survival(seed), CONVEX, history)
    rate = history.reference_rate(2, 2, CONVEX) * history.tokens / history.reference
    plan = make_planner(name).plan(inputs)
    best = brute_force(inputs, lambda tokens, ms: tokens - rate * ms)
    assert plan.expected_tokens - rate * plan.expected_ms == pytest.approx(best, abs=1e-6)


def test_lookahead_enters_a_bucket_that_only_its_tail_pays_for():
    """Four slots for .6 ms: the first alone is worth .5, all that history leads to expect 1.4."""
    cost = CostCurve([1, 5], [1.0, 1.6], staircase=True)
    history = PlannerHistory.start(4)
    sure = make_input([[0.9, 0.85, 0.8, 0.75]], cost)
    history = update_history(history, sure, make_planner("fixed").plan(sure))
    inputs = make_input([[0.5, 0.45, 0.4, 0.4]], cost, history)
    assert make_planner("early_stop").plan(inputs).budget == 0
    assert make_planner("lookahead", rate="step").plan(inputs).budget == 4
    hopeless = make_input([[0.9, 0.02, 0.02, 0.02]], cost)
    history = update_history(PlannerHistory.start(4), hopeless, make_planner("fixed").plan(hopeless))
    inputs = make_input([[0.5, 0.45, 0.4, 0.4]], cost, history)
    assert make_planner("lookahead", rate="step").plan(inputs).budget == 0


def heap_order(inputs):
    """Frontier heap: the slow twin of the sort in reveal()."""
    frontier = [(-row[0], 0, request) for request, row in enumerate(inputs.survival) if inputs.num_drafted[request]]
    heapq.heapify(frontier)
    order = []
    while frontier:
        score, position, request = heapq.heappop(frontier)
        if score < 0:
            order.append(position * len(inputs.survival) + request)
        if position + 1 < inputs.num_drafted[request]:
            heapq.heappush(frontier, (-inputs.survival[request, position + 1], position + 1, request))
    return order


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, 0.7]), min_size=3, max_size=3), min_size=1, max_size=5
    ),
    seed=st.integers(0, 100),
)
def test_the_reveal_order_is_that_of_a_frontier_heap(rows, seed):
    survival = np.array(rows).cumprod(1)
    drafted = np.random.default_rng(seed).integers(0, 4, len(rows))
    inputs = make_input(survival, num_drafted=drafted)
    assert reveal(inputs).slots.tolist() == heap_order(inputs)


@settings(max_examples=200, deadline=None)
@given(inputs=plan_inputs(), name=st.sampled_from(sorted(PLANNERS)))
def test_every_plan_is_one_that_can_be_carried_out(inputs, name):
    plan = PLANNERS[name].plan(inputs)
    counts = plan.num_verified
    assert counts.dtype == np.int64
    assert counts.shape == inputs.num_drafted.shape
    assert (counts >= 0).all()
    assert (counts <= inputs.num_drafted).all()
    assert plan.budget == counts.sum()
    if inputs.max_verified_tokens is not None:
        assert plan.budget <= inputs.max_verified_tokens
    if inputs.max_verified_tokens is None or inputs.max_verified_tokens >= inputs.committed.sum():
        assert (counts >= inputs.committed).all()
        assert (counts[inputs.forced] == inputs.num_drafted[inputs.forced]).all()
    admitted = np.arange(inputs.survival.shape[1]) < counts[:, None]
    assert plan.expected_tokens == pytest.approx(len(counts) + inputs.survival[admitted].sum())
    assert plan.expected_ms == pytest.approx(float(inputs.cost(inputs.base_tokens + plan.budget)))
    assert (PLANNERS[name].plan(inputs).num_verified == counts).all()


@settings(max_examples=100, deadline=None)
@given(inputs=plan_inputs(), name=st.sampled_from(["convex_fill", "lookahead"]))
def test_no_free_slot_is_left(inputs, name):
    plan = make_planner(name).plan(inputs)
    cap = inputs.max_verified_tokens
    next_ms = float(inputs.cost(inputs.base_tokens + plan.budget + 1))
    if next_ms > plan.expected_ms or (cap is not None and plan.budget == cap):
        return
    left = [
        row[count:drafted]
        for row, count, drafted in zip(inputs.survival, plan.num_verified, inputs.num_drafted, strict=True)
    ]
    assert all(slots.max(initial=0.0) < 1e-37 for slots in left)


def test_ties_go_by_position_then_request():
    free = CostCurve([1], [1.0])
    plan = make_planner("lookahead").plan(make_input(np.full((3, 2), 0.5), free, max_verified_tokens=4))
    assert plan.num_verified.tolist() == [2, 1, 1]


def test_a_steep_cost_verifies_nothing_and_a_flat_one_everything():
    survival = random_survival(0) + 0.01
    for name in planner_names():
        if name != "fixed":
            assert make_planner(name).plan(make_input(survival, CostCurve.linear(0.1, 1.0))).budget == 0
    for name in ("lookahead", "convex_fill", "early_stop", "stale"):
        assert make_planner(name).plan(make_input(survival, CostCurve.linear(10.0, 1e-6))).budget == 6


def test_forced_requests_are_verified_untrimmed_and_counted_in_the_cost():
    steep = CostCurve.linear(0.1, 1.0)
    plan = make_planner("lookahead").plan(make_input(random_survival(1), steep, forced=np.array([False, True])))
    assert plan.num_verified.tolist() == [0, 3]
    assert plan.expected_ms == pytest.approx(5.1)


def test_committed_slots_are_verified_first():
    steep = CostCurve.linear(0.1, 1.0)
    plan = make_planner("stale").plan(make_input(random_survival(1), steep, committed=np.array([2, 0])))
    assert plan.num_verified.tolist() == [2, 0]


def test_fixed_takes_the_first_k_and_the_cap_cuts_deep_positions_first():
    inputs = make_input(random_survival(2), num_drafted=np.array([3, 1]))
    assert make_planner("fixed").plan(inputs).num_verified.tolist() == [3, 1]
    assert make_planner("fixed", k=2).plan(inputs).num_verified.tolist() == [2, 1]
    capped = make_input(random_survival(2), max_verified_tokens=3)
    assert make_planner("fixed").plan(capped).num_verified.tolist() == [2, 1]


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches_and_no_positions_have_a_plan(planner, shape):
    inputs = make_input(np.zeros(shape), base_tokens=shape[0] + 1)
    plan = planner.plan(inputs)
    assert plan.num_verified.tolist() == [0] * shape[0]
    assert (plan.budget, plan.expected_tokens) == (0, shape[0])
    assert update_history(inputs.history, inputs, plan) is inputs.history


def test_a_tensor_of_survival_probs_is_taken_as_it_is():
    survival = survival_probs(torch.rand(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 2, 0]))
    inputs = PlanInput(survival, torch.tensor([4, 2, 0]), 3, CONVEX, PlannerHistory.start(4))
    assert make_planner("fixed").plan(inputs).num_verified.tolist() == [4, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"survival": np.full(3, 0.5)}, r"survival \[R, K\]"),
        ({"num_drafted": np.array([1])}, r"num_drafted \[R\], got \[2, 2\] and \[1\]"),
        ({"num_drafted": np.array([1, 3])}, r"num_drafted must be whole numbers in \[0, 2\], got \[1, 3\]"),
        ({"num_drafted": np.array([1.0, 2.0])}, "whole numbers"),
        ({"survival": np.array([[1.5, 0.1], [0.1, 0.1]])}, r"in \[0, 1\], got 1.5"),
        ({"survival": np.array([[np.nan, 0.1], [0.1, 0.1]])}, r"in \[0, 1\], got nan"),
        ({"survival": np.array([[0.1, 0.2], [0.1, 0.1]])}, "must not increase along a request; make it with"),
        ({"base_tokens": 1}, r"base_tokens 1 is less than one per request \(2\)"),
        ({"max_verified_tokens": -1}, "must not be negative, got -1"),
        ({"forced": np.array([1, 0])}, r"forced must be bool \[R\]"),
        ({"committed": np.array([3, 0])}, r"committed must be \[R\] in \[0, num_drafted\], got \[3, 0\]"),
        ({"history": PlannerHistory.start(5)}, "history is of K = 5, survival of K = 2"),
    ],
)
def test_bad_input_is_refused_with_its_value(change, message):
    good = {
        "survival": np.array([[0.5, 0.4], [0.3, 0.2]]),
        "num_drafted": np.array([2, 2]),
        "base_tokens": 2,
        "cost": CONVEX,
        "history": PlannerHistory.start(2),
    }
    with pytest.raises(ValueError, match=message):
        PlanInput(**{**good, **change})


def test_history_learns_the_mean_continuation():
    history = PlannerHistory.start(2)
    rng = np.random.default_rng(0)
    for _ in range(300):
        survival = np.stack((rng.choice([0.5, 0.9], 4), np.zeros(4)), 1)
        survival[:, 1] = 0.6 * survival[:, 0]
        inputs = make_input(survival, history=history)
        history = update_history(history, inputs, make_planner("fixed").plan(inputs))
    assert history.continuation == pytest.approx([0.7, 0.6], abs=0.03)
    assert history.num_steps == 300
    assert len(history.recent) == 64


def test_positions_that_are_not_drafted_keep_what_was_known_of_them():
    deep = make_input([[0.9, 0.2]])
    history = update_history(deep.history, deep, make_planner("fixed").plan(deep))
    known = history.continuation[1]
    for _ in range(500):
        shallow = make_input([[0.9, 0.0]], history=history, num_drafted=np.array([1]))
        history = update_history(history, shallow, make_planner("fixed").plan(shallow))
    assert history.continuation[1] == pytest.approx(known)
    assert history.recent_filled()[0] == pytest.approx([0.9, 0.9 * known])


def test_history_stays_finite_when_nothing_ever_survives():
    history = PlannerHistory.start(2)
    for _ in range(3000):
        inputs = make_input([[0.0, 0.0]], history=history)
        history = update_history(history, inputs, make_planner("fixed").plan(inputs))
    assert np.isfinite(history.continuation).all()
    assert make_planner("lookahead").plan(make_input([[0.9, 0.8]], CostCurve.linear(10, 0.01), history)).budget == 2


def test_update_leaves_the_old_history_alone():
    inputs = make_input(random_survival(3))
    before = (inputs.history.survivors.copy(), inputs.history.num_steps)
    update_history(inputs.history, inputs, make_planner("fixed").plan(inputs))
    assert (inputs.history.survivors == before[0]).all()
    assert inputs.history.num_steps == before[1]


def test_a_stale_budget_scales_with_the_number_of_requests():
    survival = np.tile([[0.9, 0.8, 0.1]], (4, 1))
    inputs = make_input(survival, CostCurve.linear(1.0, 0.3))
    history = update_history(inputs.history, inputs, make_planner("fixed").plan(inputs))
    for num_requests in (2, 4, 8):
        wide = make_input(np.tile([[0.9, 0.8, 0.1]], (num_requests, 1)), CostCurve.linear(1.0, 0.3), history)
        assert make_planner("stale").plan(wide).budget == 2 * num_requests


def test_planners_are_made_by_name():
    for name in planner_names():
        assert make_planner(name).name == name
        assert isinstance(make_planner(name), Planner)
    assert make_planner().name == DEFAULT_PLANNER


def test_a_wrong_name_or_option_is_refused_with_a_hint():
    with pytest.raises(ValueError, match='unknown planner "lookahed"; did you mean "lookahead"'):
        make_planner("lookahed")
    with pytest.raises(ValueError, match='unknown planner "zzz"; known: fixed, stale'):
        make_planner("zzz")
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        make_planner("lookahead", depth=3)
    with pytest.raises(ValueError, match='rate must be "history" or "step", got "fast"'):
        make_planner("lookahead", rate="fast")
    with pytest.raises(ValueError, match="k must not be negative, got -1"):
        make_planner("fixed", k=-1)


def test_planners_register_through_entry_points(monkeypatch):
    def points(group):
        assert group == "trimtab.planners"
        made = SimpleNamespace(name="mine", load=lambda: lambda: planner_module.FixedPlanner(1))
        return [made, SimpleNamespace(name="broken", load=lambda: lambda: object())]

    monkeypatch.setattr(planner_module, "entry_points", points)
    assert make_planner("mine").plan(make_input(random_survival(0))).budget == 2
    with pytest.raises(TypeError, match=r'"broken" made .* which lacks name or plan\(\)'):
        make_planner("broken")
