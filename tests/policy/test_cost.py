"""Cost curves and the cost model: shape, fit, online correction, files, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from trimtab.policy.cost import CostCurve, CostFileError, CostKey, CostModel, StepShape, isotonic, profile_points

KEY = CostKey("machine", "model", "float32")


def test_interpolates_between_points_and_extends_the_last_slope():
    curve = CostCurve([2, 4, 8], [10.0, 12.0, 20.0])
    assert curve([0, 2, 3, 8, 10]).tolist() == [10, 10, 11, 20, 24]
    assert CostCurve.linear(10, 0.5)([0, 1, 100]).tolist() == [10, 10.5, 60]
    assert CostCurve([4], [3.0])([1, 4, 9]).tolist() == [3, 3, 3]


def test_a_staircase_costs_the_next_bucket_up():
    curve = CostCurve([2, 4, 8, 16], [10.0, 12.0, 20.0, 30.0], staircase=True)
    assert curve([1, 2, 3, 4, 5, 8, 9]).tolist() == [10, 10, 12, 12, 20, 20, 30]
    assert curve([16, 24]).tolist() == [30, 30 + 8 * 18 / 12]
    assert curve.bucket_edges(1, 10).tolist() == [2, 4, 8, 10]


def test_plus_raises_the_whole_curve():
    curve = CostCurve([2, 4], [10.0, 12.0], staircase=True).plus(1.5)
    assert curve([1, 3]).tolist() == [11.5, 13.5]
    assert curve.staircase


@st.composite
def curves(draw):
    size = draw(st.integers(1, 8))
    tokens = draw(st.lists(st.integers(1, 40), min_size=size, max_size=size, unique=True).map(sorted))
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 3.0]), min_size=size, max_size=size))
    return CostCurve(tokens, 1.0 + np.cumsum(rises), staircase=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(curve=curves(), start=st.integers(0, 20), length=st.integers(0, 25))
def test_the_minorant_is_the_largest_convex_curve_below(curve, start, length):
    counts = np.arange(start, start + length + 1)
    ms = curve(counts)
    assert (np.diff(ms) >= 0).all()
    # At each count, the lowest chord between any two counts around it.
    expected = [
        min(
            ms[left] if left == right else ms[left] + (ms[right] - ms[left]) * (middle - left) / (right - left)
            for left in range(middle + 1)
            for right in range(middle, len(ms))
        )
        for middle in range(len(ms))
    ]
    assert curve.convex_minorant(start, start + length)(counts) == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(0.1, 100), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_isotonic_agrees_with_scikit_learn(values, seed):
    weights = np.random.default_rng(seed).integers(1, 5, len(values)).astype(float)
    expected = IsotonicRegression().fit_transform(np.arange(len(values)), values, sample_weight=weights)
    assert isotonic(values, weights) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "ms", "message"),
    [
        ([1, 2], [1.0, -2.0], "positive and finite"),
        ([1, 2], [0.0, 1.0], "positive and finite"),
        ([1, 2], [1.0, np.nan], "positive and finite"),
        ([1, 2], [2.0, 1.0], r"must not decrease, got \[2.0, 1.0\]; see isotonic"),
        ([2, 1], [1.0, 2.0], "strictly increasing"),
        ([1, 1], [1.0, 2.0], "strictly increasing"),
        ([-1, 1], [1.0, 2.0], "non-negative"),
        ([1, 2], [1.0], "as many tokens as ms"),
        ([], [], "at least one"),
    ],
)
def test_bad_curves_are_refused(tokens, ms, message):
    with pytest.raises(ValueError, match=message):
        CostCurve(tokens, ms)


def true_ms(shape, speed=1.0):
    tokens = 12 + 0.3 * max(shape.all_tokens - 8, 0)
    return speed * (tokens - 0.06 * shape.prefill_tokens + 0.05 * shape.num_requests + 4e-4 * shape.context_tokens)


def true_draft_ms(num_requests, num_steps):
    return 0.5 + (0.8 + 0.02 * num_requests) * num_steps


def profiled(noise=0.0, seed=0, **options):
    rng = np.random.default_rng(seed)
    points = [(shape, true_ms(shape) * (1 + noise * rng.normal())) for shape in profile_points(64, 512)]
    return CostModel(
        KEY, points, [(r, k, 0.5 + 0.8 * k + 0.02 * r * k) for r in (1, 8, 64) for k in (1, 4, 7)], **options
    )


def random_shape(rng):
    num_requests = int(rng.integers(1, 64))
    prefill = int(rng.integers(0, 100)) * int(rng.random() < 0.3)
    tokens = num_requests * int(rng.integers(1, 8))
    return StepShape(num_requests, tokens, prefill, num_requests * int(rng.integers(50, 800)))


def test_the_profile_covers_the_sizes_and_tells_the_terms_apart():
    shapes = profile_points(16, 300)
    sizes = {shape.all_tokens for shape in shapes}
    assert {1, 2, 3, 300} <= sizes
    assert len(shapes) < 30
    assert any(shape.prefill_tokens for shape in shapes)
    assert any(shape.context_tokens for shape in shapes)
    assert all(shape.num_requests <= 16 and shape.all_tokens <= 300 for shape in shapes)
    assert profile_points(1, 1)
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        profile_points(0, 5)


def test_a_profile_predicts_shapes_that_were_not_measured():
    model, rng = profiled(), np.random.default_rng(1)
    errors = [abs(model.predict(shape) / true_ms(shape) - 1) for shape in (random_shape(rng) for _ in range(200))]
    assert np.median(errors) < 0.05
    assert model.relative_error is None


def test_the_curve_is_the_model_seen_from_the_coming_step():
    model = profiled()
    curve = model.curve(num_requests=8, prefill_tokens=32, context_tokens=4000, extra_ms=2.0)
    for verified in (0, 5, 40):
        shape = StepShape(8, 8 + verified, 32, 4000)
        assert float(curve(shape.all_tokens)) == pytest.approx(model.predict(shape) + 2.0)


def test_a_lasting_slowdown_is_followed_within_some_steps():
    model, rng = profiled(noise=0.02), np.random.default_rng(2)
    for step in range(300):
        shape = random_shape(rng)
        model.observe(shape, true_ms(shape, 1.4) * (1 + 0.02 * rng.normal()))
        if step == 40:
            assert np.median(list(model._errors)[-20:]) < 0.08
    errors = [abs(model.predict(shape) / true_ms(shape, 1.4) - 1) for shape in (random_shape(rng) for _ in range(200))]
    assert np.median(errors) < 0.02
    assert model.relative_error < 0.03


def test_stalled_steps_move_little():
    model, rng = profiled(noise=0.02), np.random.default_rng(3)
    for _ in range(200):
        shape = random_shape(rng)
        model.observe(shape, true_ms(shape) * (1 + 0.02 * rng.normal()))
    shape = StepShape(8, 30, 0, 3000)
    before = model.predict(shape)
    for _ in range(3):
        model.observe(shape, 50 * before)
    assert model.predict(shape) < 1.15 * before
    model.observe(shape, np.nan)
    model.observe(shape, -1.0)
    assert np.isfinite(model.predict(shape))


def test_a_wrong_profile_is_corrected_where_steps_are_seen():
    points = [(StepShape(min(count, 64), count), 10.0 if count < 100 else 40.0) for count in (1, 8, 32, 64, 128, 256)]
    model, rng = CostModel(KEY, points), np.random.default_rng(4)
    for _ in range(2000):
        count = int(np.exp(rng.uniform(0, np.log(256))))
        model.observe(StepShape(1, count), 10 + 0.2 * count)
    shapes = [StepShape(1, count) for count in (1, 8, 32, 64, 128, 250)]
    for shape in shapes:
        assert model.predict(shape) == pytest.approx(10 + 0.2 * shape.num_tokens, rel=0.15)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_curves_never_decrease_whatever_is_observed(seed):
    model, rng = profiled(noise=0.3, seed=seed), np.random.default_rng(seed)
    for _ in range(30):
        model.observe(random_shape(rng), float(rng.lognormal(2, 2)))
    ms = model.curve(4, int(rng.integers(0, 200)), 1000)(np.arange(4, 1000))
    assert (np.diff(ms) >= 0).all()
    assert (ms > 0).all()


def test_noise_in_the_profile_is_made_monotone_by_the_median():
    points = [(StepShape(1, 1), ms) for ms in (5.0, 1.0, 1.1)] + [(StepShape(2, 2), ms) for ms in (0.9, 1.0, 0.8)]
    model = CostModel(KEY, [*points, (StepShape(4, 4), 2.0)])
    assert model.knot_ms.tolist() == pytest.approx([1.0, 1.0, 2.0])


def test_with_buckets_the_curve_is_a_staircase():
    points = [(StepShape(1, count), 1.0 + count) for count in (1, 3, 4, 8)]
    model = CostModel(KEY, points, buckets=[4, 8])
    curve = model.curve(1)
    assert curve.staircase
    assert float(curve(2)) == float(curve(4)) < float(curve(5)) == float(curve(8))


def test_drafting_cost_by_requests_and_steps():
    model = profiled()
    for num_requests, num_steps in ((2, 3), (32, 7), (64, 2)):
        assert model.draft_ms(num_requests, num_steps) == pytest.approx(true_draft_ms(num_requests, num_steps), 0.02)
    assert model.draft_curve(4, 5) == pytest.approx([model.draft_ms(4, steps) for steps in range(6)])
    for _ in range(200):
        model.observe_draft(8, 4, 10.0)
    assert model.draft_ms(8, 4) == pytest.approx(10.0, rel=0.02)
    free = CostModel.constant(2.0, 0.5)
    assert free.draft_ms(8, 4) == 0.0
    assert float(free.curve(4)(100)) == pytest.approx(52.0, rel=0.02)
    free.observe_draft(8, 4, 3.0)
    assert free.draft_ms(8, 4) == pytest.approx(3.0)


def test_a_saved_model_comes_back(tmp_path):
    model, rng = profiled(noise=0.02, buckets=[16, 64, 256, 512]), np.random.default_rng(5)
    for _ in range(50):
        shape = random_shape(rng)
        model.observe(shape, 1.3 * true_ms(shape))
        model.observe_draft(shape.num_requests, 3, 4.0)
    model.save(tmp_path / "deep" / "cost.json")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cost.json"]
    loaded = CostModel.load(tmp_path / "deep" / "cost.json", KEY)
    for shape in (random_shape(rng) for _ in range(20)):
        assert loaded.predict(shape) == pytest.approx(model.predict(shape))
    assert loaded.draft_ms(4, 3) == pytest.approx(model.draft_ms(4, 3))
    assert loaded.buckets == (16, 64, 256, 512)


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "cost.json"
    with pytest.raises(FileNotFoundError):
        CostModel.load(path, KEY)
    profiled().save(path)
    with pytest.raises(CostFileError, match=r"measured for .*float32.*, not .*bfloat16.*; delete it"):
        CostModel.load(path, CostKey("machine", "model", "bfloat16"))
    content = json.loads(path.read_text())
    for change in (
        {"version": 99},
        {"steps": []},
        {"weights": [1.0]},
        {"weights": [1, 2, 3, None]},
        {"steps": [[1, 2]]},
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(CostFileError):
            CostModel.load(path, KEY)
    for text in ("", "[]", "{"):
        path.write_text(text)
        with pytest.raises(CostFileError, match="damaged"):
            CostModel.load(path, KEY)


def test_bad_profiles_are_refused():
    with pytest.raises(ValueError, match="at least one step without prefill and context"):
        CostModel(KEY, [(StepShape(1, 1, prefill_tokens=5), 1.0)])
    with pytest.raises(ValueError, match="measured times must be positive and finite, got -1"):
        CostModel(KEY, [(StepShape(1, 1), -1.0)])
    with pytest.raises(ValueError, match="positive and finite, got 0"):
        CostModel(KEY, [(StepShape(1, 1), 1.0)], [(1, 1, 0.0)])
    with pytest.raises(ValueError, match="sizes must not be negative"):
        StepShape(1, -1)
