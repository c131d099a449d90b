"""The output keeps the target's distribution: exact enumeration and the property behind it, and what must fail both."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.anticipating import (
    LiveArgmax,
    LowestBucket,
    UnAdmitting,
    live_depth,
    random_ties,
)
from tests.policy.cases import PLANNERS, plan_inputs
from trimtab.policy import confidence as confidences
from trimtab.policy.cost import CostCurve
from trimtab.policy.depth import FullDepth, HistoryDepth, RevealDepth
from trimtab.policy.planner import PlanInput, PlannerHistory, make_planner, planner_names
from trimtab.policy.testing import (
    TinyModel,
    check_non_anticipation,
    check_planner,
    drawn_token_scorer,
    output_distribution,
    target_distribution,
    total_variation,
)

DEPTHS = {"full": FullDepth(), "history": HistoryDepth(), "reveal": RevealDepth()}


def make_source(name):
    def make(num_positions):
        if name == "estimator":
            return confidences.make_confidence(name, num_positions, refit_interval=1)
        if name == "trained":
            estimator = confidences.make_confidence("estimator", num_positions).estimator
            return confidences.TrainedConfidence(estimator)
        return confidences.make_confidence(name, num_positions)

    return make


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_output_is_the_targets_for_every_planner(planner):
    check_planner(planner, seeds=range(5))


@pytest.mark.parametrize("source", confidences.BUILTIN_CONFIDENCES)
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_output_is_the_targets_for_every_planner_and_source(planner, source):
    check_planner(planner, make_source=make_source(source), seeds=range(2), sizes=((2, 2, 2, 1), (2, 1, 1, 2)))


@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_output_is_the_targets_for_every_planner_and_depth(planner, depth):
    check_planner(planner, depth=depth, seeds=range(3), sizes=((2, 2, 2, 1), (2, 3, 1, 1), (2, 1, 1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("source", confidences.BUILTIN_CONFIDENCES)
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_output_is_the_targets_for_every_planner_source_and_depth(planner, source, depth):
    sizes = ((2, 2, 2, 1), (3, 2, 1, 1), (2, 1, 1, 2))
    check_planner(planner, make_source=make_source(source), depth=depth, seeds=range(2), sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, RevealDepth()], ids=["all", "reveal"])
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_output_is_the_targets_over_several_steps(planner, depth):
    check_planner(planner, depth=depth, seeds=range(4), sizes=((2, 2, 1, 3), (3, 1, 1, 3)))
    check_planner(planner, depth=depth, seeds=(1,), sizes=((2, 1, 2, 3), (2, 2, 2, 2)))


@pytest.mark.parametrize("planner", [LiveArgmax(), UnAdmitting(), LowestBucket()], ids=lambda planner: planner.name)
def test_planners_that_anticipate_are_refused(planner):
    with pytest.raises(AssertionError, match=r"changes the output: total variation 0\.\d+"):
        check_planner(planner, seeds=range(30), sizes=((2, 2, 2, 1), (2, 3, 1, 1)))


def two_token_model(num_positions, num_requests, confidence, cost):
    """p_0 = [.5, .5] and q_0 = [.2, .8] wherever the draft is; confidence depends on the first drawn token."""
    half, fifth = Fraction(1, 2), Fraction(1, 5)
    return TinyModel(
        vocab_size=2,
        num_positions=num_positions,
        num_requests=num_requests,
        target_probs=lambda request, text: (half, half),
        draft_probs=lambda request, text: (fifth, 1 - fifth),
        confidence=lambda request, text: confidence[text[:1]],
        cost=cost,
        history=PlannerHistory.start(num_positions),
    )


def distance_from_target(model, planner, **options):
    return total_variation(output_distribution(model, planner, **options), target_distribution(model))


def test_ties_broken_by_chance_are_refused():
    """After token 0 the second slot ties with the first, so that the request has two tickets instead of one."""
    model = two_token_model(2, 2, {(): 0.5, (0,): 1.0, (1,): 0.2}, CostCurve.linear(1.0, 0.3))
    assert distance_from_target(model, random_ties(4)) > 0
    assert distance_from_target(model, PLANNERS["lookahead"]) == 0


@pytest.mark.parametrize("name", ["convex_fill step", "lookahead step"])
def test_batch_wide_live_depth_is_refused(name):
    """A third position, drafted only after token 0, makes the bucket pay for the first one too."""
    cost = CostCurve([1, 4, 5], [1.0, 2.0, 3.0], staircase=True)
    model = two_token_model(3, 1, {(): 0.48, (0,): 0.95, (1,): 0.1}, cost)
    assert distance_from_target(model, PLANNERS[name], depth=live_depth) > Fraction(1, 50)
    for depth in DEPTHS.values():
        assert distance_from_target(model, PLANNERS[name], depth=depth) == 0


@pytest.mark.parametrize("name", [name for name in planner_names() if name != "fixed"])
def test_a_slots_own_drawn_token_as_score_is_refused(name):
    with pytest.raises(AssertionError, match="total variation"):
        check_planner(make_planner(name), scorer=drawn_token_scorer, seeds=range(30))


def test_published_example_of_scoring_with_the_drawn_token():
    """p = [.5, .5], q = [.2, .8], trimmed where q(x) < .5: the first token comes out as [.4, .6]."""
    model = two_token_model(1, 1, {(): 1.0}, CostCurve.linear(1.0, 0.4))

    def threshold(model, request, text, drafts):
        return [float(q >= 0.5) for q in drawn_token_scorer(model, request, text, drafts)]

    law = output_distribution(model, make_planner("early_stop"), scorer=threshold, length=1)
    assert law == {((0,),): Fraction(2, 5), ((1,),): Fraction(3, 5)}
    assert total_variation(law, target_distribution(model, 1)) == Fraction(1, 10)


def published_budget_example():
    """cost [1, 1.75, 1.8]; c_0 = .45; c_1 = .95 after token 0 and .3 after token 1; p_0 = [.5, .5], q_0 = [.2, .8]."""
    return two_token_model(2, 1, {(): 0.45, (0,): 0.95, (1,): 0.3}, CostCurve([1, 2, 3], [1.0, 1.75, 1.8]))


def test_published_example_of_a_budget_from_live_scores():
    law = output_distribution(published_budget_example(), LiveArgmax(), length=1)
    assert law == {((0,),): Fraction(3, 5), ((1,),): Fraction(2, 5)}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_published_budget_example_is_exact_under_our_planners(planner):
    law = output_distribution(published_budget_example(), planner, length=1)
    assert law == {((0,),): Fraction(1, 2), ((1,),): Fraction(1, 2)}


def test_the_models_that_are_enumerated_do_get_trimmed():
    """A suite whose models never trim, or never verify, would pass anything."""
    budgets = set()
    for seed in range(20):
        model = TinyModel.random(seed, 2, 2, 2)
        for plan_seed in range(5):
            survival = np.random.default_rng(plan_seed).random((2, 2)).cumprod(1)
            inputs = model.plan_input(survival, np.full(2, 2), model.history)
            budgets.add(make_planner("lookahead").plan(inputs).budget)
    assert {0, 1, 2, 3, 4} <= budgets


@settings(max_examples=60, deadline=None)
@given(inputs=plan_inputs(), name=st.sampled_from(sorted(PLANNERS)))
def test_later_survival_never_moves_an_earlier_slot(inputs, name):
    check_non_anticipation(PLANNERS[name], inputs, trials=4)


@pytest.mark.parametrize("planner", [LiveArgmax(), UnAdmitting(), LowestBucket()], ids=lambda planner: planner.name)
def test_the_property_check_refuses_planners_that_anticipate(planner):
    rng = np.random.default_rng(0)

    def check_many():
        for num_requests in (1, 2) * 25:
            survival = rng.random((num_requests, 3)).cumprod(1)
            cost = CostCurve(np.arange(1, 9), 1 + rng.choice([0, 0, 1.0], size=8).cumsum(), staircase=True)
            inputs = PlanInput(survival, np.full(num_requests, 3), num_requests, cost, PlannerHistory.start(3))
            check_non_anticipation(planner, inputs)

    with pytest.raises(AssertionError, match="anticipates"):
        check_many()


def test_the_planner_of_the_howto_is_exact():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "planner.md").read_text()
    code = "\n".join(block.split("```")[0] for block in page.split("```python\n")[1:])
    assert "check_planner(FloorPlanner())" in code
    exec(compile(code, "planner.md", "exec"), {"__name__": __name__})
