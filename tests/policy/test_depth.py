"""Draft depth: the choice against brute force, the reveal that commits, and the gate that pauses drafting."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.policy.cost import CostCurve
from trimtab.policy.depth import DepthInput, DepthRule, DraftGate, FullDepth, HistoryDepth, RevealDepth, depth_rates
from trimtab.policy.planner import PlanInput, PlannerHistory, make_planner, update_history


def history_of(rows, steps=1):
    rows = np.array(rows, dtype=float)
    history = PlannerHistory.start(rows.shape[1])
    for _ in range(steps):
        inputs = PlanInput(rows, np.full(len(rows), rows.shape[1]), len(rows), CostCurve.linear(1, 0.1), history)
        history = update_history(history, inputs, make_planner("fixed").plan(inputs))
    return history


def make_input(rows=((0.9, 0.8, 0.7), (0.5, 0.2, 0.1)), draft_ms=0.0, cost=None, num_requests=2, steps=1):
    history = history_of(rows, steps)
    times = draft_ms * np.arange(len(rows[0]) + 1)
    return DepthInput(num_requests, num_requests, cost or CostCurve.linear(1.0, 0.1), times, history)


def test_rates_are_those_of_the_best_trimming_at_each_depth():
    inputs = make_input(draft_ms=0.15)
    rows = inputs.history.recent
    expected = []
    for depth in range(4):
        slots = np.sort(rows[:, :depth].ravel())[::-1]
        tokens = 2 + np.concatenate(([0], slots.cumsum()))
        ms = inputs.cost(2 + np.arange(len(tokens))) + 0.15 * depth
        expected.append((tokens / ms).max())
    assert depth_rates(inputs) == pytest.approx(expected)


def test_rates_scale_to_other_numbers_of_requests():
    free = CostCurve([1], [1.0])
    few, many = (depth_rates(make_input(cost=free, num_requests=count)) for count in (2, 8))
    assert many == pytest.approx(4 * few)


@pytest.mark.parametrize(("draft_ms", "depth"), [(0.0, 3), (0.3, 1), (5.0, 0)])
def test_depth_falls_as_drafting_gets_dearer(draft_ms, depth):
    assert HistoryDepth().depth(make_input(draft_ms=draft_ms, rows=((0.9, 0.5, 0.4), (0.9, 0.5, 0.4)))) == depth


def test_all_positions_are_drafted_without_history_and_now_and_then():
    start = DepthInput(2, 2, CostCurve.linear(1, 0.1), np.array([0.0, 5, 10, 15]), PlannerHistory.start(3))
    assert HistoryDepth().depth(start) == 3
    assert [HistoryDepth(probe_interval=4).depth(make_input(draft_ms=5.0, steps=n)) for n in range(1, 9)] == [
        0, 0, 0, 3, 0, 0, 0, 3,
    ]  # fmt: skip
    assert FullDepth().depth(make_input(draft_ms=5.0)) == 3


def test_positions_that_recent_drafts_did_not_reach_count_by_the_mean():
    history = history_of([[0.8, 0.4]])
    shallow = PlanInput(np.array([[0.6, 0.0]]), np.array([1]), 1, CostCurve.linear(1, 0.1), history)
    history = update_history(history, shallow, make_planner("fixed").plan(shallow))
    inputs = DepthInput(1, 1, CostCurve([1], [1.0]), np.zeros(3), history)
    ratio = history.continuation[1]
    assert depth_rates(inputs)[2] == pytest.approx(1 + (0.8 + 0.4 + 0.6 + 0.6 * ratio) / 2)


def test_reveal_commits_while_survival_is_worth_the_price_and_stops_for_good():
    inputs = make_input(draft_ms=0.01, cost=CostCurve.linear(1.0, 0.2))
    rule = RevealDepth()
    state = rule.start(inputs)
    assert state.another
    state = rule.advance(state, inputs, np.array([0.95, 0.1]))
    assert state.committed.tolist() == [1, 0]
    assert state.open.tolist() == [True, False]
    state = rule.advance(state, inputs, np.array([0.9, 1.0]))  # the second is not looked at any more
    assert state.committed.tolist() == [2, 0]
    assert state.num_drafted == 2
    assert state.another
    state = rule.advance(state, inputs, np.array([0.8, 1.0]))
    assert state.committed.tolist() == [3, 0]
    assert not state.another  # K positions are drafted


def test_reveal_stops_when_nobody_is_open_or_nothing_pays():
    inputs = make_input(draft_ms=0.01, cost=CostCurve.linear(1.0, 0.2))
    assert not RevealDepth().advance(RevealDepth().start(inputs), inputs, np.array([0.05, 0.1])).another
    assert not RevealDepth().start(make_input(draft_ms=9.0)).another


def test_rules_are_depth_rules():
    assert isinstance(HistoryDepth(), DepthRule)
    assert isinstance(FullDepth(), DepthRule)
    assert HistoryDepth().name == "history"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"draft_ms must be \[K \+ 1\] = \[4\], got \(3,\)"):
        DepthInput(1, 1, CostCurve.linear(1, 1), np.zeros(3), PlannerHistory.start(3))
    with pytest.raises(ValueError, match="draft_ms must be finite and not negative"):
        DepthInput(1, 1, CostCurve.linear(1, 1), np.array([0, -1.0]), PlannerHistory.start(1))
    with pytest.raises(ValueError, match="probe_interval must be at least 1, got 0"):
        HistoryDepth(0)


def run_gate(budgets):
    """Whether each step drafts; ``budgets`` says what a step that drafts would verify."""
    gate, drafts = DraftGate(), []
    for budget in budgets:
        drafts.append(gate.drafts)
        gate = gate.after(budget if gate.drafts else 0)
    return drafts


def test_drafting_pauses_twice_as_long_each_time_it_does_not_pay_and_probes_in_between():
    drafts = run_gate([0] * 200)
    assert drafts[:4] == [True] * 4
    probes = [step for step, drafting in enumerate(drafts) if drafting][4:]
    assert np.diff([3, *probes]).tolist() == [5, 9, 17, 33, 65, 65]


def test_drafting_comes_back_when_a_probe_pays():
    drafts = run_gate([0] * 8 + [3] * 20)
    assert drafts == [True] * 4 + [False] * 4 + [True] * 20


def test_a_step_that_pays_clears_the_count():
    assert all(run_gate([0, 0, 0, 2] * 10))


def test_a_probe_says_so():
    gate = DraftGate()
    assert not gate.probing
    while gate.drafts:
        gate = gate.after(0)
    while not gate.drafts:
        assert not gate.probing
        gate = gate.after(0)
    assert gate.probing
    assert not gate.after(2).probing
